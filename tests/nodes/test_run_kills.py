"""Whatever dies or stands still: every process of the run goes, on every node, and the reason is named.

Real agents, ssh and network on two nodes, with a trainer that takes ten steps a second until it is stopped.
Each half of an agent and each launcher is killed in tests/unit/test_agent_nodes.py.
"""

import json
import signal
import subprocess
import time
from ipaddress import IPv4Network

import pytest
from training import RUNS, wait_until

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(300)]

LONG = ("--output", "out", "steps.py", "--", "--steps", "100000", "--output", "out")
FAST = 45  # seconds until every process of a run must have exited: it would run for 10,000 s


@pytest.fixture
def training(plain_nodes):
    yield plain_nodes
    for each in plain_nodes.marked():  # what one case leaves must not fail the next
        node, _, pid = each.partition(":")
        plain_nodes.box.enter(node, ["kill", "-9", pid])


@pytest.fixture
def attached(training):
    """A run that trains, with its command."""
    attached = training.start("train", "--nodes", "2", "--lost-after", "5", *LONG, until=r"step 25 ")
    yield attached
    attached.end()
    training.run("stop", training.last_run().name)


def test_killed_rank_fails_the_run_and_is_named(training, attached):
    training.kill("node02", training.rank("node02"))
    training.gone_within(FAST)
    assert attached.finish() == 6, attached.output
    assert "node02" in attached.output
    assert "SIGKILL" in attached.output, attached.output
    assert training.record()["state"] == "failed"


def test_killed_agent_stops_the_other_node_and_stop_cleans_up(training, attached):
    training.on("node02", "kill", "-9", *map(str, training.agent("node02")))
    training.gone_within(FAST, among=["node01"])
    assert attached.finish() == 6, attached.output
    stopped = training.run("stop", training.last_run().name)
    assert stopped.returncode == 0, stopped.stderr
    assert training.marked() == []


def test_run_survives_its_command_and_network_and_a_later_failure_stops_all_nodes(training, attached):
    run = training.last_run().name
    for node in training.nodes:
        sessions = "read -r name <$p/comm && [ $name = sshd ] && [ ${p#/proc/} != 1 ]"
        script = f"for p in /proc/[0-9]*; do {sessions} && kill -9 ${{p#/proc/}}; done; :"
        training.on(node, "sh", "-c", script)
    goes_on(training, run)
    assert attached.process.poll() is None
    controller = str(IPv4Network(training.box.subnet).network_address + 1)
    for node in training.nodes:
        route(training, node, "add", controller)
    try:
        time.sleep(7)  # longer than --lost-after: the nodes still hear each other
        goes_on(training, run)
    finally:
        for node in training.nodes:
            route(training, node, "del", controller)
    assert attached.process.poll() is None
    attached.send(signal.SIGKILL)
    attached.process.wait()
    goes_on(training, run)
    training.kill("node01", training.rank("node01"))
    training.gone_within(FAST)
    shown = training.run("status", "--json")
    assert '"failed"' in shown.stdout, shown.stdout


def test_node_without_power_stops_the_others_and_one_of_them_notifies(training):
    """Rank 0's node, which decides and notifies otherwise."""
    notify = 'cat >>"$HOME/notified"'
    options = ("--nodes", "2", "--lost-after", "5", "--notify", notify)
    attached = training.start("train", *options, *LONG, until=r"step 25 ")
    run = training.last_run().name
    try:
        training.box.power_off("node01")
        training.gone_within(5 + FAST, among=["node02"])  # --lost-after 5
        read = ["cat", "/home/trainer/notified"]
        wait_until(lambda: training.box.enter("node02", read).returncode == 0, "node02 notifies", 30)
        # The command still looks for the node that is off; the user may interrupt it.
    finally:
        training.box.power_on("node01")
    assert attached.finish() == 6, attached.output
    assert "node01" in attached.output
    [event] = map(json.loads, training.on("node02", *read).splitlines())
    assert (event["event"], event["state"], event["run"], event["node"]) == ("failure", "failed", run, "node01")
    assert event["text"] == "its agent died without reporting"
    attached.end()
    training.run("stop", run)


def test_broken_network_between_the_nodes_stops_both(training, attached):
    try:
        training.box.unplug("node02")
        training.gone_within(5 + FAST, among=["node01"])
        training.gone_within(5 + FAST, among=["node02"])
    finally:
        training.box.plug("node02")
    assert attached.finish() == 6, attached.output


def test_a_stopped_rank_is_found_and_named(training, attached):
    training.kill("node02", training.rank("node02"), signal.SIGSTOP)
    training.gone_within(120)  # without the agent it would not change
    assert attached.finish() == 6, attached.output
    assert "rank 1" in attached.output
    assert "SIGSTOP" in attached.output


def route(training, node, verb, address):
    """A node's way to an address, blocked or opened, by this machine's own ip: minimal nodes have none."""
    pid = str(training.box.node_root(node)).split("/")[2]
    subprocess.run(["nsenter", "--target", pid, "--net", "ip", "route", verb, "blackhole", address], check=True)


def goes_on(training, run):
    """Rank 0 makes some more steps."""
    seen = steps(training, run)
    wait_until(lambda: steps(training, run) > seen + 3, "the run goes on", 120)


def steps(training, run):
    """Steps that rank 0 has logged."""
    return int(training.on("node01", "sh", "-c", f"cat {log(run)} | wc -l"))


def log(run):
    return f"{RUNS}/{run}/job/out/trainer_log.jsonl"
