"""Read-only commands show the received answers, name failed nodes with their reasons, and exit with 5."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest

from provision.errors import NodesFailedError, UsageError
from provision.model import Inventory, Node, Result
from provision.run.checkpoint import Newest, Sources
from provision.run.found import merge_runs, parse_runs
from provision.session import Session
from provision.ssh import remote
from provision.ssh.remote import NodeUnreachable
from provision.tasks.collect import Collection

NODES = (Node("gpu01", "127.0.0.1"), Node("gpu02", "127.0.0.2"))
LISTING = "current 0123456789ab\nrelease 0123456789ab ok 1700000000\nend\n"


def state(node, rank):
    about = {"run": "r1", "node": node, "node_rank": rank, "nnodes": 2, "state": "failed", "uid": 0, "pid": 7}
    return f"me 0\nboot b\npart r1/logs/node{rank} alice\nstate {json.dumps(about)}\n"


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Two nodes of which one does not answer; ``answers`` are looked up by a word of the script."""
    (tmp_path / "inventory.yaml").write_text("prefix: /opt/llm/current\nnodes: {gpu01: 127.0.0.1, gpu02: 127.0.0.2}\n")
    answers = {"this node's releases": LISTING, "Lists the newest runs": state("gpu01", 0)}

    class There:
        def __init__(self, node):
            self.node = node

        def run(self, script, **_options):
            if self.node.name == "gpu02":
                raise NodeUnreachable(self.node, "no route to host")
            for word, out in answers.items():
                if word in script:
                    return Result(0, out)
            return Result(0, "at 3\n2026-11-23T10:00:00.000Z [0] hello\n")

        def close(self):
            pass

    monkeypatch.setattr(remote.Connections, "__getitem__", lambda _self, node: There(node))
    return SimpleNamespace(answers=answers, folder=tmp_path)


def test_releases_of_the_nodes_that_answer_are_listed(cluster, run):
    code, out, err = run("releases")
    assert code == 5
    assert "gpu01:" in out
    assert "0123456789ab" in out
    assert "gpu02: no route to host" in err
    assert "clusterctl releases --exclude gpu02" in err
    code, out, _ = run("releases", "--json")
    assert list(json.loads(out)["nodes"]) == ["gpu01"]
    assert json.loads(out)["error"]["reasons"] == {"gpu02": "no route to host"}


def test_missing_logs_of_a_node_are_a_failure(cluster, run):
    code, out, err = run("logs", "r1")
    assert "hello" in out
    assert (code, "gpu02: no route to host" in err) == (5, True), err
    assert "no logs from gpu02" in err


def test_metrics_from_another_node_than_the_first_are_marked(cluster, run):
    cluster.answers["Lists the newest runs"] = state("gpu01", 1)
    _, _, err = run("metrics", "r1")
    assert "these are the numbers of gpu01; no answer from gpu02" in err


def test_a_report_without_a_silent_node_is_written_and_named(cluster, run):
    code, out, err = run("report", "r1")
    assert code == 5
    assert "report-r1.html: 1 run" in out
    assert "gpu02: no route to host" in err
    assert "clusterctl report r1" in err
    assert "gpu02 (no route to host)" in (cluster.folder / "report-r1.html").read_text()


def test_a_checkpoint_that_lacks_a_nodes_files_is_not_called_incomplete_for_all(tmp_path, monkeypatch):
    inventory = Inventory(Path(tmp_path, "inventory.yaml"), PurePosixPath("/opt/llm/current"), NODES)
    tmp_path.chmod(0o755)
    found = merge_runs(
        parse_runs(name, state(name, rank), ["gpu01", "gpu02"]) for rank, name in enumerate(("gpu01", "gpu02"))
    )
    monkeypatch.setattr(Collection, "offers", lambda _self: {"gpu01": {"output": "/out", "offer": {}}})
    monkeypatch.setattr(Collection, "newest", lambda _self, _offers: Newest())
    silent = Collection(Session(inventory), found["r1"], tmp_path, {"gpu02": "no route"})
    with pytest.raises(NodesFailedError, match="no complete checkpoint without gpu02") as failed:
        silent.collect("checkpoints", fp32=False)
    assert failed.value.reasons == {"gpu02": "no route"}
    assert tmp_path.stat().st_mode & 0o777 == 0o700  # logs and configurations hold tokens
    every = Collection(Session(inventory), found["r1"], tmp_path, {})
    with pytest.raises(UsageError, match="no complete checkpoint"):
        every.collect("checkpoints", fp32=False)


def test_fp32_weights_are_made_on_a_node_that_answered(tmp_path, monkeypatch):
    """Also where rank 0's node gave no answer, so that its output folder is not known."""
    inventory = Inventory(Path(tmp_path, "inventory.yaml"), PurePosixPath("/opt/llm/current"), NODES)
    found = merge_runs(
        parse_runs(name, state(name, rank), ["gpu01", "gpu02"]) for rank, name in enumerate(("gpu01", "gpu02"))
    )
    whole = Sources({"gpu02": frozenset({"checkpoint-3/global_step3/x_optim_states.pt"})})
    made = []
    monkeypatch.setattr(Collection, "offers", lambda _self: {"gpu02": {"output": "/out", "offer": {}}})
    monkeypatch.setattr(Collection, "newest", lambda _self, _offers: Newest("checkpoint-3"))
    monkeypatch.setattr(Collection, "take_output", lambda *_: whole)
    monkeypatch.setattr(Collection, "weights", lambda _, head, *given, **__: made.append((head.name, *given[:2])))
    Collection(Session(inventory), found["r1"], tmp_path, {}).collect("checkpoints", fp32=True)
    assert made == [("gpu02", "/out", "checkpoint-3")]
