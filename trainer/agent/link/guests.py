"""Connections to rank 0 that have proved nothing yet: how many there may be, and which one makes room.

Every address has a share of the slots, so an address that opens connection after connection only displaces its own.
Inside a share, guests that have not sent a valid first line go first, and among equals chance decides: a process beside
an agent that opens connections all the time cannot make sure that it is always the agent's that goes.
"""

from __future__ import annotations

import random
import socket
import time
from typing import Any, Callable, Dict, List, Optional

from link.frames import Connection
from link.proof import DEADLINE, Host

SHARE = 16  # slots of one address, and one more for each node: all agents may share an address
ROOM = 64  # slots of all addresses together, and four more for each node

_RANDOM = random.SystemRandom()


class Guest:
    """One such connection. ``address`` is the text for messages."""

    def __init__(self, connection: Connection, address: str, token: str) -> None:
        self.connection = connection
        self.address = address
        self.host = Host(token)
        self.deadline = time.monotonic() + DEADLINE


def _network(address: str) -> str:
    """What shares a share: an IPv4 address; of IPv6 a /64, all of which one machine may use."""
    if ":" not in address:
        return address
    return socket.inet_pton(socket.AF_INET6, address.partition("%")[0])[:8].hex()


class Guests:
    """All of them."""

    def __init__(self, nodes: int, choose: Callable[[List[Guest]], Guest] = _RANDOM.choice) -> None:
        self._share = SHARE + nodes
        self._room = ROOM + 4 * nodes
        self._choose = choose
        self._all: Dict[int, Guest] = {}  # by the connection's identity
        self._by_network: Dict[str, Dict[int, Guest]] = {}

    def __iter__(self) -> Any:
        return iter(list(self._all.values()))

    def find(self, connection: Connection) -> Optional[Guest]:
        """The guest of a connection."""
        return self._all.get(id(connection))

    def add(self, guest: Guest) -> None:
        """Add one, for which ``crowded`` has said that there is room."""
        self._all[id(guest.connection)] = guest
        self._by_network.setdefault(_network(guest.address), {})[id(guest.connection)] = guest

    def remove(self, guest: Guest) -> None:
        """Remove one."""
        self._all.pop(id(guest.connection), None)
        network = _network(guest.address)
        same = self._by_network.get(network, {})
        same.pop(id(guest.connection), None)
        if not same:
            self._by_network.pop(network, None)

    def crowded(self, address: str) -> Optional[Guest]:
        """Who must go before a connection from this address is added; None where there is room."""
        same = self._by_network.get(_network(address), {})
        if len(same) >= self._share:
            return self._one_of(same)
        if len(self._all) >= self._room:
            return self._one_of(max(self._by_network.values(), key=len))
        return None

    def _one_of(self, guests: Dict[int, Guest]) -> Guest:
        silent = [guest for guest in guests.values() if guest.host.claimed is None]
        return self._choose(silent or list(guests.values()))
