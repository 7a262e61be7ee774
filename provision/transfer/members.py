"""The nodes of one transfer: what is known of each, and what is concluded when a lane has ended. No connections."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from provision.env.report.text import size
from provision.ssh.wire import RemoteError
from provision.transfer.survey import Facts, reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from provision.errors import ClusterctlError
    from provision.model import Leg
    from provision.transfer.keys import Door
    from provision.transfer.lane import Outcome
    from provision.transfer.target import Target

STRIKES = 3  # attempts without any progress until a node is given up
MOST_STRIKES = 20  # attempts in all
WAYS = 2  # failed ways from or to a node until it is not used for another one


@dataclass
class Member:
    """A node of a transfer. One thread at a time changes it: that of the lane it sits in."""

    target: Target
    number: int
    facts: Facts = field(default_factory=Facts)
    door: Door | None = None
    lacking: frozenset[str] = frozenset()
    needed: int | None = None  # bytes that it lacked at first
    arrived: int = 0  # bytes of these that have come
    passes: bool = False
    receives: bool = False
    error: ClusterctlError | None = None  # why it was given up
    authorized: bool = False  # it may hold keys of the relay
    _ways_out: int = 0
    _ways_in: int = 0
    _strikes: int = 0
    _all_strikes: int = 0
    _struck_at: int = -1

    @property
    def name(self) -> str:
        """The node's name."""
        return self.target.node.name

    def look(self, legs: Sequence[Leg]) -> None:
        """Conclude from the facts what is lacking."""
        have = self.facts.have
        lacking = [leg for leg in legs if leg.key not in have and (not leg.group or leg.group not in have)]
        self.lacking = frozenset(leg.key for leg in lacking)
        owing = sum(leg.size for leg in lacking)
        if self.needed is None:
            self.needed = owing
        self.arrived = max(0, self.needed - owing)

    def give_up(self, why: str) -> None:
        """Nothing more is sent to it."""
        self.error = self.error or RemoteError(self.target.node, why)

    def strike(self, why: str) -> None:
        """An attempt has failed and it is to blame."""
        self._strikes = 1 if len(self.lacking) < self._struck_at else self._strikes + 1
        self._struck_at = len(self.lacking)
        self._all_strikes += 1
        if self._strikes >= STRIKES or self._all_strikes >= MOST_STRIKES:
            self.give_up(why)

    def failed_to_pass(self) -> None:
        """A way from it has failed."""
        self._ways_out += 1
        self.passes = self.passes and self._ways_out < WAYS

    def failed_to_receive(self) -> None:
        """A way to it has failed."""
        self._ways_in += 1
        self.receives = self.receives and self._ways_in < WAYS

    @property
    def may_pass(self) -> bool:
        """Whether not too many ways from it have failed."""
        return self._ways_out < WAYS

    @property
    def may_receive(self) -> bool:
        """Whether not too many ways to it have failed."""
        return self._ways_in < WAYS


def judge(crew: Sequence[Member], outcome: Outcome, refused: set[tuple[str, str]], stall: float) -> list[str]:
    """Conclude from a lane that ended early who is to blame.

    Args:
        crew: the lane's nodes, in its order.
        outcome: how it ended.
        refused: ways between nodes that are not tried again; those that failed now are added.
        stall: the seconds after which a node counts as stalled.

    Returns:
        A sentence for each event, for people.
    """
    said: list[str] = []
    for before, member in zip((None, *crew), crew, strict=False):
        why, is_way = _trouble(before, member, outcome, stall)
        if not why:
            continue
        if before and is_way:
            refused.add((before.name, member.name))
            before.failed_to_pass()
            member.failed_to_receive()
        said.append(f"{member.name}: {why}" + ("" if member.error else "; going on another way"))
    if said:
        return said
    head, error = crew[0], outcome.error
    why = error.reason if isinstance(error, RemoteError) else str(error or "")
    why = why or f"its part of the transfer was killed (exit code {outcome.code})"
    head.strike(why)
    return [f"{head.name}: {why}; trying again"]


def _trouble(before: Member | None, member: Member, outcome: Outcome, stall: float) -> tuple[str, bool]:
    """What went wrong at a node, if anything, and whether the way to it may be the cause."""
    if failure := outcome.failed.get(member.name):
        why, in_vain = reason(failure.free, failure.words, failure.where)
        if in_vain:
            why += f"; at least {size(member.needed)} were needed, and a rerun continues" if member.needed else ""
            member.give_up(why)
        else:
            member.strike(why)
        return why, False
    if member.name in outcome.bad or outcome.stalled == member.name:
        why = "a unit arrived damaged" if member.name in outcome.bad else f"it gave no sign of life for {stall:g} s"
        member.strike(why)
        return why, True
    if before and before.name in outcome.lost:
        return f"the connection from {before.name} was lost: {outcome.lost[before.name]}", True
    return "", False
