"""Passes on the frames of other agents: in a large run only some agents are connected to the hub, and serve the others.

The hub decides who is connected to whom. It lets the first ``Link.width`` agents join, and sends each further one to
one of these (``{"through": [address, port]}``). That one authenticates it like the hub, and gives it a *channel*, a
number for as long as both connections exist. Messages are numbered and acknowledged between the agent and the hub, as
without a relay, so a relay keeps nothing: when either connection ends, so does the channel. The agent then comes to the
hub again, and nothing is lost. If it could not reach the relay, it says so (``"direct": true``), and joins the hub.

Between the hub and a relay, beside the relay's own lines::

    @7 …                                    the frame … of channel 7, both ways
    @7 {"hello": {…}, "address": "…"}       the first one: an agent wants to join
    {"alive": [7, 9]}                       the agents of these channels were heard; once a second, their heartbeats
    {"closed": 7, "by_peer": true}          the agent's connection ended; whether its kernel closed it
    {"close": 7}                            from the hub: end it

To the agents that it serves, a relay sends a heartbeat only if it has heard the hub since the last one. When the kernel
of the hub has closed its connection, it sends them ``{"closed": true}``.

A free port is used, at the address by which the agent reaches the hub. If a firewall is in between, all agents are
connected to the hub.
"""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from .door import Door, PendingConnection
from .endpoint import WAITING, Loop, Peer
from .protocol import MESSAGE, READ, Connection, EndedError, InvalidMessageError, encode, routed, split_routed

MORE = 32  # bytes at most that a channel adds to a payload


class _Served:
    """An agent that this one serves."""

    def __init__(self, connection: Connection, channel: int) -> None:
        self.connection = connection
        self.channel = channel
        self.heard = True  # since the last report to the hub
        self.joined = False  # the hub has answered it


