"""Judges what a run did after a fault, from the events of its agents. Pure.

Times are epoch seconds of this machine's clock: the caller has corrected those of the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from provision.rehearsal.faults import DISK, SLOW, TEAR, Fault
from provision.run.checkpoint import step_of

Outcome = Literal["survived", "resumed", "not survived", "not tried"]
_TEXT = 300  # characters of a reason
_TORN = "checkpoint skipped: "  # starts a notice of the agent
NAMED = 100  # seconds until a straggler is named: five rounds of 20 s (docs/monitoring.md)


@dataclass(frozen=True)
class Seen:
    """An event of a node's agent."""

    time: float
    node: str
    event: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """Its name."""
        return str(self.event.get("event"))

    @property
    def step(self) -> int | None:
        """The step that it reports."""
        step = self.event.get("step")
        return step if self.kind == "progress" and isinstance(step, int) else None

    def text(self, key: str = "text") -> str:
        """A text of it."""
        return " ".join(str(self.event.get(key) or "").split())[:_TEXT]


@dataclass(frozen=True)
class Injected:
    """A fault that was injected.

    Attributes:
        fault: the fault.
        node: the node.
        time: when.
        until: when it ended or will end; the same time for a fault that happens at once.
        hit: what it hit, as its script says.
        torn: the checkpoint that it tore.
    """

    fault: Fault
    node: str
    time: float
    until: float
    hit: str = ""
    torn: str = ""


@dataclass(frozen=True)
class Result:
    """What became of a fault.

    Attributes:
        fault: the fault.
        outcome: the verdict.
        node: the node that it hit; "" if it was not injected.
        text: how the run noticed it and continued, or why it did not survive or was not tried.
        seconds: from the injection, or from the end of a fault that the run endures, to the first new step.
        repeated: steps that the run did again.
        lasted: seconds that the fault lasted.
    """

    fault: Fault
    outcome: Outcome
    node: str = ""
    text: str = ""
    seconds: float | None = None
    repeated: int | None = None
    lasted: float = 0.0


@dataclass(frozen=True)
class Course:
    """The course of a run after a fault, as far as it is known.

    Attributes:
        over: every node's agent has ended, so that only a command can resume it.
        result: the verdict; None: not known yet.
    """

    over: bool = False
    result: Result | None = None


def highest(seen: Sequence[Seen], *, before: float = float("inf")) -> int | None:
    """The highest step that was reported before a time."""
    return max((each.step for each in seen if each.step is not None and each.time <= before), default=None)


def judge(injected: Injected, seen: Sequence[Seen], nodes: Sequence[str], resumed: float | None = None) -> Course:
    """Judge a fault.

    Args:
        injected: the fault.
        seen: all events of the run, of all nodes.
        nodes: the run's nodes, in the order of their ranks.
        resumed: when a command resumed the run; None: it did not. Ends before it are not the run's last ones.
    """
    after = sorted((each for each in seen if each.time > injected.time), key=lambda each: each.time)
    starts = [at for at, each in enumerate(after) if each.kind == "attempt" and each.node == nodes[0]]
    last = starts[-1] if starts else None
    ended = {each.node for each in after[last or 0 :] if each.kind == "end" and each.time > (resumed or 0.0)}
    over = ended >= set(nodes)
    if last is None:
        if over or injected.fault.ends:
            return Course(over)
        return Course(False, _endured(injected, after, seen))
    start = after[last]
    reached = highest([*(each for each in seen if each.time <= injected.time), *after[:last]]) or 0
    new = next((each for each in after[last:] if each.step is not None and each.step > reached), None)
    if new is None:
        return Course(over)
    checkpoint = start.event.get("checkpoint")
    step = step_of(str(checkpoint)) if checkpoint else 0
    first = next((each.step for each in after[last:] if each.step is not None), reached + 1)
    done = max(0, first - 1) if step is None else step
    outcome: Outcome = "survived" if resumed is None else "resumed"
    text = "; ".join(filter(None, (_noticed(after, injected), _continued(start))))
    if injected.fault.name == TEAR and checkpoint == injected.torn:
        outcome, text = "not survived", f"it continued from {checkpoint}, which was torn"
    return Course(
        False,
        Result(
            injected.fault,
            outcome,
            injected.node,
            text,
            round(new.time - injected.time, 1),
            max(0, reached - done),
            round(injected.until - injected.time, 1),
        ),
    )


