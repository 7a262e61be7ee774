"""The agents of a run, joined through one of them, the hub; in a large run some pass on the frames of others.

``Plan.link`` is None for one node. The hub is the first node's agent; when it is lost, the others elect another
(``election.py``). An agent is known by its position in ``link.nodes``; messages and offers have it as ``rank``. Every
call may be made from any thread; only ``meet``, ``fetch``, ``move`` and ``close`` wait. The order::

    link = Link(plan, wake)
    link.start()
    link.share(output)                                      # the folder of checkpoints; before the first meeting
    decision = link.meet(offer, decide)                     # the hub decides which checkpoint, which port
    link.fetch(decision["copy"].get(str(rank), []), alive)  # the files this node lacks
    link.meet({}, lambda offers: {})                        # all have them: all start at once
    … link.send("failed", text=…), link.take() …
    link.close()

``take`` returns the messages that arrived. Each is a dict with ``kind``, and with the ``node`` and ``rank`` that it is
about; the hub takes these from the sender's connection. A message of ``send`` reaches all others exactly once and in
order, also when a connection breaks meanwhile. With the field ``to``, a rank, it goes to that rank only: what every
agent sends to all others is a million messages in a run of a thousand nodes. The link itself creates these:

===========  =====================================================================================
``lost``     nothing was heard for ``silent`` seconds (more than ``lost_after``): a fault of the
             network or the machine. The peer may still be training
``gone``     its kernel closed the connection, and it did not reconnect: the agent exited
``back``     its heartbeats arrive again
``refused``  the hub refuses this agent (``text``)
``broken``   the link of this agent failed (``text``): a bug in this program
===========  =====================================================================================

An agent that ends with ``close`` is neither lost nor gone. When an agent was killed, another process may create a Link
with its plan and replace it.

A meeting: every agent sends an offer with a number, the hub decides, and every agent receives the decision. An agent
that gives up withdraws its offer, and an answer is valid only for the offer with its number. So agents that gave up at
different times still meet the next time.

Meetings have increasing topics. When a hub is lost, some agents may have its decision and others not. The new hub lets
those that are behind catch up: they, or the hub itself, get the decision ``{"skip": true}``.
"""

from __future__ import annotations

import collections
import itertools
import json
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, Iterable, List, Optional, Set, Tuple, Union

from ..contract.plan import Plan
from . import LinkError, Tolerance

if TYPE_CHECKING:
    from .copies import Copies, Wanted
    from .hub import Hub
    from .meeting import HubMeeting, SpokeMeeting
    from .spoke import Spoke

UNTAKEN = 20_000  # messages that wait for ``take``; more are dropped
TICKET = 64  # characters
GOODBYE = 2.0  # seconds that ``close`` waits for acknowledgements
INTERNAL = ("_connected",)  # only wakes the threads that wait


def plain_values(decision: Dict[str, Any]) -> Dict[str, Any]:
    """Convert a decision to JSON values, so that it is the same on every node."""
    result: Dict[str, Any] = json.loads(json.dumps(decision))
    return result


def place_of(host: str, port: int) -> str:
    """An address as text."""
    return "[%s]:%d" % (host, port) if ":" in host else "%s:%d" % (host, port)


def _address(host: str, port: int) -> Tuple[Any, Any]:
    import socket  # noqa: PLC0415 - see Link.start

    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return found[0], found[4]


