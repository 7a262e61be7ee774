"""Answers the controller before a run: fingerprints of paths, reachability between nodes, the clock.

It uses one process and one connection for everything, because a connection is more expensive than the answers. With
paths it first prints ``content JSON`` (``digests``). Then it answers the lines of stdin until its end:

``listen TOKEN NAME ADDRESS PORT...``
    ``self A`` (the number of ADDRESS), ``listen KIND PORT open`` or the error, for each port, and ``ready``. Port 0 is
    any free port, of the kind ``random``; the first of the others is ``master``, the second ``link``. Each connection
    receives the token, the name and its own address.
``time``
    ``time SECONDS`` since the epoch.
``connect SECONDS (PEER KIND ADDRESS PORT)...``
    ``tried PEER KIND PORT open SEEN OWN`` (the address from which the listener saw it come, and what it is here), or
    ``timeout``, ``refused``, ``unreachable TEXT``, ``foreign`` (another program answered); then ``done``.

Equal fingerprints mean: the same names and sizes, the same content of every file below 16 MiB, and the same first and
last MiB of larger ones. So they detect another checkpoint, a truncated download and an edited file, while 140 GB of
weights need a few reads. They do not detect a change in the middle of a large file, which no copy makes.

Links are followed, because a model in a hub's cache is a folder of links. Names that start with a dot are skipped,
because downloads keep notes there. Files that are not read in time count by name and size only (``partial``).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import select
import signal
import socket
import stat
import sys
import threading
import time
from typing import Any, Dict, Iterator, List, Tuple

from .contract.untrusted import UntrustedError, parse_object

_GREETING = 1024  # bytes
_HELD = 4096  # connections that are kept open
_NAMED = ("master", "link")  # the purposes of the ports, in the order of the arguments


def talk(paths: List[str], patience: float) -> int:
    """Answer until the end of stdin."""
    if paths:
        _print("content " + json.dumps(digests(paths, patience), sort_keys=True))
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


WHOLE = 16 << 20  # bytes up to which a file is read completely
EDGE = 1 << 20  # bytes of a larger file that are read at either end
LISTED = 200  # maximal number of files that are listed, so that the one that differs can be named
PATIENCE = 2.0  # seconds of reading
READERS = 8  # files at once
_ANSWER = 4 << 20  # bytes
_SPARE = 1.0  # extra seconds after which a path counts as hung: a process stuck in the kernel cannot be interrupted


def digests(paths: List[str], patience: float = PATIENCE) -> Dict[str, Dict[str, Any]]:
    """Compute the fingerprint of each path.

    ================  =================================================================================
    ``state``         "file", "folder", "missing", "unread" (``error`` says why) or "hung"
    ``names``         a digest of all names and sizes; "" if not all were listed in time
    ``content``       a digest of the content that was read
    ``partial``       a file was not read in time: ``content`` cannot be compared
    ``files``         their number; ``bytes``: their size
    ``entries``       ``{name: "SIZE DIGEST"}`` of up to 200 files; DIGEST is "-" if it was not read
    ================  =================================================================================

    A separate process reads each path, so a path on a dead file system delays neither the others nor the answer.
    """
    waiting = {}
    for path in paths:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _child(path, patience, writer)
        os.close(writer)
        waiting[reader] = (path, pid, bytearray())
    found: Dict[str, Dict[str, Any]] = {}
    until = time.monotonic() + patience + _SPARE
    while waiting and time.monotonic() < until:
        for reader in select.select(list(waiting), [], [], max(0.0, until - time.monotonic()))[0]:
            path, pid, answer = waiting[reader]
            data = os.read(reader, 1 << 16)
            answer += data
            if not data:
                del waiting[reader]
                os.close(reader)
                os.waitpid(pid, 0)
                found[path] = parse_answer(bytes(answer))
    for path, pid, _ in waiting.values():
        os.kill(pid, signal.SIGKILL)  # without waiting: it may be stuck in the kernel
        found[path] = _nothing("hung", "no answer within %g s" % (patience + _SPARE))
    return {path: found[path] for path in paths}


def parse_answer(answer: bytes) -> Dict[str, Any]:
    """Parse the answer of the process that read a path."""
    try:
        return parse_object(answer, limit=_ANSWER)
    except UntrustedError:  # the reader was killed
        return _nothing("unread", "it could not be read")


def _child(path: str, patience: float, writer: int) -> None:
    """Write the fingerprint of ``path`` and exit. Closes the outputs, which a hung process would keep open."""
    status = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        with os.fdopen(writer, "w") as out:
            json.dump(look(path, patience), out)
        status = 0
    finally:
        os._exit(status)


def look(path: str, patience: float) -> Dict[str, Any]:
    """Compute the fingerprint of one path; see ``digests``."""
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - no other command of the agent needs it

    until = time.monotonic() + patience
    try:
        kind = os.stat(path).st_mode  # noqa: PTH116
        if not stat.S_ISDIR(kind) and not stat.S_ISREG(kind):
            return _nothing("unread", "it is neither a file nor a folder")
        files, complete = _walk(path, until) if stat.S_ISDIR(kind) else ([("", path, os.stat(path).st_size)], True)  # noqa: PTH116
        with ThreadPoolExecutor(READERS) as pool:
            read = list(pool.map(lambda each: _content(each[1], each[2], until), files))
    except FileNotFoundError:
        return _nothing("missing", "")
    except OSError as error:
        return _nothing("unread", "%s: %s" % (error.filename or path, error.strerror))
    entries = {files[at][0]: "%d %s" % (files[at][2], digest) for at, digest in enumerate(read)}
    names = "".join("%d %s\0" % (size, name) for name, _, size in files)
    return {
        "state": "folder" if stat.S_ISDIR(kind) else "file",
        "error": "",
        "names": _hex(names) if complete else "",
        "content": _hex("".join("%s\0%s\0" % item for item in entries.items())),
        "partial": not complete or "-" in read,
        "files": len(files),
        "bytes": sum(size for _, _, size in files),
        "entries": entries if complete and len(entries) <= LISTED else {},
    }


def _nothing(state: str, error: str) -> Dict[str, Any]:
    empty = {"names": "", "content": "", "partial": False, "files": 0, "bytes": 0, "entries": {}}
    return dict(empty, state=state, error=error)


def _hex(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _walk(top: str, until: float) -> Tuple[List[Tuple[str, str, int]], bool]:
    """List every file below ``top``: its name there, its path, its size; and whether all were listed in time."""
    found: List[Tuple[str, str, int]] = []
    todo = [("", top, frozenset([_identity(top)]))]
    while todo:
        above, folder, seen = todo.pop()
        with os.scandir(folder) as items:
            for item in items:
                if time.monotonic() > until:
                    return sorted(found), False
                if item.name.startswith("."):
                    continue
                name = above + item.name
                if item.is_dir():
                    identity = _identity(item.path)
                    if identity not in seen:  # a link to a folder above
                        todo.append((name + "/", item.path, seen | {identity}))
                elif item.is_file():
                    found.append((name, item.path, item.stat().st_size))
                elif item.is_symlink():
                    found.append((name, item.path, -1))  # a broken link
    return sorted(found), True


def _identity(path: str) -> Tuple[int, int]:
    found = os.stat(path)  # noqa: PTH116
    return found.st_dev, found.st_ino


def _content(path: str, size: int, until: float) -> str:
    """A digest of a file, or of both ends of a large one; "-" without time left, "!" if it cannot be read."""
    if size < 0:
        return "!"
    if time.monotonic() > until:
        return "-"
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            if size > WHOLE:
                digest.update(file.read(EDGE))
                file.seek(-EDGE, os.SEEK_END)
            while True:
                piece = file.read(EDGE)
                digest.update(piece)
                if not piece:
                    return digest.hexdigest()[:32]
    except PermissionError as error:
        raise PermissionError(error.errno, error.strerror, path) from error
    except OSError:  # it was deleted meanwhile
        return "!"
