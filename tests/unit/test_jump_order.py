"""Which jump host of the inventory leads to which node."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from provision.ssh.jumps import in_turn


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
