"""The agents of a run, joined in a star through rank 0's agent.

``plan["link"]`` is null for one node, else ``{"host": address of rank 0, "port", "token", "nodes": [names by rank],
"lost_after": seconds, at least 3}``. Every call may be made from any thread; only ``meet``, ``fetch`` and ``close``
wait. The order::

    link = Link(plan, wake)
    link.start()
    link.share(output)                                      # where checkpoints lie; before the first meeting
    decision = link.meet(offer, decide)                     # rank 0 decides which checkpoint, which port
    link.fetch(decision["copy"].get(str(rank), []), alive)  # the files this node lacks
    link.meet({}, lambda offers: {})                        # all have them: all start at once
    … link.tell("failed", text=…), link.take() …
    link.close()

``take`` gives what has come, each a dict with ``kind``, and with the ``node`` and ``rank`` it is about, as rank 0 knows
them from the sender's connection. What an agent ``tell``s reaches all others once and in order, also over a
connection that broke meanwhile. These come from the link itself:

===========  =====================================================================================
``lost``     nothing was heard for ``silent`` seconds (more than ``lost_after``): the network, or
             the machine. The peer may well be training
``gone``     its kernel closed the connection, and it has not come back: the agent has ended
``back``     it is heard again
``broken``   the link here has failed (``text``): a mistake in this program
===========  =====================================================================================

An agent that ends by ``close`` is neither lost nor gone. Where an agent was killed, another process may make a Link
with its plan and speak in its stead.
"""

from __future__ import annotations

import collections
import secrets
import socket
import threading
import time
from typing import Any, Callable, Deque, Dict, Iterable, List, Optional, Tuple, Union

from contract.plan import Plan
from link.copies import Copies
from link.hub import Hub
from link.meeting import HubMeeting, LinkError, SpokeMeeting
from link.spoke import Spoke, reason

UNTAKEN = 20_000  # messages that wait for ``take``; more are dropped
TICKET = 64  # characters
GOODBYE = 2.0  # seconds that ``close`` waits until everything said has been acknowledged

__all__ = ["Link", "LinkError"]


def place_of(host: str, port: int) -> str:
    """How an address is written for people."""
    return "[%s]:%d" % (host, port) if ":" in host else "%s:%d" % (host, port)


def _address(host: str, port: int) -> Tuple[Any, Any]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return found[0], found[4]


class Link:
    """This agent's link to all others; see the module. ``wake`` is called, from a thread, when ``take`` has something.

    With one node everything works and nobody else is there.
    """

    def __init__(self, plan: Plan, wake: Callable[[], None]) -> None:
        self._plan = plan
        self._wake = wake
        self._come: Deque[Dict[str, Any]] = collections.deque()
        self._changed = threading.Condition()
        self._end: Optional[Union[Hub, Spoke]] = None
        self._meeting: Optional[Union[HubMeeting, SpokeMeeting]] = None
        self._copies: Optional[Copies] = None

    def start(self) -> None:
        """Listen (rank 0) or begin to connect.

        Raises:
            LinkError: rank 0 cannot listen, or the address is none.
        """
        plan = self._plan
        link = plan.link
        if link is None:
            return
        rank = plan.node_rank
        place = place_of(link.host, link.port)
        instance = secrets.token_hex(8)
        try:
            address = _address(link.host, link.port)
            who = {"run": plan.run, "rank": rank, "instance": instance}
            self._copies = Copies(who, link.token, address, self._tell_one)
            if rank == 0:
                self._end = Hub(plan, link, address, instance, self._deliver, self._copies.accept)
                self._meeting = HubMeeting(self._end, place, self._changed)
            else:
                self._end = Spoke(plan, link, address, place, instance, self._deliver)
                self._meeting = SpokeMeeting(self._end, place, self._changed)
        except OSError as error:
            raise LinkError("the agents' link: %s" % _start_reason(error, rank, place)) from error
        self._end.start()

    def take(self) -> List[Dict[str, Any]]:
        """The messages that have come since the last call."""
        with self._changed:
            come = list(self._come)
            self._come.clear()
            return come

    def tell(self, kind: str, **fields: Any) -> None:
        """Tell all others. A message of more than 16 MiB is not sent, nor one to a peer for which 32 MiB wait."""
        if self._end is not None:
            self._end.tell(dict(fields, kind=kind))

    def meet(
        self,
        offer: Dict[str, Any],
        decide: Callable[[Dict[int, Dict[str, Any]]], Dict[str, Any]],
        patience: float = 120.0,
        alive: Callable[[], bool] = lambda: True,
    ) -> Dict[str, Any]:
        """Wait until all agents are here; rank 0 then decides from what each offers, and all get the decision.

        It is what JSON makes of it: keys are text. ``alive`` is asked several times a second, in this thread; it may
        ``take`` messages, and gives the meeting up with False. Nobody is kept waiting by one that gave up.

        Raises:
            LinkError: somebody has not come (named, with what was seen instead), has ended or has given up, or no
                connection to rank 0 can be made. Whatever ``decide`` raises is raised on rank 0, and a LinkError
                with its text on all others.
        """
        if self._meeting is None:
            return HubMeeting.plain(decide({0: offer}))
        return self._meeting.meet(offer, decide, time.monotonic() + patience, alive)

    def share(self, folder: str) -> None:
        """Let the other agents read below this folder; ``fetch`` writes there."""
        if self._copies is not None:
            self._copies.folder = str(folder)

    def fetch(
        self,
        files: Iterable[Tuple[str, int, int]],
        alive: Callable[[], bool] = lambda: True,
        told: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Copy files, each (name below the shared folder, size, rank that has it). ``told`` gets bytes as they come.

        Raises:
            CopyError: one could not be had.
            OSError: the disk refuses.
        """
        if self._copies is not None:
            self._copies.fetch(files, alive, told)

    def close(self) -> None:
        """Say what is still to be said, say goodbye, and end."""
        if self._copies is not None:
            self._copies.close()
        if self._end is not None:
            self._end.close(GOODBYE)

    def _tell_one(self, rank: int, message: Dict[str, Any]) -> None:
        if self._end is not None and rank in self._end.peers:
            self._end.tell_one(rank, message)

    def _deliver(self, message: Dict[str, Any]) -> None:
        """A message has come; called in the link's thread."""
        kind = str(message.get("kind"))
        if kind == "_give":
            if self._copies is not None and self._plan.node_rank != 0:  # only rank 0 asks for files
                self._copies.asked(str(message.get("ticket"))[:TICKET])
            return
        assert self._meeting is not None  # the thread is started last
        with self._changed:
            if kind.startswith("_"):
                self._meeting.take(kind, message)
            elif len(self._come) < UNTAKEN:
                self._come.append(message)
            self._changed.notify_all()
        if not kind.startswith("_"):
            self._wake()


def _start_reason(error: OSError, rank: int, place: str) -> str:
    if rank:
        return reason(error, place)
    return "rank 0 cannot listen at %s: %s. Is this node rank 0, and is that its address?" % (
        place,
        error.strerror or error,
    )
