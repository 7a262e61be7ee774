"""Measures whether all nodes see the files that other nodes write into an NFS share. Every access has a deadline.

The share's server writes first if it is one of the nodes, else the first node that mounts the share.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from provision.checks import Answer, Plan
from provision.checks.kit.measures import Side, outcome, steps
from provision.checks.kit.mounts import Share, shares
from provision.errors import ClusterctlError
from provision.model import Node, Result
from provision.render import render
from provision.ssh.remote import reading

if TYPE_CHECKING:
    from provision.session import Session

LIMIT = 5  # seconds for one access to a share
_ACCESSES = 3  # of a share by one script, at most
_GRACE = 10.0

Answers = Mapping[str, Result | ClusterctlError]  # by node name


@dataclass(frozen=True)
class _Trial:
    """One share, and the node that writes there first."""

    number: int
    share: Share
    first: str
    token: str

    @property
    def file(self) -> str:
        """The file that the first node writes; others append their name to it."""
        return str(PurePosixPath(self.share.path) / f".clusterctl-fresh-{self.token}")


def measure(plan: Plan, session: Session) -> dict[str, Answer]:
    """How every node sees the inventory's shares. Takes three round trips, or four if a file must be removed."""
    names = [node.name for node in plan.nodes]
    trials = [
        _Trial(number, share, share.server if share.server in names else names[0], secrets.token_hex(8))
        for number, share in enumerate(shares(plan))
    ]
    if not trials:
        return {name: Answer("no shares\n") for name in names}
    with session.stage("shares", "Trying the shared folders", len(plan.nodes)) as shown:
        first = _access(session, "server", {each: {each.first} for each in trials})
        written = {each for each in trials if _outcome(first, each.first, "write", each) == "fine"}
        others = _access(session, "client", {each: {*names} - {each.first} for each in trials}, written)
        ends = {each: {each.first} for each in trials if _outcome(first, each.first, "write", each) != "hung"}
        last = _access(session, "end", ends)
        alone = len(names) == 1
        sides = {name: [_side(each, name, first, others, last, alone=alone) for each in trials] for name in names}
        # The first node removed the files that it saw; every other node removes its own.
        strays = {name: [side.wrote == "fine" and side.back == "absent" for side in sides[name]] for name in names}
        stray = {each: {name for name in names if strays[name][each.number]} for each in trials}
        _access(session, "tidy", stray)
        shown.states = dict.fromkeys(names, "done")
    return {name: _answer(sides[name], first.get(name), others.get(name)) for name in names}


def _access(
    session: Session, role: str, parts: Mapping[_Trial, AbstractSet[str]], written: AbstractSet[_Trial] = frozenset()
) -> Answers:
    """Access shares; ``parts`` has the names of the nodes for each share."""

    def one(node: Node) -> Result:
        mine = [each for each, names in parts.items() if node.name in names]
        values = [
            {"number": each.number, "path": each.share.path, "file": each.file, "written": each in written}
            for each in mine
        ]
        script = render("measures/shares.sh.j2", shares=values, role=role, node=node.name, limit=LIMIT)
        result = session.run(node, script, deadline=LIMIT * _ACCESSES * len(mine) + _GRACE)
        with reading(node):
            steps(result.out)
        return result

    names = {name for each in parts.values() for name in each}
    outcome = session.each(one, on=[node for node in session.nodes if node.name in names])
    return {**outcome.ok, **{name: failure.error for name, failure in outcome.failed.items() if failure.error}}


def _answer(sides: Sequence[Side], *results: Result | ClusterctlError | None) -> Answer:
    lost = next((each for each in results if isinstance(each, ClusterctlError)), None)
    if lost:
        return Answer(rc=1, err=str(lost))
    return Answer("".join(f"{line}\n" for side in sides for line in side.lines()))


def _outcome(answers: Answers, name: str, what: str, each: _Trial, token: str = "") -> str:
    return outcome(_step(answers.get(name), what, each.number), token)


def _step(result: Result | ClusterctlError | None, what: str, number: int) -> tuple[int, str] | None:
    return steps(result.out).get((what, number)) if isinstance(result, Result) else None


def _side(each: _Trial, name: str, first: Answers, others: Answers, last: Answers, *, alone: bool) -> Side:
    own = first if name == each.first else others
    side = Side(each.number, each.first, each.share.path)
    result = own.get(name)
    for line in result.out.splitlines() if isinstance(result, Result) else ():
        words = line.split(" ", 3)
        if words[0] == "mounted" and len(words) == 4 and words[1] == str(each.number):
            side.type, side.source = words[2], words[3]
        elif words[0] == "stuck":
            side.stuck.append(" ".join(words[1:]))
    side.wrote = _outcome(own, name, "write", each)
    if name == each.first:
        side.back = "alone" if alone else "fine"
        return side
    side.read = _outcome(others, name, "read", each, f"from {each.first}")
    back = _step(last.get(each.first), "back", each.number)
    if back and side.wrote == "fine":
        side.back = "fine" if f"from {name}" in back[1].splitlines() else "absent"
    return side
