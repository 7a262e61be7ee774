"""The agents of a run, and their meetings: which nodes take part, and what happens when the hub is lost.

In a run that survives the loss of nodes (``roster.py``), a meeting does without those that are lost, and a lost hub is
replaced (``link/election.py``).
"""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, Optional

from ..link import HubLostError, LinkError, Offers, RefusedLinkError, Tolerance
from ..link.link import Link
from ..notify import Notifier
from ..run_files import Events, NodePlan, State
from . import roster as rosters
from .control import Control

RELAY = 2.0  # seconds in which the hub's decision arrives
SILENT = 10.0  # seconds of silence after which a node is lost, once the attempt has failed
ELECTION = 16.0  # seconds for an election at least; twice ``lost_after`` if that is longer
ISOLATED = 600.0  # the same for a spare: the run may be undisturbed, and end this spare's isolation
FOREVER = 10 * 365 * 86400.0  # for a node that has finished, while the others are running


class ExcludedError(LinkError):
    """This agent must end, although others may continue."""


class Meetings:
    """The roster of a run, and the meetings of one of its agents with the others.

    Attributes:
        position: of this node among all nodes of the run.
        survives: whether the run survives the loss of nodes.
        roster: the nodes that have ranks, the spares, and those that are excluded.
        replaces: the last attempt ended because a spare replaces a node; until the next one begins.
    """

    def __init__(
        self, plan: NodePlan, control: Control, events: Events, state: State, notifier: Notifier, link: Link
    ) -> None:
        self._plan, self._control, self._events, self._state = plan, control, events, state
        self._notifier, self._link = notifier, link
        self.position = plan.rank if plan.data.link is not None else 0
        self.survives = rosters.survives(plan.data)
        self.roster = rosters.first(plan.data)
        self.replaces = False

    @property
    def is_member(self) -> bool:
        """Whether this node has ranks."""
        return self.position in self.roster.members

    @property
    def is_first(self) -> bool:
        """Whether this node has rank 0."""
        return self.position == self.roster.members[0]

    def tolerance(self, count: Optional[int] = None) -> Optional[Tolerance]:
        """How a meeting does without lost nodes, or None. ``count``: how many agents exist."""
        return Tolerance(self._silence, self.roster.enough, count) if self.survives else None

    def going(self) -> bool:
        """Whether a meeting before an attempt may continue."""
        self._control.take()
        return not self._control.over()

    def meet(
        self,
        topic: int,
        offer: Callable[[], Dict[str, Any]],
        decide: Callable[[Offers], Dict[str, Any]],
        patience: float,
        going: Callable[[], bool],
        count: Optional[int] = None,
    ) -> Dict[str, Any]:
        """Meet, in a run that survives the loss of nodes also without those that are lost.

        Such a run gets ``{"skip": True}`` when a failure comes first. ``count``: how many agents exist.
        """
        tolerance = self.tolerance(count)
        if tolerance is None:
            return self._link.meet(offer(), decide, patience, going, topic)
        for _ in range(2 + len(self.roster.names)):
            try:
                return self._link.meet(offer(), decide, patience, going, topic, tolerance)
            except HubLostError as error:  # noqa: PERF203 - each round has another hub
                self._elect(str(error))
            except RefusedLinkError as error:
                raise ExcludedError(str(error)) from error
            except LinkError:
                self.settle()  # the failure that cancels the meeting may come after its end
                if self._control.failure is None or self._control.stop is not None or self._control.broken:
                    raise
                return {"skip": True}
        raise LinkError("the agents found no hub that all of them can reach")

    def adopt(self, decision: Dict[str, Any]) -> None:
        """Adopt the nodes of a decision."""
        before, self.roster = self.roster, rosters.from_decision(self.roster, decision)
        roster = self.roster
        if self._control.account is not None:
            self._control.account.adopt(self._plan.node, before.nodes, roster.nodes)
        self.replaces = False
        if self.survives:
            self._control.members = set(roster.nodes)
        self._control.first, self._control.last = roster.members[0], roster.members[-1]
        self._control.spares = len(roster.ready)
        reasons = {}
        for position, why in roster.excluded.items():
            reasons[position] = "the run continues without %s: %s" % (roster.names[position], why)
        if self.survives:
            self._link.exclude(reasons)
        if self.is_first:
            for each in decision.get("replaced", ()):
                about = {"node": each["node"], "rank": each["rank"], "spare": each["by"], "text": each["why"]}
                self._events.emit("replaced", **about)
        excluded = {roster.names[position]: why for position, why in sorted(roster.excluded.items())}
        self._state.set(members=list(roster.nodes), excluded=excluded, hub=self._link.hub)

    def settle(self) -> None:
        """Take the messages that came before a meeting failed, and wait a moment for the hub's reason."""
        self._control.take()
        until = time.monotonic() + RELAY
        while not self._link.is_hub and not self._control.over() and time.monotonic() < until:
            self._control.wait(until - time.monotonic())

    def _elect(self, why: str) -> None:
        """Find or become another hub.

        Raises:
            LinkError: there is none.
        """
        from ..link.election import Election, order_of  # noqa: PLC0415 - rare

        plan, lost = self._plan, self._link.lose_hub()
        assert plan.data.link is not None
        names = plan.data.link.nodes
        if lost != plan.rank and self._control.takes_part(names[lost]):
            self._control.fail(None, why, names[lost])
        self._events.emit("notice", level="info", text="%s; the agents choose another hub" % why)
        order = order_of(len(names), list(self.roster.excluded), lost if lost != plan.rank else -1)
        seconds = max(ELECTION, 2 * plan.data.link.lost_after)
        if not self.is_member and self._control.failure is None:
            seconds = max(seconds, ISOLATED)

        def alive() -> bool:
            self._control.take()
            return self._control.stop is None and not self._control.broken

        try:
            Election(self._link, plan.rank, order, lost, self.roster.enough, alive, not self.is_member).run(seconds)
        except (HubLostError, RefusedLinkError) as error:
            raise ExcludedError(str(error)) from error
        self._control.relinked()
        self._notifier.stands_in = self._link.is_hub
        self._state.set(hub=self._link.hub)

    def _silence(self) -> float:
        """Seconds of silence after which a node is lost."""
        assert self._plan.data.link is not None
        lost_after = self._plan.data.link.lost_after
        return min(SILENT, lost_after) if self._control.failure is not None or self.replaces else lost_after
