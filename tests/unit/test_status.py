"""What ``status`` says of nodes and clocks, and the arithmetic of clocks behind it."""

import re

import pytest

from provision.checks import Answer
from provision.checks.kit.measures import EVERY_PAIR, Offset, blamed, line, offset, pairs, show_offset, span
from provision.model import Node
from provision.summaries.status import WIDTH, status_output
from provision.tasks.measures.clock import bounds, combined
from provision.tasks.status import NodeStatus, Status, read_status


def names(count):
    return [f"node{number:02}" for number in range(1, count + 1)]


def test_two_lines_of_a_node():
    assert read_status("uptime 123.45\ncurrent /opt/llm/releases/0123456789ab\n") == NodeStatus(123.45, "0123456789ab")
    assert read_status("uptime 123.45\ncurrent releases/0123456789ab\n").release == "0123456789ab"
    assert read_status("current \n") == NodeStatus()
    assert read_status("") == NodeStatus()


def test_one_answer_bounds_the_offset_from_both_sides():
    assert bounds("1000.250000000\n", 1000.0, 1000.1) == (pytest.approx((0.15, 0.25)), False)
    assert bounds("1000.%N", 999.5, 999.6) == (pytest.approx((0.4, 1.5)), True)
    assert bounds("1000", 999.5, 999.6) == (pytest.approx((0.4, 1.5)), True)
    assert bounds("date: not found", 0, 1) is None


def test_samples_narrow_the_offset_and_a_clock_step_is_handled():
    assert combined([(0.0, 0.4), (0.3, 0.9)]) == Offset(pytest.approx(0.35), pytest.approx(0.05))
    assert combined([(0.0, 0.4), (5.0, 5.1)]) == Offset(pytest.approx(5.05), pytest.approx(0.05))
    assert combined([]) is None


def test_several_whole_second_samples_give_a_bound_below_a_second():
    true = 3.3
    samples = []
    for number in range(10):
        sent = 1000 + 0.11 * number
        message = int(sent + 0.001 + true)
        samples.append(bounds(f"{message}.%N", sent, sent + 0.002)[0])
    found = combined(samples)
    assert abs(found.seconds - true) <= found.error <= 0.07


def test_an_offset_survives_as_a_line():
    answer = Answer(line(Offset(-0.0815, 0.0004), 11, whole_seconds=False))
    assert offset(answer) == Offset(-0.0815, 0.0004)
    assert offset(Answer("date: not found\n")) is None


def test_spans_in_units_that_suit():
    message = {0: "0.0 ms", 0.0004: "0.4 ms", 0.08: "80 ms", -5.2: "-5.2 s", 7200 * 12: "24 h", 600: "10 min"}
    assert {seconds: span(seconds) for seconds in message} == message
    assert show_offset(Offset(-1e-6, 0.001)) == "+0.0 ms ± 1.0 ms"


def test_few_nodes_get_the_matrix():
    offsets = {"node01": Offset(0.001, 0.0004), "node02": Offset(0.081, 0.0004), "node03": Offset(0.0, 0.0005)}
    result = Status({name: NodeStatus(7300, "0123456789ab") for name in offsets}, {"node04": "no route"}, offsets)
    data, text = status_output(result)
    lines = text.splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "node[01-03]: release 0123456789ab, up 2 h",
        "node04: no answer: no route",
        "clocks: node[01,03] agree, at most 1.0 ms ± 0.9 ms apart",
        "clocks: node02 is 80 ms ± 0.8 ms ahead of them",
        "ms ahead of node01 node02 node03",
        "node01 - -80.0 ±0.8 +1.0 ±0.9",
        "node02 +80.0 ±0.8 - +81.0 ±0.9",
        "node03 -1.0 ±0.9 -81.0 ±0.9 -",
    ]
    assert len({len(line) for line in lines[4:]}) == 1  # aligned
    assert data["nodes"]["node02"]["skew"]["node01"] == {"seconds": 0.08, "error": 0.0008}
    assert data["unreachable"] == {"node04": "no route"}


