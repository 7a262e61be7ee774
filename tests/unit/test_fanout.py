from __future__ import annotations

import signal
import threading

import pytest

from provision.errors import InterruptedByUser, UsageError
from provision.model import Node
from provision.ssh.fanout import fan_out

NODES = [Node(f"n{number}", "") for number in range(10)]


def test_results_are_in_the_order_of_the_nodes():
    events = [threading.Event() for _ in NODES]

    def work(node):  # the last is first to end
        number = int(node.name[1:])
        if number + 1 < len(NODES):
            assert events[number + 1].wait(60)
        events[number].set()
        return number

    results = fan_out(NODES, work)
    assert list(results.items()) == [(f"n{number}", number) for number in range(10)]


def test_a_node_that_fails_stops_no_other():
    def work(node):
        if node.name == "n3":
            raise UsageError("no")
        return node.name

    results = fan_out(NODES, work)
    assert isinstance(results["n3"], UsageError)
    assert len(results) == 10


def test_the_limit_holds():
    running, most = 0, 0
    lock, full = threading.Lock(), threading.Barrier(3)

    def work(_node):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        full.wait(60)
        with lock:
            running -= 1

    fan_out(NODES[:9], work, limit=3)
    assert most == 3


def test_exception_is_raised_after_all_nodes_finish():
    finished = []

    def work(node):
        if node.name == "n0":
            raise ZeroDivisionError
        finished.append(node.name)

    with pytest.raises(ZeroDivisionError):
        fan_out(NODES, work)
    assert len(finished) == 9


def test_an_interruption_inside_is_an_interruption():
    def work(_node):
        raise InterruptedByUser("stop")

    with pytest.raises(InterruptedByUser):
        fan_out(NODES, work)


def test_no_nodes_and_one_node_named_twice():
    assert fan_out([], lambda node: node.name) == {}
    assert fan_out([NODES[0], NODES[0]], lambda node: node.name) == {"n0": "n0"}


def test_ctrl_c_ends_the_fan_out_at_once():
    release, seen = threading.Event(), []

    def work(node):
        seen.append(node.name)
        if node.name == "n1":
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        release.wait(600)

    with pytest.raises(InterruptedByUser):
        fan_out(NODES, work, limit=2)
    assert not release.is_set()  # no node has finished
    release.set()
    assert set(seen) <= {"n0", "n1"}
