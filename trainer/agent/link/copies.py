"""Copies files of a checkpoint from node to node, over connections beside the link.

Only rank 0's address is known to be reachable. An agent that wants files connects to rank 0 and names the rank that has
them. For another rank, rank 0 asks that rank over the link to connect too, with a ticket, and forwards the bytes.
Copies in the background try the address of that rank first, see ``direct.py``. Each connection has its own thread, so
the link's heartbeats continue meanwhile.

::

    receiver  {"get": "checkpoint-20/model.safetensors", "size": 123, "pace": 5000000, "from": 23}
    sender    {"size": 123, "mtime": 1700000000000000000}  and 123 bytes in pieces  and {"end": true}
          or  {"error": why}

``pace``, in bytes per second, is for copies in the background: the sender then sends no faster, at the lowest priority.
``from`` is the byte to start at: a part of the file is here from an earlier connection.

Each message and each piece is a frame with a MAC (see ``protocol.py``). A byte that another host changed ends the
connection before it is written.

A name is relative to the shared folder. No part of it may be ``..`` or a symlink, on either side. A file is written
under a temporary name in its folder, and renamed when all of its bytes have arrived. So a file of that name is always
complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import selectors
import socket
import stat
import threading
import time
from typing import Any, Callable, Counter, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from ..contract.untrusted import whole
from . import CopyError, DigestError, HolderLostError
from .protocol import (
    CANCEL_CHECK,
    DEADLINE,
    LINE,
    PIECE,
    SILENCE,
    Caller,
    InvalidMessageError,
    RefusedError,
    Session,
    Stream,
    UnknownPeerError,
    check_welcome,
    read_line,
)

TEMPORARY = ".clusterctl-copy-"  # prefix of the name of a file that is being written

NAME = 4096  # bytes of a file's name

FLUSH = 64 << 20  # bytes after which a background copy waits for the disk, so that it never has much to write
SLOWEST, FASTEST = 64 << 10, (1 << 31) - 1  # bytes per second of ``pace``; Python passes at most 31 bits
_PACING = getattr(socket, "SO_MAX_PACING_RATE", 47)  # not in Python's module; the same number on all of Linux but SPARC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Wanted(NamedTuple):
    """A file to copy.

    Attributes:
        target: its path here, below the shared folder.
        size: in bytes.
        rank: the node that has it.
        source: its path there; "": the same.
        digest: the SHA-256 that it must have, in hexadecimal digits; "": any.
        mtime: the modification time that it must have; None: any.
        pace: bytes per second; None: as fast as possible.
    """

    target: str
    size: int
    rank: int
    source: str = ""
    digest: str = ""
    mtime: Optional[int] = None
    pace: Optional[int] = None


def lower_priority() -> None:
    """Give the calling thread the lowest priority for processors and, by that, for disks (setpriority(2))."""
    with contextlib.suppress(OSError, AttributeError):  # a system without thread ids: the copy runs as fast as others
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def parts_of(name: Any) -> List[str]:
    """Split a relative name into its parts.

    Raises:
        CopyError: it leads, or might lead, out of the folder.
    """
    parts = name.split("/") if isinstance(name, str) else []
    if not parts or len(name) > NAME or any(part in {"", ".", ".."} or "\0" in part for part in parts):
        raise CopyError("%.200r is not the name of a file below the folder" % (name,))
    return parts


def _open_folder(folder: str, parts: Sequence[str], make: bool) -> int:
    """Open a folder below ``folder``; no part may be a symlink. Returns the descriptor."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in parts:
        try:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=fd)
            below = os.open(part, _FOLDER, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd


def serve(stream: Stream, folder: Optional[str]) -> None:
    """Answer requests until the other side closes the connection. Without a folder every answer is a refusal.

    Raises:
        CopyError: the connection broke, or a file changed while it was sent.
    """
    while True:
        request = stream.receive()
        if request is None:
            return
        try:
            fd = _open_file(folder, request)
        except (CopyError, OSError, UnicodeError) as error:
            stream.send({"error": getattr(error, "strerror", None) or str(error)})
            continue
        pace = whole(request.get("pace"))
        if pace:
            lower_priority()
            stream.sock.setsockopt(socket.SOL_SOCKET, _PACING, min(FASTEST, max(SLOWEST, pace)))
        with os.fdopen(fd, "rb", buffering=0) as file:
            send_file(stream, file, whole(request.get("from")) or 0)


def _open_file(folder: Optional[str], request: Dict[str, Any]) -> int:
    if folder is None:
        raise CopyError("no folder is shared there")
    parts = parts_of(request.get("get"))
    above = _open_folder(folder, parts[:-1], make=False)
    try:
        fd = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=above)
    finally:
        os.close(above)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size != request.get("size"):
        os.close(fd)
        raise CopyError("it is not a file of %.40r bytes (it has %d)" % (request.get("size"), found.st_size))
    return fd


