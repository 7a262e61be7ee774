"""A rank that delays the others is named on real nodes, over gloo, while its data loader sleeps."""

import json

import pytest
from training import RUNS

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(300)]

FAULT = "/tmp/faults/slow-1"


def test_sleeping_data_loader_is_named_until_it_is_over(training_nodes):
    training_nodes.on("node02", "sh", "-c", f"mkdir -p {FAULT.rpartition('/')[0]} && echo 0.2 >{FAULT}")
    words = ("uneven.py", "--", "--step", "0.1", "--faults", FAULT.rpartition("/")[0])
    setting = ("--env", "CLUSTERCTL_STRAGGLER_ROUND=1")
    run = training_nodes.start("train", "--nodes", "2", *setting, *words, until=r"the others wait for rank")
    try:
        last = run.output.splitlines()[-1]
        assert "rank 1 on node02" in last, run.output
        assert "data loader" in last
        name = training_nodes.last_run().name
        shown = training_nodes.run("status", name)
        assert "the others wait for rank 1 on node02" in shown.stdout, shown.stdout
        training_nodes.on("node02", "rm", FAULT)
        run.until(r"rank 1 on node02 no longer delays the others")
        events = f"{RUNS}/{name}/logs/node1/events.jsonl"
        stack = json.loads(training_nodes.on("node02", "grep", '"event": "stack"', events).splitlines()[0])
        assert stack["text"].startswith("rank 1 was in ")
    finally:
        training_nodes.run("stop", training_nodes.last_run().name)
        run.end()
