"""A deploy that also sets up services is one command: one set of connections, and so one set of answers."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest

from provision.cli.cluster import unfinished
from provision.errors import NodesFailedError
from provision.model import Inventory, Node, Result
from provision.services import limits
from provision.session import session
from provision.tasks import deploy


class StopHereError(Exception):
    pass


BUNDLE = SimpleNamespace(manifest=SimpleNamespace(release_id="0" * 12))


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    monkeypatch.setattr(deploy, "open_bundle", lambda _: BUNDLE)
    nodes = (Node("gpu01", "10.0.0.1"), Node("gpu02", "10.0.0.2"))
    return Inventory(
        tmp_path / "inventory.yaml", PurePosixPath("/opt/env"), nodes, services={"limits": limits.Options()}
    )


def test_a_deploy_and_its_services_share_their_connections(monkeypatch, cluster):
    made, used = [], []

    class Pool:
        def __init__(self, inventory, prompts, _warn):
            made.append((self, prompts))

        def __getitem__(self, node):
            used.append(self)
            return SimpleNamespace(node=node, run=lambda *_, **__: Result(0, ""))

        def close(self):
            used.append("closed")

    def examine(*_, **__):
        raise StopHereError

    monkeypatch.setattr(session, "Connections", Pool)
    monkeypatch.setattr(deploy.examine, "examine", examine)
    prompts = object()
    with pytest.raises(StopHereError), session.Session(cluster, prompts=prompts) as opened:
        deploy.deploy(opened, Path("x.ccb"))
    ((pool, asked),) = made
    assert asked is prompts
    assert used == [pool, pool, "closed"]  # the services of two nodes


def test_failed_service_on_one_node_stops_the_deploy_on_all(monkeypatch, cluster):
    """Nothing was deployed anywhere yet, so ``deploy --retry-failed`` means every node."""

    def fail(*_, **__):
        raise NodesFailedError("limits failed on 1 of 2 nodes", reasons={"gpu02": "no room"})

    monkeypatch.setattr(deploy.services, "apply", fail)
    with pytest.raises(NodesFailedError) as failed:
        deploy.deploy(session.Session(cluster), Path("x.ccb"))
    assert unfinished(failed.value, cluster.nodes) == ("gpu01", "gpu02")
