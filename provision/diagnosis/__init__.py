"""What went wrong with a run, or is going wrong, from its logs, events and samples. Pure.

- ``evidence``, ``reading``: what a run left behind, as data
- ``arrivals``, ``recorder``: which rank did not arrive at a collective, by logs and by torch's flight recorder
- ``cause``, ``causes/``: the table of causes, a row each
- ``signs``, ``verdict``: a failed run: the first failure among its echoes
- ``conditions/``, ``statistics``: a run that goes on, or went through: is it any good
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from provision.diagnosis.conditions import Condition, conditions
from provision.diagnosis.evidence import Evidence, Record, attempt, attempts, phased
from provision.diagnosis.reading import progress
from provision.diagnosis.verdict import Verdict, judge

__all__ = ["Condition", "Diagnosis", "Evidence", "Record", "Verdict", "diagnose"]

_ATTEMPTS = 50  # earlier attempts that are judged, at most
FINAL = ("finished", "failed", "stopped")


@dataclass(frozen=True)
class Diagnosis:
    """The answer.

    Attributes:
        run: its id; "" for files given by hand.
        state: running, finished, failed, stopped, or "" where nothing tells.
        verdict: why it failed, or what holds it up while it goes on; None where nothing did.
        conditions: what is wrong with how it trains; of a failed run only what led to it.
        attempts: how often it was begun.
        earlier: verdicts of the attempts before, the first one first.
        missing: nodes of which nothing could be read, each with the reason.
    """

    run: str
    state: str
    verdict: Verdict | None
    conditions: tuple[Condition, ...] = ()
    attempts: int = 1
    earlier: tuple[Verdict, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()


def diagnose(evidence: Evidence) -> Diagnosis:
    """Say what is wrong with a run."""
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
    return Diagnosis(evidence.run, state, verdict, shown, max(1, count), earlier, missing)


def state_of(evidence: Evidence) -> str:
    """The run's state: what its agents have written last, else what its record says, else how its commands ended."""
    ends = [event for record in evidence.records for event in record.events if event.get("event") == "end"]
    said = [str(event.get("state")) for event in ends] or [
        str(record.state["state"]) for record in evidence.records if record.state.get("state") in FINAL
    ]
    for state in ("failed", "stopped", "finished"):
        if state in said:
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
    """The evidence with what trainers print as progress, where the agents have none."""
    if any(event.get("event") == "progress" for record in evidence.records for event in record.events):
        return evidence
    return replace(
        evidence,
        records=tuple(replace(each, events=(*each.events, *progress(each.lines))) for each in evidence.records),
    )
