"""Which jump host of the inventory leads to which node, and what happens when some of them fail."""

from collections import Counter
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.model import Inventory, Node, Ssh
from provision.ssh.jumps import JumpHostFailed, JumpHosts, JumpRetry, NotReached, in_turn
from provision.ssh.wire import HostKeyChanged

NODES = tuple(Node(f"gpu{number}", f"10.0.0.{number}") for number in range(1, 41))


@given(st.integers(0, 5000), st.integers(0, 40))
def test_every_jump_host_is_tried_once(number, count):
    assert sorted(in_turn(number, range(count))) == list(range(count))


def test_nodes_are_divided_equally_also_those_of_a_dead_jump_host():
    orders = [in_turn(number, range(32)) for number in range(1000)]
    first = Counter(order[0] for order in orders)
    assert set(first.values()) == {31, 32}
    second = Counter(order[1] for order in orders if order[0] == 7)
    assert set(second.values()) <= {1, 2}
    assert len(second) == 31


class Cluster:
    """Jump hosts that fail in a given way, and what is tried and reported."""

    def __init__(self, count, errors):
        jumps = tuple(Node(f"login{number}", f"10.0.1.{number}") for number in range(1, count + 1))
        ssh = Ssh(jump_hosts=jumps)
        self.errors = errors
        self.tried, self.warnings = [], []
        inventory = Inventory(Path("i"), PurePosixPath("/opt/e/current"), (*NODES, jumps[0]), ssh=ssh)
        self.hosts = JumpHosts(inventory, self.warnings.append)

    def reach(self, node):
        def attempt(jump):
            self.tried.append(jump.name)
            if (error := self.errors.get(jump.name)) is not None:
                raise (
                    error(node, f"jump host {jump.name} {error.__name__}")
                    if error is not JumpRetry
                    else error(jump.name)
                )
            return jump.name

        self.tried.clear()
        return self.hosts.log_in(node, attempt)


@given(st.data())
def test_a_node_is_reached_through_any_jump_host_that_works(data):
    count = data.draw(st.integers(1, 6))
    names = [f"login{number}" for number in range(1, count + 1)]
    dead = data.draw(st.sets(st.sampled_from(names), max_size=count - 1))
    cluster = Cluster(count, dict.fromkeys(dead, JumpHostFailed))
    for node in NODES:
        assert cluster.reach(node) not in dead
    # Each is reported once, and is tried last from then on.
    assert sorted(cluster.warnings) == sorted(
        f"jump host {name} JumpHostFailed; nodes are reached through the other jump hosts" for name in dead
    )
    for node in NODES:
        cluster.reach(node)
        assert len(cluster.tried) == 1


def test_a_node_that_two_jump_hosts_do_not_reach_is_at_fault():
    cluster = Cluster(5, dict.fromkeys([f"login{number}" for number in range(1, 6)], NotReached))
    with pytest.raises(NotReached, match="gpu1: jump host login1 NotReached"):
        cluster.reach(NODES[0])
    assert cluster.tried == ["login1", "login2"]
    assert not cluster.warnings
    cluster.errors = {"login1": NotReached}
    assert cluster.reach(NODES[0]) == "login2"  # the first is no worse for it
    assert cluster.tried == ["login1", "login2"]


def test_a_changed_key_needs_a_person():
    cluster = Cluster(3, {"login1": HostKeyChanged})
    with pytest.raises(HostKeyChanged):
        cluster.reach(NODES[0])
    assert cluster.tried == ["login1"]


def test_an_attempt_that_is_worth_repeating_comes_before_those_that_failed():
    cluster = Cluster(3, {"login1": JumpHostFailed, "login2": JumpHostFailed, "login3": JumpRetry})
    with pytest.raises(JumpRetry):
        cluster.reach(NODES[0])
    assert not cluster.warnings  # no other one is used instead


def test_the_failures_of_many_jump_hosts_are_folded():
    cluster = Cluster(5, dict.fromkeys([f"login{number}" for number in range(1, 6)], JumpHostFailed))
    with pytest.raises(JumpHostFailed) as caught:
        cluster.reach(NODES[0])
    shown = [f"jump host login{number} JumpHostFailed" for number in (1, 2, 3)]
    assert caught.value.reason == "; ".join(shown) + "; and 2 more"


def test_a_jump_host_leads_to_no_jump_host():
    cluster = Cluster(2, {})
    assert cluster.hosts.lead_to(NODES[0])
    assert not cluster.hosts.lead_to(Node("login1", "10.0.1.1"))
