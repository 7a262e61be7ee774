"""The verdict does not hang on how lines of several ranks are interleaved, nor on clocks that differ a little."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

from case_table import every_case
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))  # for recorded_runs; last, so that it hides no module

from recorded_runs.cases import cases

from provision.diagnosis import diagnose
from provision.diagnosis.verdict import judge

SKEW = 0.03  # seconds


@cache
def failed():
    return [case for case in cases() if case.finds]


FAILED = st.deferred(lambda: st.sampled_from(failed()))


def verdict(evidence):
    found = diagnose(evidence).verdict
    assert found
    return found.first and found.first.cause.id, found.node, found.rank


def interleaved(record, draw):
    """The record with its ranks' lines in another order among each other, each rank's own in theirs."""
    streams = {}
    for line in record.lines:
        streams.setdefault(line.rank, []).append(line)
    order = draw(st.permutations([line.rank for line in record.lines]))
    taken = {rank: iter(lines) for rank, lines in streams.items()}
    return replace(record, lines=tuple(next(taken[rank]) for rank in order))


def shifted(record, seconds):
    def on(events):
        return tuple({**event, "time": event["time"] + seconds} if "time" in event else event for event in events)

    lines = tuple(line if line.time is None else replace(line, time=line.time + seconds) for line in record.lines)
    return replace(record, lines=lines, events=on(record.events), samples=on(record.samples))


@settings(deadline=None)
@given(data=st.data())
def test_the_order_of_lines_of_different_ranks_changes_nothing(data):
    case = data.draw(FAILED)
    records = tuple(interleaved(record, data.draw) for record in case.evidence.records)
    assert verdict(replace(case.evidence, records=records)) == verdict(case.evidence)


@settings(deadline=None)
@given(data=st.data())
def test_clocks_that_differ_a_little_change_nothing(data):
    case = data.draw(FAILED)
    skews = [data.draw(st.floats(-SKEW, SKEW)) for _ in case.evidence.records]
    records = tuple(shifted(record, skew) for record, skew in zip(case.evidence.records, skews, strict=True))
    assert verdict(replace(case.evidence, records=records)) == verdict(case.evidence)


@settings(deadline=None)
@given(data=st.data())
def test_the_order_of_the_nodes_changes_nothing(data):
    case = data.draw(FAILED)
    records = tuple(data.draw(st.permutations(case.evidence.records)))
    assert verdict(replace(case.evidence, records=records)) == verdict(case.evidence)


@every_case("case", lambda: [case for case in failed() if len(case.evidence.records) > 1], ids=lambda case: case.name)
def test_without_the_failed_node_no_cause_is_invented(case):
    """A node that is down: the echoes on other nodes are no cause."""
    left = tuple(record for record in case.evidence.records if record.node != case.node)
    found = judge(replace(case.evidence, records=left))
    assert found.first is None or found.first.cause.grade in {"late", "ended"} or found.first.node != case.node
