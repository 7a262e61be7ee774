"""The meetings of the agents: every one makes an offer, the hub decides from all of them, and all get the decision."""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, Collection, Dict, Iterator, List, NamedTuple, Optional, Type

from ..contract.untrusted import whole
from . import HubLostError, LinkError, Offers, RefusedLinkError, Tolerance
from .endpoint import LOOK
from .hub import Hub
from .link import plain_values
from .spoke import Spoke

AHEAD = 20  # meetings that an agent may be ahead of the hub: more than those of an attempt
JOIN = 8.0  # seconds in which the agents connect to an elected hub; without a hub they notice its loss in 3 s


class _Offer(NamedTuple):
    number: int  # by which the agent recognises the answer
    topic: int
    content: Dict[str, Any]


class HubMeeting:
    """The hub's side. ``take`` is called with ``changed`` held.

    ``lost``: for an elected hub, the positions of lost hubs, for which it does not wait unless they connect.
    """

    def __init__(
        self, hub: Hub, place: str, changed: threading.Condition, lost: Optional[Collection[int]] = None
    ) -> None:
        self._hub = hub
        self._place = place
        self._changed = changed
        self._join_until = float("inf") if lost is None else time.monotonic() + JOIN
        self._lost = frozenset(lost or ())
        self.offers: Dict[int, _Offer] = {}

    def take(self, kind: str, message: Dict[str, Any]) -> None:
        """Handle an offer or its withdrawal."""
        number, topic = whole(message.get("number")), whole(message.get("topic", 0))
        if kind == "_offer" and isinstance(message.get("offer"), dict) and number is not None and topic is not None:
            self.offers[message["rank"]] = _Offer(number, topic, message["offer"])
        elif kind == "_withdraw":
            self.offers.pop(message["rank"], None)

    def meet(
        self,
        offer: Dict[str, Any],
        decide: Callable[[Offers], Dict[str, Any]],
        limit: float,
        alive: Callable[[], bool],
        topic: int = 0,
        tolerance: Optional[Tolerance] = None,
    ) -> Dict[str, Any]:
        """See ``Link.meet``."""
        try:
            if tolerance is None:
                self._wait(limit, alive, topic)
            else:
                self._wait_for_most(limit, alive, topic, tolerance)
            with self._changed:
                offers = {self._hub.rank: offer}
                offers.update((rank, one.content) for rank, one in self.offers.items() if one.topic == topic)
                ahead = any(topic < one.topic <= topic + AHEAD for one in self.offers.values())
            if ahead and tolerance is not None:
                decision: Dict[str, Any] = {"skip": True}
            else:
                decision = plain_values(decide(dict(sorted(offers.items()))))
        except HubLostError:
            raise
        except Exception as error:
            self._answer({"refused": "%s: %s" % (self._hub.node, error)}, topic)
            raise
        self._answer({"decision": decision}, topic)
        return decision

    def _answer(self, answer: Dict[str, Any], topic: int) -> None:
        """Answer the offers for this meeting, and those for earlier ones: these agents must catch up."""
        with self._changed:
            for rank, one in list(self.offers.items()):
                if one.topic <= topic:
                    content = answer if one.topic == topic else {"decision": {"skip": True}}
                    self._hub.send_to(rank, dict(content, kind="_answer", number=one.number))
                    del self.offers[rank]

    def _wait(self, limit: float, alive: Callable[[], bool], topic: int) -> None:
        """Wait until all agents are here."""

        def all_here() -> bool:
            return self._all_here(topic)

        while not all_here():
            if not alive():
                raise LinkError("cancelled")
            left = limit - time.monotonic()
            if left <= 0:
                raise LinkError(self._who_is_missing())
            with self._changed:
                self._changed.wait_for(all_here, min(LOOK, left))

    def _wait_for_most(self, limit: float, alive: Callable[[], bool], topic: int, tolerance: Tolerance) -> None:
        """Wait until every agent is here or lost.

        Raises:
            HubLostError: too few are left.
        """

        def settled() -> bool:
            here = 1 + sum(1 for one in self.offers.values() if one.topic >= topic)
            all_here = tolerance.agents is not None and here >= tolerance.agents
            return all_here or not self._awaited(topic, limit, tolerance.silence())

        while not settled():
            if not alive():
                raise LinkError("cancelled")
            self._answer_late(topic)
            with self._changed:
                self._changed.wait_for(settled, LOOK)
        here = {self._hub.rank} | {rank for rank, one in self.offers.items() if one.topic >= topic}
        if not tolerance.enough(here):
            raise HubLostError(
                "%s is connected to %d of the run's %d agents" % (self._hub.node, len(here), len(self._hub.peers) + 1)
            )

    def _answer_late(self, topic: int) -> None:
        """Let agents that are still in an earlier meeting catch up: the hub that they had was lost."""
        if any(one.topic < topic for one in self.offers.values()):
            self._answer({"decision": {"skip": True}}, topic - 1)

    def _awaited(self, topic: int, limit: float, silence: float) -> List[int]:
        """The agents that may still come."""
        now = time.monotonic()
        waiting = []
        for rank, peer in self._hub.peers.items():
            here = rank in self.offers and self.offers[rank].topic >= topic
            lost = peer.gone or peer.left or now > limit
            if not peer.instance:
                lost = lost or rank in self._lost or now > self._join_until
            else:
                lost = lost or now - peer.last_arrival > silence
            if not here and not lost:
                waiting.append(rank)
        return waiting

    def _all_here(self, topic: int) -> bool:
        gone = [peer.node for peer in self._hub.peers.values() if peer.gone or peer.left]
        if gone:
            raise LinkError("the agent of %s exited; see its agent.log" % ", ".join(gone))
        here = all(rank in self.offers and self.offers[rank].topic == topic for rank in self._hub.peers)
        if self._hub.conflict and not here:
            raise LinkError(self._hub.conflict)
        return here

    def _who_is_missing(self) -> str:
        hub = self._hub
        missing = [rank for rank in hub.peers if rank not in self.offers]
        unseen = [hub.peers[rank].node for rank in missing if not hub.peers[rank].instance]
        reasons = []
        if unseen:
            reasons.append(
                "no connection from %s to %s: is a firewall in between, or did the agent not start?"
                % (", ".join(unseen), self._place)
            )
        for rank in missing:
            peer = hub.peers[rank]
            if peer.instance and peer.connection is None:
                reasons.append("%s was connected, but is not now." % peer.node)
            elif peer.instance:
                reasons.append("%s is connected, but not ready." % peer.node)
        if hub.door.rejections:
            reasons.append("Other connections: %s." % "; ".join(hub.door.rejections))
        return " ".join(reasons)


