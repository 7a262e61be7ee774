"""A deploy that also sets up services is one command: one set of connections, and so one set of answers."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest

from provision.errors import NodesFailedError
from provision.model import Inventory, Node, ignore
from provision.services import limits
from provision.tasks import deploy, services, stages
from provision.tasks.failed import undone


class StopHereError(Exception):
    pass


def test_a_deploy_and_its_services_share_their_connections(monkeypatch, tmp_path):
    made, used = [], []

    class Pool:
        def __init__(self, inventory, prompts):
            made.append((self, prompts))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            used.append("closed")

    def examine(_inventory, _nodes, connections, *_, **__):
        used.append(connections)
        raise StopHereError

    monkeypatch.setattr(deploy, "Connections", Pool)
    monkeypatch.setattr(services, "Connections", Pool)
    monkeypatch.setattr(deploy, "open_bundle", lambda _: SimpleNamespace(manifest=SimpleNamespace(release_id="0" * 12)))
    monkeypatch.setattr(stages.Work, "carry_out", lambda work, *_, **__: used.append(work._connections))
    monkeypatch.setattr(deploy, "_examine", examine)
    inventory = Inventory(
        tmp_path / "inventory.yaml",
        PurePosixPath("/opt/env"),
        (Node("gpu01", "10.0.0.1"),),
        services={"limits": limits.Options()},
    )
    prompts = object()
    with pytest.raises(StopHereError):
        deploy.deploy(inventory, inventory.nodes, Path("x.ccb"), prompts=prompts, emit=ignore)
    ((pool, asked),) = made
    assert asked is prompts
    assert used[-1] == "closed"
    assert set(used[:-1]) == {pool}


def test_services_that_fail_on_one_node_leave_the_deploy_undone_on_all(monkeypatch, tmp_path):
    """Nothing was deployed anywhere yet, so ``deploy --retry-failed`` means every node."""

    def fail(*_, **__):
        raise NodesFailedError("limits failed on 1 of 2 nodes", reasons={"gpu02": "no room"})

    class Pool:
        def __init__(self, *_): ...
        def __enter__(self):
            return self

        def __exit__(self, *_): ...

    monkeypatch.setattr(deploy, "Connections", Pool)
    monkeypatch.setattr(deploy, "open_bundle", lambda _: SimpleNamespace(manifest=SimpleNamespace(release_id="0" * 12)))
    monkeypatch.setattr(deploy.services, "apply", fail)
    nodes = (Node("gpu01", "10.0.0.1"), Node("gpu02", "10.0.0.2"))
    inventory = Inventory(
        tmp_path / "inventory.yaml", PurePosixPath("/opt/env"), nodes, services={"limits": limits.Options()}
    )
    with pytest.raises(NodesFailedError) as failed:
        deploy.deploy(inventory, nodes, Path("x.ccb"), emit=ignore)
    assert undone(failed.value, nodes) == ("gpu01", "gpu02")
