"""A judge has a finding for any output of a node; unknown output is UNKNOWN, never OK."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from case_table import every_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))  # for recorded; last, so that it hides no module

from recorded import recorded

from provision import checks
from provision.checks import Answer, judged
from provision.inventory import fold

HOW = settings(
    max_examples=settings.default.max_examples // 8,  # for each check
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
VERDICTS = {"OK", "WARN", "FAIL", "UNKNOWN", "N/A"}
WORDS = st.sampled_from(
    ["", "0", "-1", "1", "99999999999999999999", "1e999", "nan", "N/A", "[N/A]", "ERR!", "Enabled", "yes", "{", "[]",
     "=", ":", ",", ", ", "\t", "/dev/sda", "lo", "eth0", "127.0.0.1", "fe80::1", "::", "1.2.3", "4: ACTIVE", "0x", "²",
     "No devices were found", "Unknown Error", "command not found", "\udcff", "\x00", "٣"]
)  # fmt: skip
LINES = st.lists(st.lists(WORDS, max_size=5).map(" ".join), max_size=5).map("\n".join)
STATES = st.sampled_from(["answered"] * 8 + ["missing", "hung"])


@st.composite
def answers(draw, healthy):
    """Possible output of nodes: nonsense, or a healthy node's with a piece removed, doubled or replaced."""
    texts = [answer.out for recording in healthy for answer in recording.answers.values()]
    found = {}
    for name in draw(st.lists(st.sampled_from(["node01", "node02", "node03", "node04"]), min_size=1, unique=True)):
        out = draw(LINES | st.sampled_from(texts).flatmap(garbled) | st.text(max_size=40))
        rc = draw(st.sampled_from([0, 0, 0, 1, 2, 127, 137, 255]))
        found[name] = Answer(out, rc, draw(STATES), draw(st.booleans()), draw(st.sampled_from(["", "denied"])))
    return found


@st.composite
def garbled(draw, text):
    begin = draw(st.integers(0, len(text)))
    end = draw(st.integers(begin, min(len(text), begin + 40)))
    return text[:begin] + draw(WORDS | st.just(text[begin:end] * 2)) + text[end:]


@pytest.mark.parametrize("check", checks.ids())
def test_no_answer_breaks_a_judge(check):
    healthy = recorded(check).healthy

    @HOW
    @given(answers(healthy), st.sampled_from(healthy))
    def judge(found, recording):
        plan = recording.plan
        names = dict(zip(found, [node.name for node in plan.nodes], strict=False))
        here = {names[name]: answer for name, answer in found.items() if name in names}
        findings = list(judged(check, plan, here))
        assert sorted(each.node for each in findings) == sorted(here), fold(here)
        for each in findings:
            assert each.check == check
            assert each.verdict in VERDICTS
            assert each.observed
            assert each.verdict in {"OK", "N/A"} or each.expected

    judge()


@every_case("check", checks.ids())
def test_an_empty_answer_is_not_ok(check):
    """Every probe prints something; where it does not, it was killed, or a shell or a file was not there."""
    for recording in recorded(check).healthy[:1]:
        for rc in (0, 1, 127, 137):
            silent = {name: Answer("", rc) for name in recording.answers}
            verdicts = {each.verdict for each in judged(check, recording.plan, silent)}
            assert not verdicts & {"OK", "N/A"}, f"exit code {rc} and no output"


NUMBER = re.compile(r"[0-9]+")
PLACES = 20  # numbers of an answer that are replaced, spread over all of it


@every_case("number", ["9" * 5000, "²"])
@every_case("check", checks.ids())
def test_no_number_breaks_a_judge(check, number):
    """``int`` refuses more than 4,300 digits, and ``isdigit`` accepts characters that ``int`` refuses."""
    for recording in recorded(check).healthy[:1]:
        for name, answer in recording.answers.items():
            found = list(NUMBER.finditer(answer.out))
            for match in found[:: max(1, len(found) // PLACES)]:
                out = answer.out[: match.start()] + number + answer.out[match.end() :]
                findings = list(judged(check, recording.plan, {**recording.answers, name: replace(answer, out=out)}))
                assert {each.node for each in findings} == set(recording.answers)