class Relay:
    """See the module. Used by the thread of ``loop``.

    Args:
        loop: calls the handlers of the connections.
        token: of the run.
        nodes: the number of agents.
        hub: its connection carries the channels.
        pump: writes what waits on that connection.
    """

    def __init__(self, loop: Loop, token: str, nodes: int, hub: Peer, pump: Callable[[], None]) -> None:
        self._loop, self._token, self._nodes = loop, token, nodes
        self._hub, self._pump = hub, pump
        self._door: Optional[Door] = None
        self._carrier: Optional[Connection] = None
        self._channels = itertools.count(1)
        self._served: Dict[int, _Served] = {}
        self._early: List[Tuple[PendingConnection, Dict[str, Any]]] = []  # they came before the hub's welcome
        self._paused: Set[int] = set()  # channels that are not read
        self._told = 0.0  # when the hub was last heard before the last heartbeat

    def listen(self, host: str) -> Optional[int]:
        """Listen at this address of the node, if it does not yet. Returns the port, or None if that is not possible."""
        if self._door is None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                address = socket.getaddrinfo(host, 0, family, socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][4]
                self._door = Door(self._loop, self._token, self._nodes, (family, address), self._admit)
            except OSError:
                return None
        return self.port

    @property
    def port(self) -> Optional[int]:
        """The port at which it listens, once it does."""
        return self._door.port if self._door is not None else None

    def serve(self, carrier: Optional[Connection]) -> None:
        """Use this connection to the hub from now on; None: it leads through another relay, so none is served."""
        self.end(hub_closed=False)
        self._carrier = carrier
        early, self._early = self._early, []
        for newcomer, hello in early:
            if carrier is None:
                newcomer.connection.close()
            else:
                self._admit(newcomer, hello)

    def end(self, hub_closed: bool) -> None:
        """End all channels: the connection to the hub has ended. ``hub_closed``: the hub's kernel closed it."""
        self._carrier = None
        served, self._served = self._served, {}
        for each in served.values():
            if hub_closed and each.joined:
                each.connection.send_frame(encode({"closed": True}))
            self._leave(each)

    def stop(self) -> None:
        """End all channels, and stop listening."""
        self.serve(None)
        if self._door is not None:
            self._door.stop()
            self._door.close()
            self._door = None

    def pass_down(self, payload: bytes) -> None:
        """Pass a frame of the hub on."""
        channel, rest = split_routed(payload)
        served = self._served.get(channel)
        if served is not None:
            served.joined = True
            served.connection.send_frame(rest)
            self._write(served)

    def close_channel(self, channel: int) -> None:
        """End a channel, as the hub asks."""
        served = self._served.pop(channel, None)
        if served is not None:
            self._leave(served)

    def resume(self) -> None:
        """Read from the agents again, if there is room on the hub's connection."""
        if self._paused and self._carrier is not None and self._carrier.waiting < READ:
            paused, self._paused = self._paused, set()
            for channel in paused & set(self._served):
                self._watch(self._served[channel])

    def tick(self, now: float, beat: bool) -> None:
        """Write what waits, tell both sides who was heard (``beat``), and drop connections without a proof."""
        if self._door is not None:
            self._door.expire(now)
        for newcomer in [early for early in self._early if now > early[0].deadline]:
            self._early.remove(newcomer)
            newcomer[0].connection.close()
        if beat and self._carrier is not None:
            heard = [each.channel for each in self._served.values() if each.heard]
            if heard:
                self._carrier.send_frame(encode({"alive": heard}))
        alive = self._hub.last_arrival > self._told
        for each in list(self._served.values()):
            if beat:
                each.heard = False
                if alive and each.joined and not each.connection.waiting:
                    each.connection.beat()
            self._write(each)
        if beat:
            self._told = self._hub.last_arrival

    def lose(self, connection: Connection, error: Exception) -> None:
        """Handle the failure of a connection, if it belongs to an agent that is served, or to a newcomer."""
        for each in list(self._served.values()):
            if each.connection is connection:
                self._lose(each, isinstance(error, EndedError) and error.by_peer)
        if self._door is not None:
            self._door.lose(connection, error)

    def _admit(self, newcomer: PendingConnection, hello: Dict[str, Any]) -> None:
        if len(self._served) + len(self._early) >= self._nodes:
            newcomer.connection.close()
            return
        if self._carrier is None:
            self._early.append((newcomer, hello))
            return
        served = _Served(newcomer.connection, next(self._channels))
        served.connection.limit = MESSAGE - MORE
        self._served[served.channel] = served
        first = {"hello": hello, "address": newcomer.address}
        self._carrier.send_frame(routed(served.channel), encode(first))
        self._loop.watch(served.connection, lambda events: self._ready(served, events))
        self._pass_up(served)

    def _ready(self, served: _Served, events: int) -> None:
        if events & selectors.EVENT_READ:
            try:
                served.connection.fill()
            except EndedError:
                self._pass_up(served)  # its last frames
                raise
            self._pass_up(served)
        self._write(served)

    def _pass_up(self, served: _Served) -> None:
        """Pass on all complete frames."""
        carrier = self._carrier
        while carrier is not None and served.channel in self._served:
            payload = served.connection.payload()
            if payload is None:
                break
            served.heard = True
            if payload:
                carrier.send_frame(routed(served.channel), payload)
        self._pump()

    def _write(self, served: _Served) -> None:
        connection = served.connection
        if served.channel not in self._served:  # what was passed on has ended the hub's connection
            return
        try:
            connection.flush()
        except EndedError as error:
            if error.by_peer:
                with contextlib.suppress(EndedError, InvalidMessageError):
                    while connection.fill():  # its last frames
                        self._pass_up(served)
            self._lose(served, error.by_peer)
            return
        if connection.waiting > WAITING:  # it does not read
            self._lose(served, by_peer=False)
        else:
            self._watch(served)

    def _watch(self, served: _Served) -> None:
        """Wait for the agent, and read from it only while there is room on the hub's connection."""
        reading = self._carrier is not None and self._carrier.waiting < READ
        if not reading:
            self._paused.add(served.channel)
        self._loop.watch(served.connection, lambda events: self._ready(served, events), reading)

    def _lose(self, served: _Served, by_peer: bool) -> None:
        if self._served.pop(served.channel, None) is not None:
            self._tell_closed(served.channel, by_peer)
        self._cut(served.connection)

    def _tell_closed(self, channel: int, by_peer: bool) -> None:
        if self._carrier is not None:
            self._carrier.send_frame(encode({"closed": channel, "by_peer": by_peer}))
            self._pump()

    def _leave(self, served: _Served) -> None:
        try:
            served.connection.flush()
        except EndedError:
            return
        finally:
            self._cut(served.connection)

    def _cut(self, connection: Connection) -> None:
        self._loop.forget(connection)
        connection.close()


def address_of(through: Any) -> Tuple[Any, Any]:
    """The family and socket address of the relay that a hub has named.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(through, list) or [type(each) for each in through] != [str, int]:
        raise ValueError("no address and port")
    try:
        found = socket.getaddrinfo(through[0], through[1], type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    except (OSError, OverflowError, UnicodeError) as error:
        raise ValueError(str(error)) from error
    return found[0], found[4]
