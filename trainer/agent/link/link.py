"""The agents of a run, joined in a star through rank 0's agent.

``plan["link"]`` is null for one node, else ``{"host": address of rank 0, "port", "token", "nodes": [names by rank],
"lost_after": seconds, at least 3}``. Every call may be made from any thread; only ``meet``, ``fetch`` and ``close``
wait. The order::

    link = Link(plan, wake)
    link.start()
    link.share(output)                                      # the folder of checkpoints; before the first meeting
    decision = link.meet(offer, decide)                     # rank 0 decides which checkpoint, which port
    link.fetch(decision["copy"].get(str(rank), []), alive)  # the files this node lacks
    link.meet({}, lambda offers: {})                        # all have them: all start at once
    … link.send("failed", text=…), link.take() …
    link.close()

``take`` returns the messages that arrived. Each is a dict with ``kind``, and with the ``node`` and ``rank`` that it is
about; rank 0 takes these from the sender's connection. A message of ``send`` reaches all others exactly once and in
order, also when a connection breaks meanwhile. The link itself creates these:

===========  =====================================================================================
``lost``     nothing was heard for ``silent`` seconds (more than ``lost_after``): a fault of the
             network or the machine. The peer may still be training
``gone``     its kernel closed the connection, and it did not reconnect: the agent exited
``back``     its heartbeats arrive again
``broken``   the link of this agent failed (``text``): a bug in this program
===========  =====================================================================================

An agent that ends with ``close`` is neither lost nor gone. When an agent was killed, another process may create a Link
with its plan and replace it.

A meeting: every agent sends an offer with a number, rank 0 decides, and every agent receives the decision. An agent
that gives up withdraws its offer, and an answer is valid only for the offer with its number. So agents that gave up at
different times still meet the next time.
"""

from __future__ import annotations

import collections
import json
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, Iterable, List, Optional, Tuple, Union

from ..contract.plan import Plan
from . import LinkError

if TYPE_CHECKING:
    from .copies import Copies, Wanted
    from .hub import Hub, HubMeeting
    from .spoke import Spoke, SpokeMeeting

UNTAKEN = 20_000  # messages that wait for ``take``; more are dropped
TICKET = 64  # characters
GOODBYE = 2.0  # seconds that ``close`` waits for acknowledgements


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

    With one node every method works without other agents.
    """

    def __init__(self, plan: Plan, wake: Callable[[], None]) -> None:
        self._plan = plan
        self._wake = wake
        self._arrived: Deque[Dict[str, Any]] = collections.deque()
        self._changed = threading.Condition()
        self.endpoint: Optional[Union[Hub, Spoke]] = None
        self.meeting: Optional[Union[HubMeeting, SpokeMeeting]] = None
        self.copies: Optional[Copies] = None

    def start(self) -> None:
        """Listen (rank 0) or start to connect.

        Raises:
            LinkError: rank 0 cannot listen, or the address is invalid.
        """
        plan = self._plan
        link = plan.link
        if link is None:
            return
        # Imported here: a run on one node needs none of them, and they are a tenth of an agent's start.
        import secrets  # noqa: PLC0415

        from .copies import Copies  # noqa: PLC0415
        from .hub import Hub, HubMeeting  # noqa: PLC0415
        from .spoke import Spoke, SpokeMeeting  # noqa: PLC0415

        rank = plan.node_rank
        place = place_of(link.host, link.port)
        instance = secrets.token_hex(8)
        try:
            address = _address(link.host, link.port)
            who = {"run": plan.run, "rank": rank, "instance": instance}
            self.copies = Copies(who, link.token, address, self._send_to)
            if rank == 0:
                self.endpoint = Hub(plan, link, address, instance, self._deliver, self.copies.accept)
                self.meeting = HubMeeting(self.endpoint, place, self._changed)
            else:
                self.endpoint = Spoke(plan, link, address, place, instance, self._deliver)
                self.meeting = SpokeMeeting(self.endpoint, place, self._changed)
        except OSError as error:
            raise LinkError("the agents' link: %s" % _start_reason(error, rank, place)) from error
        self.endpoint.start()

    def take(self) -> List[Dict[str, Any]]:
        """Return the messages that arrived since the last call."""
        with self._changed:
            come = list(self._arrived)
            self._arrived.clear()
            return come

    def send(self, kind: str, **fields: Any) -> None:
        """Send to all others. Drops a message of more than 16 MiB, and one for a peer with 32 MiB waiting."""
        if self.endpoint is not None:
            self.endpoint.send(dict(fields, kind=kind))

    def meet(
        self,
        offer: Dict[str, Any],
        decide: Callable[[Dict[int, Dict[str, Any]]], Dict[str, Any]],
        patience: float = 120.0,
        alive: Callable[[], bool] = lambda: True,
    ) -> Dict[str, Any]:
        """Wait until all agents are here. Rank 0 then decides from all offers, and all receive the decision.

        The decision passes through JSON, so its keys are text. ``alive`` is called several times a second in this
        thread. It may ``take`` messages, and cancels the meeting by returning False. An agent that gives up does not
        block the others.

        Raises:
            LinkError: an agent is missing (the text names it and what was seen instead), exited or gave up, or no
                connection to rank 0 is possible. An exception of ``decide`` is raised on rank 0, and as a LinkError
                with its text on all others.
        """
        if self.meeting is None:
            return plain_values(decide({0: offer}))
        return self.meeting.meet(offer, decide, time.monotonic() + patience, alive)

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
    ) -> None:
        """Copy files, each with the first fields of ``copies.Wanted``: path, size, rank that has it, ….

        ``on_bytes`` gets the number of new bytes, ``done`` each file that is in its place, with its digest.

        Raises:
            DigestError: a file comes from a folder of copies, and was damaged there.
            CopyError: a file could not be copied.
            OSError: the disk refuses.
        """
        if self.copies is not None:
            self.copies.fetch(files, alive, on_bytes, done)

    def send_to(self, rank: int, kind: str, **fields: Any) -> None:
        """Rank 0: send to one other rank. All others: send to rank 0, whatever ``rank`` is."""
        self._send_to(rank, dict(fields, kind=kind, node=self._plan.node, rank=self._plan.node_rank))

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
            if self.copies is not None and self._plan.node_rank != 0:  # only rank 0 asks for files
                self.copies.give(str(message.get("ticket"))[:TICKET])
            return
        assert self.meeting is not None  # the thread is started last
        with self._changed:
            if kind.startswith("_"):
                self.meeting.take(kind, message)
            elif len(self._arrived) < UNTAKEN:
                self._arrived.append(message)
            self._changed.notify_all()
        if not kind.startswith("_"):
            self._wake()


def _start_reason(error: OSError, rank: int, place: str) -> str:
    if rank:
        from .spoke import reason  # noqa: PLC0415 - it is already imported

        return reason(error, place)
    return "rank 0 cannot listen at %s: %s. Is this node rank 0, and is that its address?" % (
        place,
        error.strerror or error,
    )
