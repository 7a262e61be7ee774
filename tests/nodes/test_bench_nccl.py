"""``clusterctl bench nccl`` over two nodes, with gloo."""

import itertools
import json
import time
from pathlib import PurePosixPath

import pytest
from training import PREFIX

from provision.netbench import OPS

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(600)]

SIZES = (1 << 18, 1 << 20)
QUICK = "from provision.tasks import bench; bench.SECONDS = 0.1"  # for each row, which still has five iterations


def left(nodes):
    """Traces of a measurement on the nodes: processes, and folders of runs."""
    script = f"ls -d {PurePosixPath(PREFIX).parent}/runs/*-bench-* 2>/dev/null; true"
    return nodes.marked() + [line for node in nodes.nodes for line in nodes.on(node, "sh", "-c", script).splitlines()]


def test_every_operation_is_measured_and_right(training_nodes):
    result = training_nodes.run("bench", "nccl", "--sizes", "256K,1M", "--json", first=QUICK)
    assert result.returncode == 0, result.stderr
    message = json.loads(result.stdout)
    assert (message["backend"], message["world_size"]) == ("gloo", 2)
    assert not message["skipped"]
    assert [(row["op"], row["bytes"]) for row in message["rows"]] == list(itertools.product(OPS, SIZES))
    for row in message["rows"]:
        assert row["wrong"] == 0
        assert row["busbw"] > 1e6
        assert row["iterations"] >= 5
    assert left(training_nodes) == []


def test_pairs_and_operations_in_words(training_nodes):
    result = training_nodes.run("bench", "nccl", "--pairs", "--ops", "all-reduce", "--sizes", "1M")
    assert result.returncode == 0, result.stderr
    assert "1 pair, each way:" in result.stdout
    assert "a single pair cannot be compared" in result.stdout
    assert "node[01-02] (world size 2): gloo over eth0" in result.stdout


def test_tuning_needs_nccl(training_nodes):
    inventory = training_nodes.folder / "inventory.yaml"
    before = inventory.read_bytes()
    result = training_nodes.run("bench", "nccl", "--tune", "--write")
    assert result.returncode == 2
    assert "gloo is used, which has no such settings" in result.stderr
    assert inventory.read_bytes() == before
    assert left(training_nodes) == []


def test_killed_rank_is_named_and_stops_the_others(training_nodes):
    running = training_nodes.start("bench", "nccl", "--sizes", "64M", until="Measuring the network")
    until = time.monotonic() + 60
    while not training_nodes.marked("LOCAL_RANK", among=["node02"]):
        assert time.monotonic() < until, running.output
    training_nodes.kill("node02", training_nodes.rank("node02"))
    assert running.finish() == 5
    assert "rank 1: killed by SIGKILL" in running.output
    assert left(training_nodes) == []
