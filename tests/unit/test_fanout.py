from __future__ import annotations

import os
import signal
import subprocess
import threading

import pytest

from provision.errors import InterruptedByUser, UsageError
from provision.model import LOCAL, Node
from provision.ssh.become import Sudo
from provision.ssh.fanout import MANY, fan_out
from provision.ssh.local import LocalRemote

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


def test_threads_for_many_nodes_stay_on_two_cores_and_those_for_few_do_not(monkeypatch):
    chosen = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {2, 4, 6, 8, 10, 12})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: chosen.append((pid, frozenset(cores))))
    many = [Node(f"n{number}", "h") for number in range(MANY)]
    fan_out(many[:-1], lambda node: node.name)
    assert not chosen
    fan_out(many, lambda node: node.name, limit=8)
    assert len(chosen) == 8
    ((pid, cores),) = set(chosen)  # the same ones for all threads
    assert pid == 0  # the calling thread
    assert len(cores) == 2
    assert cores < {2, 4, 6, 8, 10, 12}


def test_a_program_of_such_a_thread_may_use_all_cores():
    """A training on this machine as a node is started by one."""
    remote = LocalRemote(Node("here", LOCAL), sudo=Sudo(None))
    many = [Node(f"n{number}", "h") for number in range(MANY)]
    shown = "grep Cpus_allowed_list /proc/self/status"
    answers = set(fan_out(many, lambda _node: remote.run(shown).out, limit=4).values())
    assert answers == {subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True).stdout}


def test_a_system_that_forbids_it_costs_only_speed(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    many = [Node(f"n{number}", "h") for number in range(MANY)]
    assert len(fan_out(many, lambda node: node.name)) == MANY