def test_two_nodes_that_differ_are_both_named():
    offsets = {"node01": Offset(5, 0.001), "node02": Offset(0, 0.001)}
    _, text = status_output(Status({name: NodeStatus() for name in offsets}, {}, offsets))
    assert "clocks: node01 is 5.0 s ± 2.0 ms ahead of node02" in text.splitlines()
    assert "agree" not in text


def test_many_nodes_are_folded():
    offsets = {name: Offset(number * 1e-5, 0.0004) for number, name in enumerate(names(64))}
    offsets["node40"] = Offset(-2.5, 0.0004)
    result = Status({name: NodeStatus(90) for name in offsets}, {}, offsets)
    data, text = status_output(result)
    assert text.splitlines() == [
        "node[01-64]: no release, up 1 min",
        "clocks: node[01-39,41-64] agree, at most 0.6 ms ± 0.8 ms apart",
        "clocks: node40 is 2.5 s ± 0.8 ms behind them",
    ]
    assert len(data["nodes"]["node40"]["skew"]) == 63
    assert max(map(len, text.splitlines())) <= WIDTH


def test_node_without_a_readable_clock_is_named():
    result = Status({"node01": NodeStatus(), "node02": NodeStatus()}, {}, {"node01": Offset(0, 0.001)})
    assert "clocks: the time of node02 is not known" in status_output(result)[1]


def test_the_matrix_is_antisymmetric():
    offsets = {"a": Offset(1, 0.1), "b": Offset(3, 0.2)}
    data, _ = status_output(Status({name: NodeStatus() for name in offsets}, {}, offsets))
    assert data["nodes"]["a"]["skew"] == {"b": {"seconds": -2, "error": pytest.approx(0.3)}}
    assert data["nodes"]["b"]["skew"] == {"a": {"seconds": 2, "error": pytest.approx(0.3)}}


@pytest.mark.parametrize("count", [1, 2, 3, EVERY_PAIR, EVERY_PAIR + 1, 200])
def test_every_node_tries_and_is_tried_with_few_connections(count):
    nodes = [Node(name, f"10.0.0.{number}") for number, name in enumerate(names(count))]
    chosen = [(one.name, other.name) for one, other in pairs(nodes)]
    assert len(set(chosen)) == len(chosen)
    assert {(other, one) for one, other in chosen} == set(chosen)
    assert all(one != other for one, other in chosen)
    assert {one for one, _ in chosen} == (set(names(count)) if count > 1 else set())
    assert {("node01", name) for name in names(count)[1:]} <= set(chosen)
    assert len(chosen) <= max(count * (count - 1) if count <= EVERY_PAIR else 0, 4 * count)


def all_pairs(count):
    return [(one, other) for one in names(count) for other in names(count) if one != other]


@pytest.mark.parametrize("count", [2, 3, 16])
def test_a_node_that_no_other_node_reaches_is_blamed(count):
    tried = all_pairs(count)
    failed = [pair for pair in tried if pair[1] == "node02"]
    assert list(blamed(tried, failed)) == ["node02"]


@pytest.mark.parametrize("count", [3, 16])
def test_a_node_that_reaches_no_other_node_is_blamed(count):
    tried = all_pairs(count)
    for failed in (
        [pair for pair in tried if pair[0] == "node02"],
        [pair for pair in tried if "node02" in pair],
    ):
        found = blamed(tried, failed)
        assert list(found) == ["node02"]
        assert sorted(found["node02"]) == sorted(failed)


def test_single_failed_pair_blames_its_target():
    assert blamed(all_pairs(4), [("node01", "node03")]) == {"node03": [("node01", "node03")]}
    assert blamed(all_pairs(4), []) == {}
    assert set(blamed(all_pairs(3), all_pairs(3))) == set(names(3))


def test_the_error_bar_is_never_without_a_unit():
    assert re.fullmatch(r"[+-]\d+(\.\d+)? (ms|s|min|h) ± \d+(\.\d+)? (ms|s|min|h)", show_offset(Offset(0.3, 0.002)))
