"""``clusterctl runs list`` and ``runs prune``: the history of runs, from the nodes and from this machine's records."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from provision.env.text import number
from provision.errors import PreflightError
from provision.model import Node
from provision.render import render
from provision.run import record
from provision.run.found import merge_runs, parse_runs
from provision.run.history import Past, Wanted, history, is_collected, parse_folders, removable
from provision.ssh.remote import reading
from provision.tasks.runs import list_script

if TYPE_CHECKING:
    from provision.session import Session

_MOST = 5000  # runs that a node lists
_DEADLINE = 300.0  # seconds to add up the sizes of a node's runs
_REMOVE_DEADLINE = 3600.0
_BUSY = re.compile(r"busy ([0-9]{1,10}) (\S+)")
_LEFT = re.compile(r"(kept|left) (?:\.removing-)?(\S+) ?(.*)")


@dataclass(frozen=True)
class History:
    """The runs, the newest first. ``unreachable``: the nodes that did not answer, each with its reason."""

    runs: tuple[Past, ...]
    unreachable: Mapping[str, str]
    records: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def list_history(session: Session) -> History:
    """All runs that the nodes or this machine's records know, in one round trip. Changes nothing.

    Raises:
        NodesFailedError: no node answered.
    """
    inventory = session.inventory
    names = [node.name for node in inventory.nodes]
    script = render("run/sizes.sh.j2", root=str(inventory.root)) + list_script(inventory, most=_MOST)
    outcome = session.ask(
        "history",
        "Listing the runs",
        script,
        lambda node, out: (parse_runs(node.name, out, names), parse_folders(out)),
        deadline=_DEADLINE,
    )
    if not outcome.ok:
        outcome.required()
    records = {
        run: content
        for run, content in record.kept(inventory.path).items()
        if content.get("inventory", inventory.path.name) == inventory.path.name
    }
    asked = {node.name for node in session.nodes}
    others = {name for name in names if name not in asked}
    if others:  # runs of nodes that were not asked are not known to be gone
        records = {run: content for run, content in records.items() if not others & set(content.get("nodes") or others)}
    found = history(
        merge_runs(answer for answer, _ in outcome.ok.values()),
        {name: folders for name, (_, folders) in outcome.ok.items()},
        records,
        users={name: answer.uid for name, (answer, _) in outcome.ok.items()},
        unreachable=outcome.reasons,
        now=time.time(),
    )
    return History(found, outcome.reasons, records)


def chosen(found: History, wanted: Wanted) -> list[Past]:
    """The runs that meet a condition now."""
    now = time.time()
    return [past for past in found.runs if wanted.allows(past, now)]


@dataclass(frozen=True)
class Pruned:
    """The result of ``runs prune``.

    Attributes:
        removed: the runs that were removed, or would be, the newest first.
        kept: chosen runs that stay, each with the reason.
        failed: by node name, what could not be removed.
        dry_run: nothing was removed.
    """

    removed: tuple[Past, ...]
    kept: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    dry_run: bool = False


@dataclass(frozen=True)
class Plan:
    """What ``prune`` is about to remove.

    Attributes:
        runs: runs whose checkpoints are on this machine, that have none, or that the user named.
        uncollected: other runs, each with its checkpoints or why they are not known.
        kept: chosen runs that stay, each with the reason.
    """

    runs: tuple[Past, ...]
    uncollected: Mapping[str, str]
    kept: Mapping[str, str]


def prune(
    session: Session,
    wanted: Wanted,
    confirm: Callable[[Plan, Sequence[Past]], Sequence[Past]],
    *,
    keep: int = 0,
    words: Iterable[str] = (),
) -> Pruned:
    """Remove runs from the nodes, with this machine's records of them.

    A running run stays, and one that may be running on a node without an answer. A run whose checkpoints are not on
    this machine stays unless the user names or confirms it.

    Args:
        session: the command's session.
        wanted: which runs.
        confirm: receives the plan and the uncollected runs in it, and returns the runs to remove.
        keep: of these, how many of the newest stay.
        words: runs that the user named, by their ids or parts of them; then the other arguments choose none.

    Raises:
        UsageError: a word matches no run, or several.
        PreflightError: a named run must stay.
        NodesFailedError: no node answered.
    """
    found = list_history(session)
    named = [record.choose(word, [past.id for past in found.runs]) for word in words]
    now = time.time()
    picked, stays = removable(found.runs, wanted, now=now, keep=keep, named=named)
    if named and stays:
        raise PreflightError(
            "nothing was removed: " + ", ".join(f"{past.id}: {past.stays}" for past in stays),
            reasons=found.unreachable,
            hint=f"clusterctl status {stays[0].id}",
        )
    doubtful = [past for past in picked if not named and not is_collected(past, found.records.get(past.id))]
    uncollected = _checkpoints(session, doubtful)
    plan = Plan(
        tuple(past for past in picked if past.id not in uncollected),
        uncollected,
        {past.id: past.stays for past in stays},
    )
    going = confirm(plan, [past for past in picked if past.id in uncollected])
    kept = {**plan.kept, **{name: why for name, why in uncollected.items() if name not in {each.id for each in going}}}
    if session.dry_run:
        return Pruned(tuple(going), kept, dry_run=True)
    failed = _remove(session, going)
    return Pruned(tuple(going), kept, failed)


def _checkpoints(session: Session, runs: Sequence[Past]) -> dict[str, str]:
    """By id, the checkpoints that runs have in their folders on the nodes, or why they are not known."""
    from provision.tasks.collect import Collection  # noqa: PLC0415 - most commands on runs need no transfer

    found = {}
    for past in runs:
        if past.run is None or not past.folders:
            continue  # no agent has ever run there, so no program has
        collection = Collection(session, past.run, session.inventory.path.parent, {})
        answers = collection.offers()
        names = sorted(
            {
                str(one["name"])
                for answer in answers.values()
                if _inside(answer["output"], f"{collection.folder}/")
                for one in answer["offer"].get("checkpoints", ())
            }
        )
        if names:
            found[past.id] = f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''} not collected"
        elif collection.failed:
            found[past.id] = f"its checkpoints are not known: {next(iter(collection.failed.values()))}"
        elif past.step is not None and not any(answer["output"] for answer in answers.values()):
            found[past.id] = "the folder of its checkpoints is not known"
    return found


def _inside(output: str | None, folder: str) -> bool:
    return bool(output) and str(output).startswith(folder)


def _remove(session: Session, runs: Sequence[Past]) -> dict[str, str]:
    """Remove the runs, and what an interrupted removal left; by node name, what is still there."""
    inventory = session.inventory
    record.remove_leftovers(inventory.path)
    asked = {node.name for node in session.nodes}

    def one(node: Node) -> dict[str, str]:
        mine = [past.id for past in runs if node.name in _places(past)]
        script = render("run/prune.sh.j2", root=str(inventory.root), runs=mine)
        out = session.run(node, script, deadline=_REMOVE_DEADLINE).out
        with reading(node):
            return parse_left(out)

    outcome = session.work(
        "prune",
        f"Removing {number(len(runs), 'run')}",
        one,
        state=lambda left: "failed" if left else "done",
        wrong=bool,
        changes=True,
    )
    left = {name for each in outcome.ok.values() for name in each}
    for past in runs:
        silent = outcome.reasons.keys() & {*past.nodes, *past.folders}
        if past.recorded and past.id not in left and not silent and asked.issuperset(past.nodes):
            record.remove(inventory.path, past.id)
    broken = {
        name: "; ".join(f"{run}: {why}" for run, why in each.items()) for name, each in outcome.ok.items() if each
    }
    return {**outcome.reasons, **broken}


def _places(past: Past) -> set[str]:
    """The nodes that have the run's folder, or share it."""
    return {*past.folders, *(name for part in (past.run.parts if past.run else ()) for name in part.seen_on)}


def parse_left(out: str) -> dict[str, str]:
    """By run, why a node could not remove it."""
    found = {}
    for line in out.splitlines():
        if match := _BUSY.fullmatch(line):
            found[match[2]] = f"process {match[1]} of it is running"
        elif match := _LEFT.fullmatch(line):
            found[match[2]] = match[3] or "some of its files could not be deleted"
    return found
