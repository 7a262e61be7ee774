"""The history of runs: one line for each run, filters, and which runs ``prune`` may remove. Pure.

A run is in the history if a node has a folder of it, or if this machine has a record of it. A node's folder without
``state.json`` belongs to a run whose agent never started there.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from provision.run.found import ENDED, LIVE, LOST, UNKNOWN, Run
from trainer.agent.contract.untrusted import finite

NOT_STARTED = "not started"
STATES = (*LIVE, *ENDED, LOST, UNKNOWN, NOT_STARTED)
SETTLED = 3600.0  # seconds after which a folder without a state belongs to no run that is being started
_FOLDER = re.compile(r"folder ([0-9]{1,15}) ([0-9]{1,11}) ([A-Za-z0-9][A-Za-z0-9._-]{0,199})")
_NOW = re.compile(r"now ([0-9]{1,11})")


@dataclass(frozen=True)
class Folder:
    """A run's folder on a node: its size in bytes, and seconds since it changed, by the node's own clock."""

    size: int
    age: float = 0.0


@dataclass(frozen=True)
class Past:
    """One run of the history.

    Attributes:
        id: the run's id.
        state: one of ``STATES``.
        nodes: the nodes that it used, in the order of their ranks.
        folders: by node name, its folder there; nodes that share a folder have it once.
        owner: the user who started it; "" if unknown.
        step: the last reported step.
        total: the number of its steps.
        loss: the last reported loss.
        began: when it was started or resumed, in epoch seconds.
        seconds: how long it has run since then.
        recorded: this machine has a record of it.
        run: the run as its nodes report it; None if no node does.
        stays: why ``prune`` never removes it; "" if it may.
    """

    id: str
    state: str
    nodes: tuple[str, ...] = ()
    folders: Mapping[str, Folder] = field(default_factory=dict)
    owner: str = ""
    step: float | None = None
    total: float | None = None
    loss: float | None = None
    began: float | None = None
    seconds: float | None = None
    recorded: bool = False
    run: Run | None = None
    stays: str = ""

    @property
    def size(self) -> int:
        """Bytes on all nodes."""
        return sum(folder.size for folder in self.folders.values())


@dataclass(frozen=True)
class Wanted:
    """Which runs to show or remove; a condition that is None or empty holds for every run.

    Attributes:
        states: states of ``STATES``.
        name: a part of the id, or a pattern with ``*``, ``?`` and ``[…]`` for the whole id.
        node: a node that the run used.
        since: only runs that were started at most so many seconds ago.
        before: only runs that were started at least so many seconds ago.
    """

    states: Collection[str] = ()
    name: str = ""
    node: str = ""
    since: float | None = None
    before: float | None = None

    def allows(self, past: Past, now: float) -> bool:
        """Whether a run meets every condition. Without a known start, a run is neither new nor old."""
        age = None if past.began is None else now - past.began
        return (
            (not self.states or past.state in self.states)
            and (not self.name or _matches(self.name, past.id))
            and (not self.node or self.node in past.nodes)
            and (self.since is None or (age is not None and age <= self.since))
            and (self.before is None or (age is not None and age >= self.before))
        )


def _matches(pattern: str, run: str) -> bool:
    return fnmatch.fnmatchcase(run, pattern) if set(pattern) & set("*?[") else pattern in run


def parse_folders(out: str) -> dict[str, Folder]:
    """A node's folders of runs, by their names. Skips unknown lines."""
    found, now = {}, 0
    for line in out.splitlines():
        if match := _NOW.fullmatch(line):
            now = int(match[1])
        elif match := _FOLDER.fullmatch(line):
            found[match[3]] = Folder(int(match[1]) * 1024, max(0.0, float(now - int(match[2]))))
    return found


def history(
    runs: Mapping[str, Run],
    folders: Mapping[str, Mapping[str, Folder]],
    records: Mapping[str, Mapping[str, Any]],
    *,
    users: Mapping[str, int | None],
    unreachable: Collection[str],
    now: float,
) -> tuple[Past, ...]:
    """All runs, the newest first.

    Args:
        runs: the runs that the nodes report, by id.
        folders: by node name, its folders by run id.
        records: this machine's records of the inventory's runs, by id.
        users: by node name, the uid that the inventory logs in as.
        unreachable: the names of the nodes that did not answer.
        now: epoch seconds.
    """
    ids = sorted({*runs, *records, *(run for each in folders.values() for run in each)}, reverse=True)
    found = []
    for name in ids:
        there = {node: each[name] for node, each in folders.items() if name in each}
        if run := runs.get(name):
            found.append(_reported(run, there, recorded=name in records, users=users, silent=unreachable, now=now))
        else:
            found.append(_unreported(name, there, records.get(name), silent=unreachable))
    return tuple(found)


