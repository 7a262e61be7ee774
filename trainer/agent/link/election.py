"""Elects another hub when the hub of the link is lost.

Each agent tries the others in the order of the roster, and listens itself when its turn comes: the first one at once,
each further one ``STEP`` seconds later. An agent that reaches a listening one has found its hub. An agent that listens
needs enough others (``Tolerance.enough``, a majority), or it stops listening and tries the others again. An agent is
connected to one hub at a time, so two parts of a divided network cannot both have a majority.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Callable, Iterator, List, Sequence, Set

from . import HubLostError, LinkError, RefusedLinkError

if TYPE_CHECKING:
    from .link import Link

STEP = 3.0  # seconds between the turns of two agents: they notice the loss of a hub at different times
HOLD = 5.0  # seconds in which enough others must connect to an agent that listens
TRY = 1.5  # seconds for a connection to another agent
PAUSE = 0.2  # seconds between two rounds of tries


class Election:
    """One election.

    Args:
        link: this agent's link, which ``run`` moves.
        own: this agent's position.
        order: the positions of all agents that may become the hub, without the lost one.
        lost: the position of the lost hub, which is tried too once this agent has listened in vain: it may be back.
        enough: whether the agents at these positions are enough.
        alive: cancels the election by returning False; called several times a second.
    """

    def __init__(
        self,
        link: Link,
        own: int,
        order: Sequence[int],
        lost: int,
        enough: Callable[[Set[int]], bool],
        alive: Callable[[], bool],
    ) -> None:
        self._link, self._own, self._enough, self._alive = link, own, enough, alive
        self._others = [position for position in order if position != own]
        self._turn = sum(1 for position in order if position < own)
        self._lost = lost
        self._most = 1

    def run(self, seconds: float) -> None:
        """Find a hub or become one.

        Raises:
            RefusedLinkError: a hub refuses this agent.
            HubLostError: there is none after ``seconds``.
            LinkError: cancelled, or this agent cannot listen.
        """
        limit = time.monotonic() + seconds
        listen_at = time.monotonic() + self._turn * STEP
        while time.monotonic() < limit:
            if time.monotonic() >= listen_at:
                if self._listen():
                    return
                listen_at = time.monotonic() + (1 + self._turn) * STEP
                self._add_lost()
            if any(self._reaches(position) for position in self._others_while_alive()):
                return
            if self._link.wait(self._is_connected, PAUSE):
                return
        raise HubLostError(
            "only %d of the run's agents are connected to each other, which is no majority: the run may continue on "
            "the others" % self._most
        )

    def _add_lost(self) -> None:
        if self._lost != self._own and self._lost not in self._others:
            self._others.append(self._lost)

    def _others_while_alive(self) -> Iterator[int]:
        for position in list(self._others):
            if not self._alive():
                raise LinkError("cancelled")
            yield position

    def _listen(self) -> bool:
        """Be the hub. Whether enough others connect."""
        self._link.move(self._own)
        until = time.monotonic() + HOLD
        while time.monotonic() < until:
            if not self._alive():
                raise LinkError("cancelled")
            if self._link.wait(lambda: self._enough(self._link.connected()), PAUSE):
                return True
        self._most = max(self._most, len(self._link.connected()))
        return False

    def _reaches(self, position: int) -> bool:
        """Whether the agent at a position is a hub that accepts this agent."""
        from .spoke import Spoke  # noqa: PLC0415 - imported when the link was started

        self._link.move(position)
        spoke = self._link.endpoint
        assert isinstance(spoke, Spoke)

        def settled() -> bool:
            return bool(spoke.hub.connection is not None or spoke.tried)

        self._link.wait(settled, TRY)
        if spoke.refused:
            raise RefusedLinkError(spoke.refused)
        return spoke.hub.connection is not None

    def _is_connected(self) -> bool:
        """Whether the last agent that was tried accepts this one by now: the link tries again in the pause."""
        from .spoke import Spoke  # noqa: PLC0415 - see _reaches

        return isinstance(self._link.endpoint, Spoke) and self._link.endpoint.hub.connection is not None


def order_of(count: int, excluded: Sequence[int], lost: int) -> List[int]:
    """The positions that may become the hub, in the order of their turns."""
    return [position for position in range(count) if position not in excluded and position != lost]