def send_file(stream: Stream, file: Any, start: int = 0) -> None:
    """Send an open file in pieces from a byte on, with its size and modification time."""
    found = os.fstat(file.fileno())
    stream.send({"size": found.st_size, "mtime": found.st_mtime_ns})
    piece = memoryview(bytearray(PIECE))
    left = max(0, found.st_size - start)
    if start:
        file.seek(start)
    while left:
        count = file.readinto(piece[: min(left, PIECE)])
        if not count:
            raise CopyError("%s became shorter while it was sent" % file.name)
        stream.write(piece[:count])
        left -= count
    stream.send({"end": True})


def receive(stream: Stream, folder: str, wanted: Wanted, label: str, on_bytes: Callable[[int], None]) -> str:
    """Request one file and put it in its place. Returns its SHA-256 if it was asked for or is paced, else "".

    ``on_bytes`` is called with the number of bytes of each piece. ``label`` makes the temporary name unique to this
    node, because nodes may share the folder.

    Raises:
        DigestError: it has another digest than it must have; then nothing has changed.
        CopyError: it did not arrive completely; then nothing has changed.
        OSError: it could not be written.
    """
    name, size = wanted.source or wanted.target, wanted.size
    start = _part_size(folder, wanted, label)
    stream.send(dict({"get": name, "size": size}, **({"pace": wanted.pace, "from": start} if wanted.pace else {})))
    answer = stream.receive()
    if answer is None:
        raise CopyError("%s: the other side closed the connection" % name)
    if answer.get("size") != size:
        raise CopyError("%s: %s" % (name, str(answer.get("error", "it is not %d bytes there" % size))[:1000]))
    mtime = whole(answer.get("mtime", 0))
    if mtime is None:
        raise CopyError("%s: the other side sent no modification time" % name)
    if wanted.mtime not in (None, mtime):
        raise CopyError("%s: it was written again meanwhile" % name)

    def write(file: Any, digest: Any) -> None:
        _write(stream, file, name, size - start, on_bytes, digest)

    return _put(folder, wanted, label, mtime, write, start)


