"""``verify`` with nodes that have no release, do not answer, or were changed: each is reported separately."""

from pathlib import Path, PurePosixPath

import pytest

from provision.cli import main
from provision.errors import PreflightError
from provision.model import Inventory, Node, Result
from provision.session import session
from provision.ssh.remote import RemoteError
from provision.tasks import releases

ID, OLD = "0123456789ab", "ba9876543210"
LISTS = {
    "good": f"current {ID}\nrelease {ID} ok 1\nend\n",
    "changed": f"current {ID}\nrelease {ID} ok 1\nend\n",
    "empty": "end\n",
    "idle": f"release {OLD} ok 1\nend\n",
    "cut": "current",
}


class Nodes:
    """What nodes answer, by their names."""

    def __init__(self, *_):
        pass

    def close(self):
        pass

    def __getitem__(self, node):
        self.node = node
        return Shell(node)


class Shell:
    def __init__(self, node):
        self.node = node

    def run(self, script, **_):
        name = self.node.name
        if name == "down":
            raise RemoteError(self.node, "connection refused")
        if "this node's releases" in script:
            return Result(0, LISTS[name], "")
        return Result(0, ("bad changed bin/x\n" if name == "changed" else "") + "checked 7\nend\n", "")


@pytest.fixture(autouse=True)
def nodes(monkeypatch):
    monkeypatch.setattr(session, "Connections", Nodes)


def inventory(*names):
    return Inventory(Path("i.yaml"), PurePosixPath("/opt/llm/current"), tuple(Node(n, "10.0.0.1") for n in names))


def verify(*names, release=None):
    cluster = inventory(*names)
    return releases.verify_release(session.Session(cluster), release)


def test_node_without_a_release_does_not_stop_the_verification():
    result = verify("good", "empty", "changed", "idle", "down", "cut")
    found = {finding.node: (finding.verdict, finding.observed, finding.fix) for finding in result.findings}
    assert found["good"] == ("OK", f"release {ID}: 7 files are unchanged", "")
    assert found["changed"][1] == f"release {ID}: 1 changed (bin/x)"
    assert found["empty"][1:] == ("has no current release; its releases: none", "clusterctl deploy --limit empty")
    assert found["idle"][1:] == (
        f"has no current release; its releases: {OLD}",
        f"clusterctl rollback --to {OLD} --limit idle",
    )
    assert result.absent == ("empty", "idle")
    assert result.unread == {"down": "connection refused", "cut": "its answer is incomplete"}


def test_a_named_release_that_some_nodes_lack():
    result = verify("good", "idle", release=ID[:4])
    assert result.absent == ("idle",)
    assert result.findings[1].observed == f"has no release {ID[:4]}; its releases: {OLD}"
    with pytest.raises(PreflightError, match="no node has a release ffff"):
        verify("good", "idle", release="ffff")


def test_verify_reports_every_node_and_exits_with_5(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = ("good", "empty", "changed", "down")
    lines = "".join(f"  {name}: 10.0.0.{number}\n" for number, name in enumerate(names, 1))
    Path("inventory.yaml").write_text(f"prefix: /opt/llm/current\nnodes:\n{lines}")
    with pytest.raises(SystemExit) as done:
        main(["verify"])
    shown = capsys.readouterr()
    text = " ".join((shown.out + shown.err).split())
    assert done.value.code == 5, text
    assert "3 of 4 nodes differ from what was deployed: 1 changed, 1 without a release, 1 unreadable" in text
    assert f"good: release {ID}" in text
    assert "connection refused" in text
    assert "clusterctl deploy --repair" in text
    assert "clusterctl deploy --limit empty" in text
    assert "rollback" not in text
    assert "nothing was changed" not in text
