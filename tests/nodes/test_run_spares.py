"""A node of a run loses its power: a spare takes its rank, and the losses are those of an undisturbed run."""

import json
import re
import time

import pytest
from training import RUNS

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(400)]

STEPS = 60
ESTABLISHED = "01"  # in /proc/net/tcp
WORDS = ("--output", "out", "steps.py", "--", "--steps", STEPS, "--output", "out", "--save-every", "10", "--whole")
# One agent is connected to rank 0's, and passes on the frames of the others, as some agents of a large run do.
PASSED_ON = "from functools import partial\nfrom provision.tasks import train\ntrain.Link = partial(train.Link, most=1)"
MOST = 30.0  # seconds from the loss to the start of the program on the spare


def losses(training, run, node):
    """By step, from the trainer's own log."""
    shown = training.on(node, "cat", f"{RUNS}/{run}/job/out/trainer_log.jsonl")
    return {line["current_steps"]: line["loss"] for line in map(json.loads, shown.splitlines())}


def events(training, run, node):
    path = f"{RUNS}/{run}/logs/node{training.nodes.index(node)}/events.jsonl"
    return [json.loads(line) for line in training.on(node, "cat", path).splitlines()]


def connections(training, run, node):
    """How many agents are connected to the one of this node, from the kernel's table."""
    link = json.loads(training.on(node, "cat", f"{RUNS}/{run}/plan-{training.nodes.index(node)}.json"))["link"]
    rows = [line.split() for line in training.on(node, "cat", "/proc/net/tcp").splitlines()[1:]]
    return sum(1 for row in rows if int(row[1].split(":")[1], 16) == link["port"] and row[3] == ESTABLISHED)


def test_a_spare_replaces_a_node_without_power(three_nodes):
    training = three_nodes
    whole = training.run("train", "--nodes", "2", *WORDS)
    assert whole.returncode == 0, whole.stderr
    expected = losses(training, training.last_run().name, "node01")
    assert sorted(expected) == list(range(1, STEPS + 1))

    words = ("--nodes", "2", "--spares", "1", "--lost-after", "10", *WORDS)
    attached = training.start("train", *words, until=r"step 25 ", first=PASSED_ON)
    run = training.last_run().name
    assert connections(training, run, "node01") == 1
    off = time.time()
    training.box.power_off("node02")
    try:
        code = attached.finish()
        assert code == 0, attached.output
        assert re.search(r"node02 lost \(.*\): spare node03 takes rank 1", attached.output), attached.output
        assert "  node02: out of the run\n" in attached.output
        found = losses(training, run, "node01")
        assert found == expected
        there = events(training, run, "node03")
        attempts = [event for event in there if event["event"] == "attempt"]
        assert [event["attempt"] for event in attempts] == [1, 2], there
        attempt = attempts[-1]
        assert attempt["nodes"] == ["node01", "node03"]
        assert attempt["checkpoint"] in ("step-20", "step-30")  # it trains on until the power is off
        (started,) = [event for event in there if event["event"] == "started"]
        took = started["time"] - off
        assert took < MOST, took
        record = training.record(run)
        assert (record["nodes"], record["state"]) == (["node01", "node03"], "finished")
        shown = training.run("status", run)
        assert "finished" in shown.stdout, shown.stdout + shown.stderr
    finally:
        training.box.power_on("node02")