class Link:
    """This agent's link to all others; see the module. ``wake`` is called, from a thread, when ``take`` has something.

    With one node every method works without other agents. ``hub`` is the position of the hub.
    """

    def __init__(self, plan: Plan, wake: Callable[[], None], hub: int = 0) -> None:
        self._plan = plan
        self._wake = wake
        self._arrived: Deque[Dict[str, Any]] = collections.deque()
        self._changed = threading.Condition()
        self._instance = ""
        self._numbers = itertools.count(1)  # of offers
        self._excluded: Dict[int, str] = {}
        self._lost: Set[int] = set()  # the hubs that were lost
        self.hub = hub
        self.endpoint: Optional[Union[Hub, Spoke]] = None
        self.meeting: Optional[Union[HubMeeting, SpokeMeeting]] = None
        self.copies: Optional[Copies] = None

    def start(self) -> None:
        """Listen (the hub) or start to connect.

        Raises:
            LinkError: the hub cannot listen, or the address is invalid.
        """
        plan = self._plan
        if plan.link is None:
            return
        # Imported here: a run on one node needs none of them, and they are a tenth of an agent's start.
        import secrets  # noqa: PLC0415

        from .copies import Copies  # noqa: PLC0415

        self._instance = secrets.token_hex(8)
        who = {"run": plan.run, "rank": plan.node_rank, "instance": self._instance}
        self.copies = Copies(who, plan.link.token, (None, None), self._send_to)
        self._open(self.hub, None)

    @property
    def is_hub(self) -> bool:
        """Whether this agent is the hub; true for one node."""
        return self._plan.link is None or self.hub == self._plan.node_rank

    def _open(self, position: int, lost: Optional[Set[int]]) -> None:
        import secrets  # noqa: PLC0415 - see start

        from .hub import Hub  # noqa: PLC0415
        from .meeting import HubMeeting, SpokeMeeting  # noqa: PLC0415
        from .spoke import Spoke  # noqa: PLC0415

        plan, link = self._plan, self._plan.link
        assert link is not None
        assert self.copies is not None
        host, port = link.address(position)
        place = place_of(host, port)
        try:
            address = _address(host, port)
            self.copies.hub, self.copies.address = position, address
            endpoint: Union[Hub, Spoke]
            meeting: Union[HubMeeting, SpokeMeeting]
            if position == plan.node_rank:
                # Another id each time: this agent may listen again after it gave up, and numbers its messages again.
                endpoint = Hub(plan, link, address, secrets.token_hex(8), self._deliver, self.copies.accept)
                endpoint.exclude(self._excluded)
                meeting = HubMeeting(endpoint, place, self._changed, lost)
            else:
                endpoint = Spoke(plan, link, address, place, self._instance, self._deliver, position)
                meeting = SpokeMeeting(endpoint, place, self._changed, self._numbers)
        except OSError as error:
            why = _start_reason(error, plan.node_rank if position == plan.node_rank else None, place)
            raise LinkError("the agents' link: %s" % why) from error
        with self._changed:
            self.hub, self.endpoint, self.meeting = position, endpoint, meeting
        endpoint.start()

    def move(self, position: int) -> None:
        """Leave the hub, without a goodbye, and use the agent at ``position`` instead, which may be this one.

        Messages that the old hub has not acknowledged are lost.

        Raises:
            LinkError: this agent cannot listen.
        """
        if self.endpoint is not None:
            self.endpoint.abandon(GOODBYE)
        self._open(position, self._lost)

    def lose_hub(self) -> int:
        """Record that the current hub is lost. Returns its position."""
        if not self.is_hub:
            self._lost.add(self.hub)
        return self.hub

    def exclude(self, reasons: Dict[int, str]) -> None:
        """Set the agents, by position, that no longer belong to the run, each with the reason that it gets."""
        from .hub import Hub  # noqa: PLC0415 - see start

        self._excluded = dict(reasons)
        if isinstance(self.endpoint, Hub):
            self.endpoint.exclude(self._excluded)

    def connected(self) -> Set[int]:
        """The positions of the agents that are connected to this one, and its own."""
        peers = self.endpoint.peers.values() if self.endpoint is not None else ()
        return {self._plan.node_rank} | {peer.rank for peer in peers if peer.connection is not None}

    def wait(self, test: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``test`` is true, which is called whenever the link's state has changed."""
        with self._changed:
            return self._changed.wait_for(test, seconds)

    def take(self) -> List[Dict[str, Any]]:
        """Return the messages that arrived since the last call."""
        with self._changed:
            come = list(self._arrived)
            self._arrived.clear()
            return come

    def send(self, kind: str, **fields: Any) -> None:
        """Send to all others, or only to the position ``to``.

        Drops a message of more than 16 MiB, and one for a peer with 32 MiB waiting.
        """
        if self.endpoint is not None:
            self.endpoint.send(dict(fields, kind=kind))

    def meet(
        self,
        offer: Dict[str, Any],
        decide: Callable[[Dict[int, Dict[str, Any]]], Dict[str, Any]],
        patience: float = 120.0,
        alive: Callable[[], bool] = lambda: True,
        topic: int = 0,
        tolerance: Optional[Tolerance] = None,
    ) -> Dict[str, Any]:
        """Wait until all agents are here. The hub then decides from all offers, and all receive the decision.

        The decision passes through JSON, so its keys are text. ``alive`` is called several times a second in this
        thread. It may ``take`` messages, and cancels the meeting by returning False. An agent that gives up does not
        block the others. With ``tolerance`` the hub decides without agents that are lost, and after ``patience``
        without those that are missing.

        Raises:
            HubLostError: with ``tolerance``: the hub is lost, or too few agents are connected to this one.
            RefusedLinkError: the hub refuses this agent.
            LinkError: an agent is missing (the text names it and what was seen instead), exited or gave up, or no
                connection to the hub is possible. An exception of ``decide`` is raised on the hub, and as a LinkError
                with its text on all others.
        """
        if self.meeting is None:
            return plain_values(decide({0: offer}))
        return self.meeting.meet(offer, decide, time.monotonic() + patience, alive, topic, tolerance)

    def share(self, folder: str) -> None:
        """Let the other agents read below this folder; ``fetch`` writes there."""
        if self.copies is not None:
            self.copies.folder = str(folder)

    def fetch(
        self,
        files: Iterable[Tuple[Any, ...]],
        alive: Callable[[], bool] = lambda: True,
        on_bytes: Callable[[int], None] = lambda _: None,
        done: Callable[["Wanted", str], None] = lambda _, __: None,
        lost: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Copy files, each with the first fields of ``copies.Wanted``: path, size, rank that has it, ….

        ``on_bytes`` gets the number of new bytes, ``done`` each file that is in its place, with its digest. ``lost``
        says whether the node at a position is lost: then a copy from it, or through it, ends.

        Raises:
            DigestError: a file comes from a folder of copies, and was damaged there.
            HolderLostError: a node is lost.
            CopyError: a file could not be copied.
            OSError: the disk refuses.
        """
        if self.copies is not None:
            self.copies.fetch(files, alive, on_bytes, done, lost)

    def close(self) -> None:
        """Flush the messages, say goodbye, and end."""
        if self.copies is not None:
            self.copies.close()
        if self.endpoint is not None:
            self.endpoint.close(GOODBYE)

    def _send_to(self, rank: int, message: Dict[str, Any]) -> None:
        if self.endpoint is not None and rank in self.endpoint.peers:
            self.endpoint.send_to(rank, message)

    def _deliver(self, message: Dict[str, Any]) -> None:
        """Handle a message; called in the link's thread."""
        kind = str(message.get("kind"))
        if kind == "_give":
            if self.copies is not None and not self.is_hub:  # only the hub asks for files
                self.copies.give(str(message.get("ticket"))[:TICKET])
            return
        assert self.meeting is not None  # the thread is started last
        with self._changed:
            if kind in INTERNAL:
                pass
            elif kind.startswith("_"):
                self.meeting.take(kind, message)
            elif len(self._arrived) < UNTAKEN:
                self._arrived.append(message)
            self._changed.notify_all()
        if not kind.startswith("_"):
            self._wake()


def _start_reason(error: OSError, rank: Optional[int], place: str) -> str:
    if rank is None:
        from .spoke import reason  # noqa: PLC0415 - it is already imported

        return reason(error, place)
    return "rank %d cannot listen at %s: %s. Is this node rank %d, and is that its address?" % (
        rank,
        place,
        error.strerror or error,
        rank,
    )
