"""Scripts, run here, collect a run from its nodes; and the diagnosis with nodes that do not answer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for recorded_runs; last, so that it hides no module

from recorded_runs.cases import FOLDER

from provision.errors import UsageError
from provision.inventory import load
from provision.model import Result
from provision.session import Session
from provision.ssh.remote import NodeUnreachable
from provision.tasks import diagnose as task


class Shell:
    """A node whose scripts run here."""

    def __init__(self, node):
        self.node = node

    def run(self, text, **_):
        done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, timeout=60, check=False)
        return Result(done.returncode, done.stdout, done.stderr)


class Nodes:
    """Connections to nodes that share a folder, of which node03 is down."""

    def __getitem__(self, node):
        if node.name == "node03":
            raise NodeUnreachable(node, "no route to host")
        return Shell(node)


@pytest.fixture
def cluster(tmp_path):
    """Three nodes and a run of two of them, whose folder they share."""
    path = tmp_path / "inventory.yaml"
    nodes = "".join(f"  node0{number}: 192.0.2.{number}\n" for number in (1, 2, 3))
    path.write_text(f"prefix: {tmp_path}/current\nnodes:\n{nodes}")
    for rank, name in enumerate(("node01", "node02")):
        logs = tmp_path / "runs" / "20261122-071500-sft-3f2a" / "logs" / f"node{rank}"
        shutil.copytree(FOLDER / "cuda_oom" / name, logs)
        state = {"run": "20261122-071500-sft-3f2a", "node": name, "node_rank": rank, "nnodes": 2, "state": "failed"}
        (logs / "state.json").write_text(json.dumps(state))
    return load(path)


def test_run_is_diagnosed_from_the_files_of_its_nodes(cluster):
    result = task.diagnose(Session(cluster, connections=Nodes()), "3f2a")
    assert (result.run, result.state) == ("20261122-071500-sft-3f2a", "failed")
    assert (result.verdict.node, result.verdict.rank, result.verdict.first.cause.id) == ("node02", 3, "cuda.oom")
    assert result.missing == ()  # node03 is down, and no part of this run


def test_an_agent_that_died_without_reporting_is_the_failure(cluster):
    for rank in (0, 1):
        folder = cluster.path.parent / "runs" / "20261122-071500-sft-3f2a" / "logs" / f"node{rank}"
        (folder / "run.log").write_text("")
        (folder / "events.jsonl").write_text("")
        state = json.loads((folder / "state.json").read_text())
        state |= {"state": "running", "pid": 999999999, "start": "1", "time": 1795331700.0, "attempt": 1}
        (folder / "state.json").write_text(json.dumps(state))
    result = task.diagnose(Session(cluster, connections=Nodes()), None)
    assert result.state == "failed"
    assert result.verdict.first.cause.id == "agent.killed"


def test_a_run_that_does_not_exist(cluster):
    with pytest.raises(UsageError, match="no run matches nothing"):
        task.diagnose(Session(cluster, connections=Nodes()), "nothing")