def failed(injected: Injected, seen: Sequence[Seen], why: str) -> Result:
    """The result of a fault that the run did not survive."""
    after = sorted((each for each in seen if each.time > injected.time), key=lambda each: each.time)
    text = "; ".join(filter(None, (_noticed(after, injected), why)))
    return Result(injected.fault, "not survived", injected.node, text, lasted=round(injected.until - injected.time, 1))


def _endured(injected: Injected, after: Sequence[Seen], seen: Sequence[Seen]) -> Result | None:
    """The result if the attempt continues: a new step after the end of the fault."""
    reached = highest(seen, before=injected.until) or 0
    new = next(
        (each for each in after if each.time > injected.until and each.step is not None and each.step > reached), None
    )
    if new is None:
        return None
    began = highest(seen, before=injected.time) or 0
    lasted = injected.until - injected.time
    named = _noticed(after, injected)
    if not named and injected.fault.name == SLOW:
        named = f"not named as slow within {lasted:.0f} s; that takes about {NAMED} s"
    text = f"steps {began} to {reached} meanwhile" + (f"; {named}" if named else "")
    return Result(
        injected.fault,
        "survived",
        injected.node,
        text,
        round(new.time - injected.until, 1),
        0,
        round(lasted, 1),
    )


def _noticed(after: Sequence[Seen], injected: Injected) -> str:
    """How the run noticed a fault: the first event that names it."""
    for each in after:
        why = each.event.get("why")
        if each.kind == "notice" and injected.torn and each.text().startswith(_TORN):
            return each.text()
        if each.kind == "hang":
            return _without(each.text(), each.node, injected)
        if each.kind == "straggler" and each.event.get("state") == "slow" and injected.fault.name == SLOW:
            return each.text()
        if each.kind == "notice" and each.event.get("kind") == "disk_full" and injected.fault.name == DISK:
            return _without(each.text(), each.node, injected)
        if each.kind in ("notice", "end") and not injected.torn and isinstance(why, Mapping) and why.get("text"):
            return _without(" ".join(str(why["text"]).split())[:_TEXT], str(why.get("node")), injected)
    return ""


def _without(text: str, node: str, injected: Injected) -> str:
    """A text with its node, unless that is the node that was hit."""
    return text if node == injected.node else f"{node}: {text}"


def _continued(start: Seen) -> str:
    checkpoint = start.event.get("checkpoint")
    return f"continued from {checkpoint}" if checkpoint else "started again from the first step"


# --- other people's processes ----------------------------------------------------------------------

BUSY = 20.0  # percent of a core
PEOPLE = range(1000, 65534)  # uids of people; below are those of the system (login.defs(5)), 65534 is nobody


def others(out: str, own: int, *, busy: float = BUSY) -> list[str]:
    """Other people's processes that compute, from the output of ``others.sh.j2``.

    Args:
        out: lines ``first PID TICKS NAME``, ``second PID TICKS NAME``, ``user PID UID USER`` and ``hertz N``.
        own: the uid of the login.
        busy: percent of a core above which a process counts.
    """
    ticks: dict[str, dict[str, int]] = {"first": {}, "second": {}}
    names: dict[str, str] = {}
    users: dict[str, tuple[int, str]] = {}
    hertz = 100
    for line in out.splitlines():
        words = line.split(None, 3)
        if words[:1] == ["hertz"] and words[-1].isdigit():
            hertz = max(1, int(words[-1]))
        elif len(words) == 4 and words[0] in ticks and words[1].isdigit() and words[2].isdigit():
            ticks[words[0]][words[1]] = int(words[2])
            names[words[1]] = words[3][:40]
        elif len(words) == 4 and words[0] == "user" and words[2].isdigit():
            users[words[1]] = int(words[2]), f"user {words[2]}" if words[3] == "UNKNOWN" else words[3][:40]
    found = []
    for pid, now in ticks["second"].items():
        share = 100.0 * (now - ticks["first"].get(pid, now)) / hertz
        uid, user = users.get(pid, (own, ""))
        if uid != own and uid in PEOPLE and share >= busy:
            found.append((share, f"{user}: {names[pid]} (process {pid}) uses {share:.0f} % of a core"))
    return [text for _, text in sorted(found, reverse=True)]
