"""Looks at the data that waits in this node's TCP sockets to other nodes.

A list of all sockets is expensive: the kernel walks through tables of tens of megabytes. So /proc/net/tcp is read
rarely, and a look asks the kernel for each known socket by its addresses, which takes microseconds (sock_diag(7)).
"""

from __future__ import annotations

import errno
import socket
import struct
import time
from typing import Dict, List, NamedTuple, Optional, Set, Tuple

from .processes import read

SHARE = 0.0005  # of one core that lists of all sockets may take
LEAST = 2.0  # seconds between two lists
MOST = 64  # sockets that are looked at

_PROTOCOL = 4  # NETLINK_SOCK_DIAG, <linux/netlink.h>
_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY, <linux/sock_diag.h>
_REQUEST = 1  # NLM_F_REQUEST
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_ASK = struct.Struct("=BBBBI")  # struct inet_diag_req_v2 up to the socket's addresses
_QUEUE = 16 + 4 + 48 + 8  # where a message has idiag_wqueue, after the header, the addresses and two numbers
_ANSWER = 8192
_PATIENCE = 0.2  # seconds for the kernel's answer


class Socket(NamedTuple):
    """An established connection; addresses as /proc/net/tcp prints them."""

    family: int
    local: str
    local_port: int
    remote: str
    remote_port: int


def sockets(text: str) -> List[Socket]:
    """The established connections to other nodes in /proc/net/tcp or tcp6 (proc(5))."""
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split(None, 4)
        if len(fields) < 5 or fields[3] != "01" or plain(fields[1]) == plain(fields[2]):
            continue
        local, _, local_port = fields[1].partition(":")
        remote, _, remote_port = fields[2].partition(":")
        family = socket.AF_INET6 if len(local) > 8 else socket.AF_INET
        found.append(Socket(family, local, int(local_port, 16), remote, int(remote_port, 16)))
    return found


def plain(place: str) -> str:
    """The address, without a port. An IPv4 address in an IPv6 socket becomes the plain one."""
    address = place.partition(":")[0]
    mapped = address.startswith("0000000000000000FFFF0000")
    return address[24:] if mapped else address


class Queues:
    """The queues of the sockets to other nodes."""

    def __init__(self) -> None:
        self.own: Set[str] = set()  # addresses of this node that others are connected to
        self._known: List[Socket] = []
        self._due = 0.0
        self._kernel: Optional[socket.socket] = None

    def look(self, now: float) -> Dict[str, int]:
        """The bytes that wait, by the address of the other node."""
        if now >= self._due:
            began = time.thread_time()
            self._list()
            self._due = now + max(LEAST, (time.thread_time() - began) / SHARE)
        waiting: Dict[str, int] = {}
        for each in self._known:
            size = self._size(each)
            if size:
                remote = plain(each.remote)
                waiting[remote] = waiting.get(remote, 0) + size
        return waiting

    def close(self) -> None:
        """Close the connection to the kernel."""
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            kernel.close()

    def _list(self) -> None:
        found: List[Socket] = []
        for name in ("/proc/net/tcp", "/proc/net/tcp6"):
            found += sockets(read(name).decode("ascii", "replace"))
        self.own |= {plain(each.local) for each in found[:MOST]}
        self._known = found[:MOST]

    def _size(self, each: Socket) -> int:
        """The bytes that wait in a socket; 0 if it no longer exists or the kernel cannot say."""
        try:
            if self._kernel is None:
                self._kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _PROTOCOL)
                self._kernel.settimeout(_PATIENCE)
            self._kernel.send(request(each))
            answer = self._kernel.recv(_ANSWER)
        except OSError as error:
            if error.errno in (errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT):
                self._known = []
            self.close()  # a late answer must not be read as that of another socket
            return 0
        kind = _HEADER.unpack_from(answer)[1] if len(answer) >= _QUEUE + 4 else 0
        return int(struct.unpack_from("=I", answer, _QUEUE)[0]) if kind == _BY_FAMILY else 0


def request(each: Socket) -> bytes:
    """The question for one socket."""
    states = 1 << 1  # TCP_ESTABLISHED
    ports = struct.pack("!HH", each.local_port, each.remote_port)
    any_interface, any_cookie = struct.pack("=I", 0), b"\xff" * 8
    addresses = _packed(each.local) + _packed(each.remote)
    body = _ASK.pack(each.family, socket.IPPROTO_TCP, 0, 0, states) + ports + addresses + any_interface + any_cookie
    return _HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST, 0, 0) + body


def _packed(address: str) -> bytes:
    """The 16 bytes of an address. The kernel prints words as numbers of this machine."""
    words: Tuple[int, ...] = tuple(int(address[at : at + 8], 16) for at in range(0, len(address), 8))
    return struct.pack("=%dI" % len(words), *words).ljust(16, b"\0")
