"""Every recorded run yields its cause, its rank and its fix; a healthy run yields none."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from case_table import every_case

sys.path.append(str(Path(__file__).parent))  # for recorded_runs and replay; last, so that they hide no module

from recorded_runs.cases import cases
from replay.replays import replays

from provision import checks
from provision.cli import cli
from provision.diagnosis import diagnose
from provision.diagnosis.cause import Sign
from provision.diagnosis.causes import TABLE
from provision.diagnosis.conditions import RULES
from provision.summaries.diagnosis import WIDTH, diagnosis_output

RESULTS = {}


def result_of(case):
    """What ``diagnose`` makes of it: several tests look at the same result."""
    if case.name not in RESULTS:
        RESULTS[case.name] = diagnose(case.evidence)
    return RESULTS[case.name]


def name(case):
    return case.name


def message(result) -> str:
    return diagnosis_output(result)[1]


@every_case("case", cases, ids=name)
def test_a_recorded_run_yields_its_cause(case):
    result = result_of(case)
    first = result.verdict.first if result.verdict else None
    assert (first.cause.id if first else None) == case.finds, message(result)
    if case.node:
        assert result.verdict
        assert (result.verdict.node, result.verdict.rank) == (case.node, case.rank), message(result)
    else:
        assert result.verdict is None, message(result)


@every_case("case", cases, ids=name)
def test_a_recorded_run_yields_its_conditions_and_no_others(case):
    result = result_of(case)
    assert tuple(each.id for each in result.conditions) == case.conditions, message(result)


@every_case("case", cases, ids=name)
def test_verdict_and_fix_are_shown_and_fit_the_screen(case):
    data, text = diagnosis_output(result_of(case))
    flat = " ".join(text.split())
    for words in (*case.says, *case.fix):
        assert " ".join(words.split()) in flat, text
    assert max(map(len, text.splitlines())) <= WIDTH or "http" in text or "/" in text, text
    assert "?" not in text.split("try:")[0].replace("(?", "").replace("'?", "") or "?" in str(case.evidence), text
    assert data["state"] in {None, "running", "finished", "failed", "stopped"}


@every_case("case", lambda: [case for case in cases() if case.name.startswith("healthy")], ids=name)
def test_a_healthy_run_yields_nothing(case):
    result = result_of(case)
    assert (result.verdict, result.conditions) == (None, ())
    assert "no problem" in message(result) or "nothing failed" in message(result)


def test_there_are_healthy_runs():
    assert sum(case.name.startswith("healthy") for case in cases()) >= 4


@every_case("rule", RULES, ids=lambda rule: rule.id)
def test_every_rule_has_a_run_in_which_it_holds(rule):
    assert [case.name for case in cases() if rule.id in case.conditions]


def test_ids_are_unique():
    ids = [cause.id for cause in TABLE] + [rule.id for rule in RULES]
    assert len(ids) == len(set(ids))


@every_case("cause", TABLE, ids=lambda cause: cause.id)
def test_every_cause_is_complete(cause):
    assert cause.lines or cause.events or cause.traced
    assert cause.says
    assert cause.fix
    assert cause.source.startswith(("https://", "recorded (", "trainer/agent/"))
    names = set(re.findall(r"\{(\w+)\}", cause.says + "".join(cause.fix)))
    patterns = "".join((*cause.lines, *(line for line, _ in cause.traced)))
    patterns += "".join(pattern for event in cause.events for pattern in event.values())
    reported = set(re.findall(r"\?P<(\w+)>", patterns)) | ({"what", "values"} if cause.differs else set())
    reported |= {"host"}  # the node's name, of a run
    if cause.id.startswith("nccl.timeout"):
        reported |= {"missing", "late"}  # from all ranks' sequence numbers (arrivals.py)
    if cause.id in {"nccl.mismatch", "nccl.stuck"}:
        reported |= {"count", "number", "operation", "which"}  # the same
    assert names <= reported, f"{cause.id} says {names - reported}, which no pattern captures"


@every_case("cause", [cause for cause in TABLE if cause.grade != "echo"], ids=lambda cause: cause.id)
def test_every_cause_has_a_recorded_run_or_a_replay(cause):
    found = {case.finds for case in cases()} | {case.cause for case in replays()}  # test_replay.py judges the replays
    assert cause.id in found, f"{cause.id} is never the first failure anywhere"


@every_case("row, text", [(row.id, line) for row in (*TABLE, *RULES) for line in row.fix])
def test_commands_and_checks_in_fixes_exist(row, text):
    for word in re.findall(r"clusterctl ([a-z][a-z-]+)", text):
        assert word in cli.list_commands(None), text
    found = re.findall(r"\b((?:clock|cpu|env|fs|gpu|ib|lim|mem|net|pci|rdma|svc)\.[a-z][a-z0-9]+)\b", text)
    for check in found:
        assert check in checks.ids(), f"{row}: there is no check {check}"


def test_a_part_in_brackets_needs_its_values():
    cause = next(cause for cause in TABLE if cause.id == "cuda.oom")
    assert Sign(cause, "n").says == "CUDA out of memory"
