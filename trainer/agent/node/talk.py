"""Answers the controller before a run: fingerprints of paths, reachability between nodes, the clock.

It uses one process and one connection for everything, because a connection is more expensive than the answers. With
paths it first prints ``content JSON`` (``digests.py``). Then it answers the lines of stdin until its end:

``listen TOKEN NAME ADDRESS PORT...``
    ``self A`` (the number of ADDRESS), ``listen KIND PORT open`` or the error, for each port, and ``ready``. Port 0 is
    any free port, of the kind ``random``; the first of
        the others is ``master``, the second ``link``. Each connection receives the token, the name and its own address.
``time``
    ``time SECONDS`` since the epoch.
``connect SECONDS (PEER KIND ADDRESS PORT)...``
    ``tried PEER KIND PORT open SEEN OWN`` (the address from which the listener saw it come, and what it is here), or
    ``timeout``, ``refused``, ``unreachable TEXT``, ``foreign`` (another program answered); then ``done``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import sys
import threading
import time
from typing import Any, Iterator, List

from . import digests

_GREETING = 1024  # bytes
_HELD = 4096  # connections that are kept open
_NAMED = ("master", "link")  # the purposes of the ports, in the order of the arguments


def talk(paths: List[str], patience: float) -> int:
    """Answer until the end of stdin."""
    if paths:
        _print("content " + json.dumps(digests.digests(paths, patience), sort_keys=True))
    answers = {"listen": _listen, "time": _time, "connect": _connect}
    token = ""
    held: List[Any] = []
    for line in sys.stdin:
        word, *arguments = line.split()
        if word == "listen":
            token = arguments[0]
        for answer in answers[word](token, arguments, held):
            _print(answer)
    return 0


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _time(_token: str, _arguments: List[str], _held: List[Any]) -> Iterator[str]:
    yield "time %.6f" % time.time()


# --- listening -----------------------------------------------------------------------------------


def _listen(token: str, arguments: List[str], held: List[Any]) -> Iterator[str]:
    _, name, own, *ports = arguments
    try:
        yield "self %s" % _plain(_found(own, 0)[1])
    except OSError:
        yield "self -"
    kinds = list(_NAMED)
    for port in ports:
        kind = kinds.pop(0) if int(port) else "random"
        try:
            listener = _listener(int(port))
        except OSError as error:
            yield "listen %s %s %s" % (kind, port, "busy" if error.errno == errno.EADDRINUSE else error.strerror)
            continue
        threading.Thread(target=_greet, args=(listener, token, name, held), daemon=True).start()
        yield "listen %s %d open" % (kind, listener.getsockname()[1])
    yield "ready"


def _listener(port: int) -> socket.socket:
    """A socket for both kinds of addresses, or for IPv4 alone where the kernel has no other."""
    try:
        return _bound(socket.AF_INET6, "::", port)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
    return _bound(socket.AF_INET, "", port)


def _bound(family: int, address: str, port: int) -> socket.socket:
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket(family))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((address, port))
        sock.listen(1024)
        stack.pop_all()  # keep it open
        return sock


def _greet(listener: socket.socket, token: str, name: str, held: List[Any]) -> None:
    while True:
        try:
            sock, peer = listener.accept()
        except OSError:  # it was closed again
            continue
        held.append(sock)  # the connecting side closes first, so the port in TIME_WAIT is there
        if len(held) > _HELD:
            held.pop(0).close()
        with contextlib.suppress(OSError):
            sock.sendall(("clusterctl %s %s %s\n" % (token, name, _plain(peer))).encode())


# --- connecting ----------------------------------------------------------------------------------


def _connect(token: str, arguments: List[str], _held: List[Any]) -> Iterator[str]:
    """Try all at once, so that one without an answer does not delay the others."""
    seconds = float(arguments[0])
    found: List[str] = []

    def one(peer: str, kind: str, address: str, port: str) -> None:
        found.append("tried %s %s %s %s" % (peer, kind, port, try_connection(token, peer, address, int(port), seconds)))

    threads = [
        threading.Thread(target=one, args=arguments[at : at + 4], daemon=True) for at in range(1, len(arguments), 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield from sorted(found)
    yield "done"


def try_connection(token: str, peer: str, address: str, port: int, seconds: float) -> str:
    """Connect to a peer. Returns the result as in the module's table."""
    try:
        family, to = _found(address, port)
    except OSError:
        return "unreachable %s has no address here" % address
    with socket.socket(family) as sock:
        sock.settimeout(seconds)
        try:
            sock.connect(to)
        except socket.timeout:
            return "timeout"
        except OSError as error:
            known = {errno.ECONNREFUSED: "refused", errno.ETIMEDOUT: "timeout"}
            return known.get(error.errno or 0) or "unreachable %s" % error.strerror
        greeting = b""
        until = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            while b"\n" not in greeting and len(greeting) < _GREETING and time.monotonic() < until:
                data = sock.recv(512)
                if not data:
                    break
                greeting += data
        words = greeting.decode("ascii", "replace").split()
        if len(words) == 4 and words[:3] == ["clusterctl", token, peer]:
            return "open %s %s" % (words[3], _plain(sock.getsockname()))
        return "foreign"


def _found(name: str, port: int) -> Any:
    """Family and address of a name, preferably IPv4."""
    every = socket.getaddrinfo(name, port, 0, socket.SOCK_STREAM)
    first = min(every, key=lambda each: each[0] != socket.AF_INET)
    return first[0], first[4]


def _plain(address: Any) -> str:
    """An address as text; an IPv4 address also if it came through an IPv6 socket."""
    host = str(address[0]).partition("%")[0]
    return host[7:] if host.startswith("::ffff:") and "." in host else host
