"""Finds out why a run failed, or which problem it has, from its logs, events and samples. Pure.

- ``evidence``, ``reading``: a run's logs, events and samples as data
- ``arrivals``: the rank that did not arrive at a collective, from logs and torch's flight recorder
- ``case_code``: a few lines that carry a diagnosis out of a room
- ``cause``, ``causes/``: the table of causes, a row each
- ``signs``, ``verdict``: for a failed run, the first failure among its echoes
- ``conditions/``: for a running or finished run, whether it trains well
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from provision.diagnosis.case_code import Case, case_of
from provision.diagnosis.conditions import Condition, conditions
from provision.diagnosis.evidence import Evidence, Record, attempt, attempts, phased
from provision.diagnosis.reading import progress
from provision.diagnosis.verdict import Verdict, judge

__all__ = ["Case", "Condition", "Diagnosis", "Evidence", "Record", "Verdict", "diagnose"]

_ATTEMPTS = 50  # earlier attempts that are judged, at most
FINAL = ("finished", "failed", "stopped")


@dataclass(frozen=True)
class Diagnosis:
    """The result of ``diagnose``.

    Attributes:
        run: its id; "" for log files.
        state: running, finished, failed, stopped, or "" if unknown.
        verdict: why it failed, or what blocks it while it is running; None if nothing does.
        conditions: problems of the training; for a failed run only those that can cause a failure.
        attempts: how often it was started.
        earlier: verdicts of earlier attempts, the oldest first.
        missing: nodes without logs, each with the reason.
        case: the content of its case code; None if nothing failed and no problem was found.
    """

    run: str
    state: str
    verdict: Verdict | None
    conditions: tuple[Condition, ...] = ()
    attempts: int = 1
    earlier: tuple[Verdict, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()
    case: Case | None = None


def diagnose(evidence: Evidence) -> Diagnosis:
    """Diagnose a run."""
    state = state_of(evidence)
    count = attempts(evidence)
    last = phased(_with_progress(attempt(evidence, count)))
    verdict: Verdict | None = None
    if state not in {"finished", "stopped"}:
        verdict = judge(last, ended=state != "running")
        if verdict.first is None and state != "failed":
            verdict = None if state == "running" or not verdict.echoes else verdict
    shown = conditions(last)
    if verdict is not None:
        shown = tuple(each for each in shown if each.leads)
    earlier = tuple(judge(attempt(evidence, each)) for each in range(1, min(count, _ATTEMPTS + 1)))
    missing = tuple(evidence.missing.items())
    case = case_of(last, state, verdict, shown, max(1, count)) if verdict is not None or shown else None
    return Diagnosis(evidence.run, state, verdict, shown, max(1, count), earlier, missing, case)


def state_of(evidence: Evidence) -> str:
    """The run's state: its agents' last state, else its record's, else derived from its commands' exit codes."""
    ends = [event for record in evidence.records for event in record.events if event.get("event") == "end"]
    states = [str(event.get("state")) for event in ends] or [
        str(record.state["state"]) for record in evidence.records if record.state.get("state") in FINAL
    ]
    for state in ("failed", "stopped", "finished"):
        if state in states:
            return state
    if evidence.state:
        return evidence.state
    exits = [event for record in evidence.records for event in record.events if event.get("event") == "exit"]
    if any(event.get("rc") != 0 and not event.get("stopped") for event in exits):
        return "failed"
    if any(record.state.get("state") for record in evidence.records):
        return "running"
    if exits and len(exits) >= len(evidence.records):
        return "stopped" if any(event.get("stopped") for event in exits) else "finished"
    return ""


def _with_progress(evidence: Evidence) -> Evidence:
    """The evidence with progress from the trainers' lines, if the agents reported none."""
    if any(event.get("event") == "progress" for record in evidence.records for event in record.events):
        return evidence
    return replace(
        evidence,
        records=tuple(
            replace(each, events=(*each.events, *progress(each.lines, each.pattern))) for each in evidence.records
        ),
    )