def _reported(
    run: Run,
    there: Mapping[str, Folder],
    *,
    recorded: bool,
    users: Mapping[str, int | None],
    silent: Collection[str],
    now: float,
) -> Past:
    head = run.head
    began, last = head.number("began"), now if run.live else head.number("time")
    return Past(
        run.id,
        run.state,
        run.nodes,
        _once(run, there),
        run.owner,
        run.reporter.number("step"),
        run.reporter.number("total"),
        run.reporter.number("loss"),
        began,
        max(0.0, last - began) if began is not None and last is not None else None,
        recorded,
        run,
        _why_it_stays(run, users, silent),
    )


def _why_it_stays(run: Run, users: Mapping[str, int | None], silent: Collection[str]) -> str:
    if run.live:
        return "it is running"
    gone = [name for name in silent if name in run.nodes or run.missing]
    if gone:
        return f"it may be running on {', '.join(sorted(gone)[:3])}, without an answer"
    for part in run.parts:
        uid, me = part.fields.get("uid"), users.get(part.node)
        if isinstance(uid, int) and me is not None and uid != me:
            return f"it belongs to {part.owner or uid}"
    if run.state == UNKNOWN:
        return "whether it is running is not known"
    return ""


def _once(run: Run, there: Mapping[str, Folder]) -> dict[str, Folder]:
    """The folders without those that are another node's: nodes that share one all report each part in it."""
    kept: dict[str, Folder] = {}
    for node, folder in there.items():
        if not any(node in part.seen_on and other in part.seen_on for part in run.parts for other in kept):
            kept[node] = folder
    return kept


def _unreported(
    name: str, there: Mapping[str, Folder], record: Mapping[str, Any] | None, *, silent: Collection[str]
) -> Past:
    """A run without a state on any node: only its folders, or only this machine's record."""
    listed = record.get("nodes") if record else None
    nodes = tuple(str(node) for node in listed) if isinstance(listed, list) else tuple(there)
    losses = record.get("losses") if record else None
    gone = sorted(silent) if not nodes else [node for node in nodes if node in silent]
    stays = f"{', '.join(gone[:3])} did not answer" if gone else ""
    if not stays and any(folder.age < SETTLED for folder in there.values()):
        stays = "it may be starting"
    state = record.get("state") if record else None
    if state == "running":  # of the record; no agent confirms it
        state = UNKNOWN
    return Past(
        name,
        state if state in STATES and not there else NOT_STARTED if there else UNKNOWN,
        nodes,
        dict(there),
        step=finite(record.get("steps") if record else None),
        loss=finite(losses[-1]) if isinstance(losses, list) and losses else None,
        seconds=finite(record.get("seconds") if record else None),
        began=_epoch(record.get("began") if record else None),
        recorded=record is not None,
        stays=stays,
    )


def _epoch(value: Any) -> float | None:
    """Epoch seconds of a record's time; see ``record.now``."""
    try:
        return datetime.strptime(str(value), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return None


def removable(
    runs: Sequence[Past], wanted: Wanted, *, now: float, keep: int = 0, named: Iterable[str] = ()
) -> tuple[tuple[Past, ...], tuple[Past, ...]]:
    """The runs that ``prune`` removes, and the chosen runs that must stay; both the newest first.

    Args:
        runs: the history, the newest first.
        wanted: the condition.
        now: epoch seconds.
        keep: of the runs that meet it, how many of the newest stay.
        named: ids that the user typed: exactly these are chosen.
    """
    ids = set(named)
    chosen = [past for past in runs if past.id in ids] if ids else [past for past in runs if wanted.allows(past, now)]
    chosen = chosen if ids else chosen[keep:]
    return tuple(past for past in chosen if not past.stays), tuple(past for past in chosen if past.stays)


def is_collected(past: Past, record: Mapping[str, Any] | None) -> bool:
    """Whether the checkpoints of the run's last start are on this machine: see ``tasks.collect``."""
    mark = record.get("collected") if record else None
    began = past.run.head.number("began") if past.run else None
    return isinstance(mark, Mapping) and began is not None and finite(mark.get("began")) == began