def copy_here(folder: str, wanted: Wanted, label: str, on_bytes: Callable[[int], None]) -> str:
    """Copy a file below the folder, as ``receive`` does from another node."""
    source = parts_of(wanted.source)
    above = _open_folder(folder, source[:-1], make=False)
    try:
        fd = os.open(source[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    finally:
        os.close(above)
    with os.fdopen(fd, "rb", buffering=0) as file:

        def write(target: Any, digest: Any) -> None:
            while True:
                piece = file.read(PIECE)
                if not piece:
                    break
                digest.update(piece)
                _write_all(target, memoryview(piece))
                on_bytes(len(piece))

        return _put(folder, wanted, label, os.fstat(fd).st_mtime_ns, write)


def _continues(wanted: Wanted) -> bool:
    """Whether a part of the file stays when the copy breaks off, for the next try."""
    return wanted.pace is not None and wanted.mtime is not None and wanted.size >= FLUSH


def _temporary(wanted: Wanted, label: str) -> str:
    """The name of a file that is being written. That of a part that stays says of which file it is."""
    if not _continues(wanted):
        return TEMPORARY + label
    about = "%s %d %s" % (wanted.target, wanted.size, wanted.mtime)
    return "%s%s-%s" % (TEMPORARY, label, hashlib.sha256(about.encode("utf-8", "surrogateescape")).hexdigest()[:16])


def _part_size(folder: str, wanted: Wanted, label: str) -> int:
    """The bytes of a file that are here from an earlier try."""
    if not _continues(wanted):
        return 0
    try:
        above = _open_folder(folder, parts_of(wanted.target)[:-1], make=False)
    except OSError:
        return 0
    try:
        found = os.stat(_temporary(wanted, label), dir_fd=above, follow_symlinks=False)
        # What came after the last flush may be damaged if the machine has crashed since.
        flushed = max(0, found.st_size - FLUSH - PIECE)
        return flushed if stat.S_ISREG(found.st_mode) and found.st_size <= wanted.size else 0
    except OSError:
        return 0
    finally:
        os.close(above)


def _put(folder: str, wanted: Wanted, label: str, mtime: int, write: Callable[[Any, Any], None], start: int = 0) -> str:
    """Write a file under a temporary name, check its digest, and rename it.

    ``write`` gets the file and the digest. It writes from the byte ``start`` on; the bytes before are there.
    """
    parts = parts_of(wanted.target)
    above = _open_folder(folder, parts[:-1], make=True)
    temporary = _temporary(wanted, label)
    digest: Any = hashlib.sha256() if wanted.digest or wanted.pace else None
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=above)
        try:
            with os.fdopen(fd, "r+b", buffering=0) as file:
                file.truncate(start)
                while digest is not None and file.tell() < start:
                    digest.update(file.read(PIECE))
                write(file, digest)
                os.fsync(fd)
                if wanted.pace:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # the memory belongs to the training
                os.utime(fd, ns=(mtime, mtime))
            found: str = "" if digest is None else digest.hexdigest()
            _check_digest(wanted, found)
            os.rename(temporary, parts[-1], src_dir_fd=above, dst_dir_fd=above)
        except BaseException as error:
            if isinstance(error, DigestError) or not _continues(wanted):
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=above)
            raise
    finally:
        os.close(above)
    return found


def _check_digest(wanted: Wanted, found: str) -> None:
    if wanted.digest and found != wanted.digest:
        raise DigestError(wanted.rank, wanted.source or wanted.target)


