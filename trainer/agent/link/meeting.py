"""A meeting of all agents: everybody offers, rank 0 decides, everybody gets the decision.

An offer is a message like any other, with a number. It is withdrawn by whoever gives up, and an answer is for the
offer with its number only; so agents that gave up at different times still meet the next time.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Callable, Dict, Optional, Tuple

from link.hub import Hub
from link.peer import whole
from link.spoke import Spoke

LOOK = 0.2  # seconds between questions whether to go on
REASON = 4000  # characters of rank 0's reason
ANSWER = 15.0  # seconds that rank 0 may be later than this agent in giving up

Offers = Dict[int, Dict[str, Any]]


class LinkError(Exception):
    """The agents could not meet. The text names who is missing and why."""


class HubMeeting:
    """Rank 0's side. ``take`` is called with ``changed`` held."""

    def __init__(self, hub: Hub, place: str, changed: threading.Condition) -> None:
        self._hub = hub
        self._place = place
        self._changed = changed
        self._offers: Dict[int, Tuple[int, Dict[str, Any]]] = {}

    @staticmethod
    def plain(decision: Dict[str, Any]) -> Dict[str, Any]:
        """What JSON makes of a decision, so that it is the same on every node."""
        result: Dict[str, Any] = json.loads(json.dumps(decision))
        return result

    def take(self, kind: str, message: Dict[str, Any]) -> None:
        """An offer has come, or is withdrawn."""
        number = whole(message.get("number"))
        if kind == "_offer" and isinstance(message.get("offer"), dict) and number is not None:
            self._offers[message["rank"]] = (number, message["offer"])
        elif kind == "_withdraw":
            self._offers.pop(message["rank"], None)

    def meet(
        self, offer: Dict[str, Any], decide: Callable[[Offers], Dict[str, Any]], limit: float, alive: Callable[[], bool]
    ) -> Dict[str, Any]:
        """See ``Link.meet``."""
        try:
            self._wait(limit, alive)
            with self._changed:
                offers = {0: offer}
                offers.update((rank, said) for rank, (_, said) in sorted(self._offers.items()))
            decision = self.plain(decide(offers))
        except Exception as error:
            self._answer({"refused": "%s: %s" % (self._hub.node, error)})
            raise
        self._answer({"decision": decision})
        return decision

    def _answer(self, answer: Dict[str, Any]) -> None:
        with self._changed:
            for rank, (number, _) in self._offers.items():
                self._hub.tell_one(rank, dict(answer, kind="_answer", number=number))
            self._offers = {}

    def _wait(self, limit: float, alive: Callable[[], bool]) -> None:
        while not self._all_here():
            if not alive():
                raise LinkError("cancelled")
            left = limit - time.monotonic()
            if left <= 0:
                raise LinkError(self._who_is_missing())
            with self._changed:
                self._changed.wait_for(self._all_here, min(LOOK, left))

    def _all_here(self) -> bool:
        gone = [peer.node for peer in self._hub.peers.values() if peer.gone or peer.left]
        if gone:
            raise LinkError("the agent of %s exited; see its agent.log" % ", ".join(gone))
        here = all(rank in self._offers for rank in self._hub.peers)
        if self._hub.conflict and not here:
            raise LinkError(self._hub.conflict)
        return here

    def _who_is_missing(self) -> str:
        hub = self._hub
        missing = [rank for rank in hub.peers if rank not in self._offers]
        unseen = [hub.peers[rank].node for rank in missing if not hub.peers[rank].instance]
        said = []
        if unseen:
            said.append(
                "no connection from %s to %s: is a firewall in between, or did the agent not start?"
                % (", ".join(unseen), self._place)
            )
        for rank in missing:
            peer = hub.peers[rank]
            if peer.instance and peer.connection is None:
                said.append("%s was connected, but is not now." % peer.node)
            elif peer.instance:
                said.append("%s is connected, but not ready." % peer.node)
        if hub.seen:
            said.append("Other connections: %s." % "; ".join(hub.seen))
        return " ".join(said)


class SpokeMeeting:
    """The side of every other rank. ``take`` is called with ``changed`` held."""

    def __init__(self, spoke: Spoke, place: str, changed: threading.Condition) -> None:
        self._spoke = spoke
        self._place = place
        self._changed = changed
        self._number = 0
        self._answer: Optional[Dict[str, Any]] = None

    def take(self, kind: str, message: Dict[str, Any]) -> None:
        """Rank 0 has answered."""
        if kind == "_answer" and message.get("number") == self._number:
            if "refused" not in message and not isinstance(message.get("decision"), dict):
                message = {"refused": "%s (rank 0) sent an invalid decision" % self._spoke.hub.node}
            self._answer = message

    def meet(
        self, offer: Dict[str, Any], decide: Callable[[Offers], Dict[str, Any]], limit: float, alive: Callable[[], bool]
    ) -> Dict[str, Any]:
        """See ``Link.meet``."""
        del decide  # rank 0's
        with self._changed:
            self._number += 1
            self._answer = None
        self._spoke.tell({"kind": "_offer", "number": self._number, "offer": offer})
        try:
            answer = self._wait(limit, alive)
        except Exception:
            self._spoke.tell({"kind": "_withdraw"})
            raise
        if "refused" in answer:
            raise LinkError(str(answer["refused"])[:REASON])
        decision: Dict[str, Any] = answer["decision"]
        return decision

    def _wait(self, limit: float, alive: Callable[[], bool]) -> Dict[str, Any]:
        spoke = self._spoke
        while not self._answered():
            if not alive():
                raise LinkError("cancelled")
            left = limit - time.monotonic()
            if left <= 0 and spoke.hub.connection is None:
                raise LinkError("%s cannot reach %s (rank 0): %s" % (spoke.node, spoke.hub.node, spoke.why))
            if left <= -ANSWER:
                raise LinkError("%s (rank 0) is connected, but sent no decision" % spoke.hub.node)
            with self._changed:
                self._changed.wait_for(self._answered, LOOK)
        assert self._answer is not None
        return self._answer

    def _answered(self) -> bool:
        if self._answer is None and self._spoke.refused:
            raise LinkError(self._spoke.refused)
        if self._answer is None and (self._spoke.hub.gone or self._spoke.hub.left):
            raise LinkError("the agent of %s (rank 0) exited; see its agent.log" % self._spoke.hub.node)
        return self._answer is not None
