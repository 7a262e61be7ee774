"""A deploy that also sets up services is one command: one set of connections, and so one set of answers."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest

from provision.model import Inventory, Node, ignore
from provision.services import limits
from provision.tasks import deploy, services, stages


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