def _write_all(file: Any, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _write(stream: Stream, file: Any, name: str, size: int, on_bytes: Callable[[int], None], digest: Any) -> None:
    piece = memoryview(bytearray(PIECE))
    left, unflushed = size, 0
    while left:
        count = stream.read(piece[: min(left, PIECE)])
        if not count:
            raise CopyError("%s: the other side closed the connection with %d bytes missing" % (name, left))
        if digest is not None:
            digest.update(piece[:count])
            unflushed += count
        _write_all(file, piece[:count])
        left -= count
        if unflushed >= FLUSH:
            os.fdatasync(file.fileno())
            unflushed = 0
        on_bytes(count)
    end = stream.receive()
    if end is None or end.get("end") is not True:
        raise CopyError("%s: the other side did not confirm the end of the file" % name)


def pump(one: Stream, other: Stream) -> None:
    """Forward frames between two connections, both ways, until one of them closes.

    Raises:
        CopyError: one of them broke, or nothing arrived for ``SILENCE`` seconds.
    """
    piece = memoryview(bytearray(max(PIECE, LINE)))
    with selectors.DefaultSelector() as selector:
        selector.register(one.sock, selectors.EVENT_READ, (one, other))
        selector.register(other.sock, selectors.EVENT_READ, (other, one))
        while True:
            ready = selector.select(SILENCE)
            if not ready:
                raise CopyError("no data arrived for %d s" % SILENCE)
            for key, _ in ready:
                source, target = key.data
                count = source.read(piece)
                if count is None:
                    return
                target.write(piece[:count])


COMES = 20.0  # seconds in which a node connects after rank 0's request
TRIES = 3  # for each node that sends files: connections break
AT_ONCE = 8  # connections of one rank that rank 0 serves at once; an agent uses one at a time


class Copies:
    """The copying of one agent.

    Args:
        who: this agent's claim when it connects.
        token: the run's.
        address: family and socket address of the hub.
        ask: sends a message to a rank over the link.
    """

    def __init__(
        self, who: Dict[str, Any], token: str, address: Tuple[Any, Any], ask: Callable[[int, Dict[str, Any]], None]
    ) -> None:
        self.hub = 0  # the position of the agent at ``address``; another one after the loss of the hub
        self.folder: Optional[str] = None  # the shared folder: files are read and written only below it
        self._who = who
        self.token = token
        self.address = address
        self._ask = ask
        self.open_sockets: Set[socket.socket] = set()
        self._closed = False
        self._tickets: Dict[str, Optional[Stream]] = {}
        self.addresses: Dict[int, Tuple[str, int]] = {}  # of ranks that serve files themselves, see ``direct.py``
        self.served: Counter[int] = Counter()  # by rank, the connections that rank 0 serves
        self._changed = threading.Condition()

    def close(self) -> None:
        """End all copies."""
        with self._changed:
            self._closed = True
            for sock in self.open_sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()

    def accept(self, hello: Dict[str, Any], sock: socket.socket, session: Session) -> None:
        """Rank 0: serve an authenticated connection."""
        rank = hello["rank"]
        with self._changed:
            busy = self.served[rank] >= AT_ONCE
            if not busy:
                self.served[rank] += 1
        if busy:
            sock.close()
        else:
            self._begin(lambda: self._serve(rank, hello, Stream(sock, session)))

    def _serve(self, rank: int, hello: Dict[str, Any], stream: Stream) -> None:
        try:
            self._accepted(hello, stream)
        finally:
            with self._changed:
                self.served[rank] -= 1

    def give(self, ticket: str) -> None:
        """Another rank: connect to rank 0, which requests files from here."""
        self._begin(lambda: self.serve_files(self._connect({"purpose": "give", "ticket": ticket})))

    def fetch(
        self,
        files: Iterable[Tuple[Any, ...]],
        alive: Callable[[], bool] = lambda: True,
        on_bytes: Callable[[int], None] = lambda _: None,
        done: Callable[[Wanted, str], None] = lambda _, __: None,
        lost: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Copy files into the shared folder, see ``Link.fetch``.

        Raises:
            DigestError: a file comes from a folder of copies, and was damaged there.
            HolderLostError: the node that has a file, or the hub between, is lost.
            CopyError: a file could not be copied; those before it are in place.
            OSError: the disk refuses.
        """
        folder = self.folder
        if folder is None:
            raise CopyError("there is no folder to copy to")
        by_rank: Dict[int, List[Wanted]] = {}
        for each in files:
            by_rank.setdefault(each[2], []).append(Wanted(*each))
        for rank, wanted in sorted(by_rank.items()):
            if rank == self._who["rank"]:
                for one in wanted:
                    done(one, copy_here(folder, one, str(rank), on_bytes))
            else:
                self._fetch_from(rank, wanted, folder, alive, on_bytes, done, lost)

    def _fetch_from(
        self,
        rank: int,
        wanted: List[Wanted],
        folder: str,
        alive: Callable[[], bool],
        on_bytes: Callable[[int], None],
        done: Callable[[Wanted, str], None],
        lost: Callable[[int], bool],
    ) -> None:
        """Copy the files of one rank, in several tries; copied files are removed from ``wanted``."""

        def going() -> bool:
            return alive() and not self._closed and self._lost_between(rank, lost) is None

        for left in range(TRIES - 1, -1, -1):
            try:
                with self._kept(self.open_channel(rank, going)) as stream:
                    while wanted:
                        digest = receive(stream, folder, wanted[0], str(self._who["rank"]), on_bytes)
                        done(wanted.pop(0), digest)
                break
            except DigestError:
                raise
            except CopyError as error:
                gone = self._lost_between(rank, lost)
                if gone is not None:
                    raise HolderLostError(gone) from error
                if not left or not alive():
                    raise CopyError("from rank %d: %s" % (rank, error)) from error

    def _lost_between(self, rank: int, lost: Callable[[int], bool]) -> Optional[int]:
        """The position of the lost node on the way to a rank: the rank's own, or the hub; None: no node is lost."""
        way = (rank,) if rank in self.addresses else (rank, self.hub)
        return next((position for position in way if lost(position)), None)

    def _begin(self, work: Callable[[], None]) -> None:
        def run() -> None:
            # The receiving side sees that its connection closes, and reports it.
            with contextlib.suppress(CopyError, OSError):
                work()

        threading.Thread(target=run, name="copy", daemon=True).start()

    @contextlib.contextmanager
    def _kept(self, stream: Stream) -> Iterator[Stream]:
        """Register a connection, so that ``close`` ends it too. Closes it at the end."""
        with stream.sock as sock:
            with self._changed:
                if self._closed:
                    raise CopyError("the run is ending")
                self.open_sockets.add(sock)
            try:
                yield stream
            finally:
                with self._changed:
                    self.open_sockets.discard(sock)

    @property
    def run(self) -> str:
        """The run's id."""
        return str(self._who["run"])

    def own_address(self) -> str:
        """The address by which this node reaches the hub; on the hub's node, the one at which it listens.

        Raises:
            OSError: there is none.
        """
        if self._who["rank"] == self.hub:
            return str(self.address[1][0])
        with socket.socket(self.address[0], socket.SOCK_DGRAM) as sock:
            sock.connect(self.address[1])  # sends nothing
            return str(sock.getsockname()[0])

    def serve_files(self, stream: Stream) -> None:
        """Serve an authenticated connection until the other side closes it."""
        with self._kept(stream):
            serve(stream, self.folder)

    def _accepted(self, hello: Dict[str, Any], stream: Stream) -> None:
        if hello.get("purpose") == "give":
            ticket = hello.get("ticket")
            with self._changed:
                if isinstance(ticket, str) and ticket in self._tickets and self._tickets[ticket] is None:
                    self._tickets[ticket] = stream
                    self._changed.notify_all()
                    return
            stream.sock.close()
            return
        rank = whole(hello.get("from"))
        if rank == self._who["rank"]:
            self.serve_files(stream)
        elif rank is None:
            stream.sock.close()
        else:
            with self._kept(stream), self._kept(self.open_channel(rank)) as other:
                pump(stream, other)

    def open_channel(self, rank: int, going: Callable[[], bool] = lambda: True) -> Stream:
        """Open a connection that the given rank serves: directly, if its address is known, else through the hub.

        ``going`` cancels it, and later the copies over the connection, by returning False.
        """
        address = self.addresses.get(rank)
        if address is not None:
            try:
                return self._connect({"purpose": "copy", "from": rank}, address, going)
            except CopyError:
                self.addresses.pop(rank, None)  # a firewall, say
        if self._who["rank"] != self.hub:
            return self._connect({"purpose": "copy", "from": rank}, None, going)
        ticket = secrets.token_hex(16)
        with self._changed:
            self._tickets[ticket] = None
        self._ask(rank, {"kind": "_give", "ticket": ticket})
        stream = None
        limit = time.monotonic() + COMES
        while stream is None and not self._closed and going() and time.monotonic() < limit:
            with self._changed:
                if self._tickets[ticket] is None:
                    self._changed.wait(max(0.0, min(CANCEL_CHECK, limit - time.monotonic())))
                stream = self._tickets[ticket]
        with self._changed:
            stream = self._tickets.pop(ticket)
        if stream is None:
            raise CopyError("rank %s did not connect within %d s" % (rank, COMES))
        stream.alive = going
        return stream

    def _connect(
        self,
        purpose: Dict[str, Any],
        direct: Optional[Tuple[str, int]] = None,
        going: Callable[[], bool] = lambda: True,
    ) -> Stream:
        """Connect to the hub, or directly to another agent, with the handshake."""
        family = self.address[0] if direct is None else socket.AF_INET6 if ":" in direct[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(DEADLINE)
            sock.connect(self.address[1] if direct is None else direct)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller = Caller(self.token, str(self._who["run"]), int(self._who["rank"]))
            sock.sendall(caller.first())
            sock.sendall(caller.take(read_line(sock)))
            assert caller.session is not None
            stream = Stream(sock, caller.session, going)
            stream.send(dict(self._who, **purpose))
            check_welcome(stream.receive() or {"refused": "it closed the connection"})
        except (OSError, InvalidMessageError, UnknownPeerError, RefusedError, CopyError) as error:
            sock.close()
            raise CopyError("no connection to %s: %s" % ("rank 0" if direct is None else direct[0], error)) from error
        except BaseException:
            sock.close()
            raise
        return stream
