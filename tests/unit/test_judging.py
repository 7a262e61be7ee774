"""Majorities, and the sentence that names the odd node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.checks.kit.declare import close, groups, majority, odd


def named(values, **options):
    options = {"fix": "reboot", "noun": "driver", **options}
    return {node: each for node, each in odd(values, **options) if each.verdict != "OK"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("", None),
        ("a", "a"),
        ("aa", "a"),
        ("ab", None),
        ("aab", "a"),
        ("abc", None),
        ("aabb", None),
        ("aaabb", "a"),
    ],
)
def test_a_majority_is_more_than_half_of_three(values, expected):
    assert majority({f"node{number}": value for number, value in enumerate(values)}) == expected


def test_odd_node_is_named_with_the_value_of_the_others():
    values = {f"node{number:02}": "575.57" for number in range(1, 17)} | {"node07": "570.1"}
    ((node, finding),) = named(values).items()
    assert node == "node07"
    assert finding.verdict == "WARN"
    assert finding.observed == "driver 570.1, the other 15 nodes have 575.57"
    assert finding.expected == "driver 575.57"
    assert finding.fix == "reboot"


def test_of_several_odd_nodes_each_is_named():
    found = named({"a": 1, "b": 1, "c": 1, "d": 2, "e": 3}, verdict="FAIL")
    assert {name: each.observed for name, each in found.items()} == {
        "d": "driver 2, 3 of the other 4 nodes have 1",
        "e": "driver 3, 3 of the other 4 nodes have 1",
    }
    assert {each.verdict for each in found.values()} == {"FAIL"}


def test_of_two_nodes_that_differ_both_are_named():
    found = named({"node01": "A", "node02": "B"})
    assert set(found) == {"node01", "node02"}
    assert {each.observed for each in found.values()} == {"node01 has driver A; node02 has driver B"}


def test_halves_are_all_named():
    found = named(dict(zip("abcd", "XXYY", strict=True)))
    assert set(found) == set("abcd")
    assert {each.observed for each in found.values()} == {"a,b have driver X; c,d have driver Y"}


def test_none_is_a_value_like_any_other():
    assert named({"a": None, "b": None, "c": 1}).keys() == {"c"}
    assert named({"a": None, "b": 1}).keys() == {"a", "b"}


def test_equal_nodes_and_a_node_alone_are_ok():
    assert named({"a": 1, "b": 1}) == {}
    assert named({"a": 1}) == {}
    assert list(odd({}, fix="")) == []


def test_figures_that_are_nearly_equal_are_one_group():
    assert close({"a": 100, "b": 102, "c": 104.9, "d": 200}, 0.05) == {"a": 102, "b": 102, "c": 102, "d": 200}
    assert close({}, 0.05) == {}
    assert named(close({"a": 1000, "b": 1010, "c": 1005, "d": 500}, 0.05)).keys() == {"d"}


@given(st.dictionaries(st.text(max_size=5), st.integers(0, 3), max_size=12))
def test_exactly_the_differing_nodes_are_named(values):
    found = {node: each.verdict for node, each in odd(values, fix="x")}
    assert found.keys() == values.keys()
    assert set().union(*groups(values).values()) == values.keys()
    usual = majority(values)
    for name, verdict in found.items():
        assert (verdict == "OK") == (usual == values[name])
