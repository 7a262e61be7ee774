"""Whether what one node writes into an NFS share is there on the others, and back, with a deadline for every touch.

The server of a share writes first where it is one of the nodes, else the first of them that mounts it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from provision.checks import Answer, Plan
from provision.checks._fresh import Side, outcome, steps
from provision.checks._mounts import Share, shares
from provision.errors import ClusterctlError
from provision.model import Emit, Node, Result, StageFinished, StageStarted
from provision.render import render
from provision.ssh.remote import fan_out

if TYPE_CHECKING:
    from provision.ssh.remote import Connections

LIMIT = 5  # seconds for one touch of a share
_TOUCHES = 3  # of a share by one script, at most
_GRACE = 10.0

Said = Mapping[str, Result | ClusterctlError]


@dataclass(frozen=True)
class _Meant:
    """One share, and who writes there first."""

    number: int
    share: Share
    first: str
    token: str

    @property
    def file(self) -> str:
        """The file that the first node writes; others append their name to it."""
        return str(PurePosixPath(self.share.path) / f".clusterctl-fresh-{self.token}")


def measure(plan: Plan, connections: Connections, emit: Emit) -> dict[str, Answer]:
    """How every node sees the inventory's shares. Three round trips, and one more to clear up; no file stays."""
    names = [node.name for node in plan.nodes]
    meant = [
        _Meant(number, share, share.server if share.server in names else names[0], secrets.token_hex(8))
        for number, share in enumerate(shares(plan))
    ]
    if not meant:
        return {name: Answer("no shares\n") for name in names}
    began = time.monotonic()
    emit(StageStarted("shares", "Trying the shared folders", len(plan.nodes)))
    work = _Work(meant, connections)
    begun = work.run(plan.nodes, "server")
    written = {each.number: outcome(_step(begun[each.first], "write", each.number), "") == "fine" for each in meant}
    said = work.run(plan.nodes, "client", written)
    ended = work.run(plan.nodes, "end")
    work.run(plan.nodes, "tidy")
    found = {}
    for node in plan.nodes:
        lost = next((each for each in (begun[node.name], said[node.name]) if isinstance(each, ClusterctlError)), None)
        sides = [_side(each, node.name, begun, said, ended, alone=len(names) == 1) for each in meant]
        found[node.name] = (
            Answer(rc=1, err=str(lost)) if lost else Answer("".join(f"{x}\n" for side in sides for x in side.lines()))
        )
    emit(StageFinished("shares", time.monotonic() - began, dict.fromkeys(found, "done")))
    return found


class _Work:
    """Runs one stage on the nodes that have a part in it."""

    def __init__(self, meant: Sequence[_Meant], connections: Connections) -> None:
        self._meant = meant
        self._connections = connections

    def run(self, nodes: Sequence[Node], role: str, written: Mapping[int, bool] | None = None) -> Said:
        """What the nodes said; those without a part said nothing."""

        def one(node: Node) -> Result:
            firsts = role in {"server", "end"}
            mine = [each for each in self._meant if (each.first == node.name) == firsts]
            if not mine:
                return Result(0, "")
            values = [
                {
                    "number": each.number,
                    "path": each.share.path,
                    "file": each.file,
                    "written": bool(written and written[each.number]),
                }
                for each in mine
            ]
            script = render("measures/shares.sh.j2", shares=values, role=role, node=node.name, limit=LIMIT)
            return self._connections[node].run(script, deadline=LIMIT * _TOUCHES * len(mine) + _GRACE)

        return fan_out(nodes, one, limit=64)


def _step(result: Result | ClusterctlError, what: str, number: int) -> tuple[int, str] | None:
    return None if isinstance(result, ClusterctlError) else steps(result.out).get((what, number))


def _side(each: _Meant, name: str, begun: Said, said: Said, ended: Said, *, alone: bool) -> Side:
    own = (begun if name == each.first else said)[name]
    out = own.out if isinstance(own, Result) else ""
    side = Side(each.number, each.first, each.share.path)
    for line in out.splitlines():
        words = line.split(" ", 3)
        if words[0] == "mounted" and words[1] == str(each.number):
            side.type, side.source = words[2], words[3]
        elif words[0] == "stuck":
            side.stuck.append(" ".join(words[1:]))
    side.wrote = outcome(_step(own, "write", each.number), "")
    if name == each.first:
        side.back = "alone" if alone else "fine"
        return side
    side.read = outcome(_step(own, "read", each.number), f"from {each.first}")
    back = _step(ended[each.first], "back", each.number)
    if back and side.wrote == "fine":
        side.back = "fine" if f"from {name}" in back[1].splitlines() else "absent"
    return side