REASON = 4000  # characters of the hub's reason
ANSWER = 15.0  # seconds by which the hub may give up later than this agent


class SpokeMeeting:
    """The side of every other agent. ``take`` is called with ``changed`` held."""

    def __init__(self, spoke: Spoke, place: str, changed: threading.Condition, numbers: Iterator[int]) -> None:
        """``numbers``: of the offers. No two of an agent are equal, so no answer to an earlier one is taken."""
        self._spoke = spoke
        self._place = place
        self._changed = changed
        self._numbers = numbers
        self._number = 0
        self._offer: Optional[Dict[str, Any]] = None  # that waits for an answer
        self._answer: Optional[Dict[str, Any]] = None

    def take(self, kind: str, message: Dict[str, Any]) -> None:
        """Handle the hub's answer, or that the hub listens again and has forgotten the offer."""
        if kind == "_new_hub" and self._offer is not None:
            self._spoke.send(self._offer)
        elif kind == "_answer" and message.get("number") == self._number:
            if "refused" not in message and not isinstance(message.get("decision"), dict):
                spoke = self._spoke
                message = {"refused": "%s (%s) sent an invalid decision" % (spoke.hub.node, spoke.role)}
            self._answer = message

    def meet(
        self,
        offer: Dict[str, Any],
        decide: Callable[[Offers], Dict[str, Any]],
        limit: float,
        alive: Callable[[], bool],
        topic: int = 0,
        tolerance: Optional[Tolerance] = None,
    ) -> Dict[str, Any]:
        """See ``Link.meet``."""
        del decide  # the hub's
        with self._changed:
            self._number = next(self._numbers)
            self._answer = None
            self._offer = {"kind": "_offer", "number": self._number, "topic": topic, "offer": offer}
        self._spoke.send(self._offer)
        try:
            answer = self._wait(limit, alive, tolerance)
        except Exception:
            self._spoke.send({"kind": "_withdraw"})
            raise
        finally:
            self._offer = None
        if "refused" in answer:
            raise LinkError(str(answer["refused"])[:REASON])
        decision: Dict[str, Any] = answer["decision"]
        return decision

    def _wait(self, limit: float, alive: Callable[[], bool], tolerance: Optional[Tolerance]) -> Dict[str, Any]:
        spoke = self._spoke
        hub = "%s (%s)" % (spoke.hub.node, spoke.role)
        lost = HubLostError if tolerance is not None else LinkError

        def answered() -> bool:
            return self._answered(hub, lost, tolerance)

        while not answered():
            if not alive():
                raise LinkError("cancelled")
            left = limit - time.monotonic()
            if left <= 0 and spoke.hub.connection is None:
                raise lost("%s cannot reach %s: %s" % (spoke.node, hub, spoke.why))
            if left <= -ANSWER:
                raise lost("%s is connected, but sent no decision" % hub)
            with self._changed:
                self._changed.wait_for(answered, LOOK)
        assert self._answer is not None
        return self._answer

    def _answered(self, hub: str, lost: Type[LinkError], tolerance: Optional[Tolerance]) -> bool:
        if self._answer is not None:
            return True
        peer = self._spoke.hub
        if self._spoke.refused:
            raise RefusedLinkError(self._spoke.refused)
        if peer.gone or peer.left:
            raise lost("the agent of %s exited; see its agent.log" % hub)
        if tolerance is not None and peer.instance:
            silent = time.monotonic() - peer.last_arrival
            if silent > tolerance.silence():
                raise lost("no heartbeat from %s for %d s" % (hub, silent))
        return False
