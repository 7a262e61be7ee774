"""Connections for files beside the link: rank 0 takes part in each, as giver, as taker or between the two.

Only rank 0's address is known to be reachable. So whoever wants files connects to rank 0 and names the rank that has
them. Where that is another one, rank 0 asks it over the link to connect too, with a ticket, and carries the bytes
between the two connections. Each connection has a thread of its own: the link's heartbeats go on meanwhile.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Set, Tuple

from link.copying import pump, receive, serve
from link.frames import NotOursError, Session
from link.peer import whole
from link.proof import DEADLINE, HELLO, Caller, RefusedError, StrangerError, admitted
from link.stream import CopyError, Stream

COMES = 20.0  # seconds for the connection of a node that was asked to connect
TRIES = 3  # for each node that gives files: connections break
AT_ONCE = 8  # connections of one rank for which rank 0 works; an agent fetches over one after the other


class Copies:
    """The copying of one agent.

    Args:
        who: what this agent says of itself when it connects.
        token: the run's.
        address: family and socket address of rank 0.
        ask: sends a message to a rank over the link.
    """

    def __init__(
        self, who: Dict[str, Any], token: str, address: Tuple[Any, Any], ask: Callable[[int, Dict[str, Any]], None]
    ) -> None:
        self.folder: Optional[str] = None  # what is shared: given and taken below it only
        self._who = who
        self._token = token
        self._address = address
        self._ask = ask
        self._open: Set[socket.socket] = set()
        self._closed = False
        self._tickets: Dict[str, Optional[Stream]] = {}
        self._served: Dict[int, int] = {}  # by rank, its connections for which rank 0 is at work
        self._changed = threading.Condition()

    def close(self) -> None:
        """End everything that is under way."""
        with self._changed:
            self._closed = True
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()

    def accept(self, hello: Dict[str, Any], sock: socket.socket, session: Session) -> None:
        """Rank 0: take a connection whose other end has proved that it belongs to the run."""
        rank = hello["rank"]
        with self._changed:
            busy = self._served.get(rank, 0) >= AT_ONCE
            if not busy:
                self._served[rank] = self._served.get(rank, 0) + 1
        if busy:
            sock.close()
        else:
            self._begin(lambda: self._serve(rank, hello, Stream(sock, session)))

    def _serve(self, rank: int, hello: Dict[str, Any], stream: Stream) -> None:
        try:
            self._accepted(hello, stream)
        finally:
            with self._changed:
                self._served[rank] -= 1

    def asked(self, ticket: str) -> None:
        """Another rank: rank 0 wants files from here."""
        self._begin(lambda: self._give(self._connect({"purpose": "give", "ticket": ticket})))

    def fetch(
        self,
        files: Iterable[Tuple[str, int, int]],
        alive: Callable[[], bool] = lambda: True,
        told: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Get files, given as (name, size, rank that has it), into the shared folder.

        Raises:
            CopyError: one could not be had; those before it are in place.
            OSError: the disk refuses.
        """
        folder = self.folder
        if folder is None:
            raise CopyError("there is no folder to copy to")
        by_rank: Dict[int, List[Tuple[str, int]]] = {}
        for name, size, rank in files:
            by_rank.setdefault(int(rank), []).append((name, int(size)))
        for rank, wanted in sorted(by_rank.items()):
            for left in range(TRIES - 1, -1, -1):
                try:
                    self._fetch_from(rank, wanted, folder, alive, told)
                    break
                except CopyError as error:
                    if not left or not alive():
                        raise CopyError("from rank %d: %s" % (rank, error)) from error

    def _fetch_from(
        self,
        rank: int,
        wanted: List[Tuple[str, int]],
        folder: str,
        alive: Callable[[], bool],
        told: Callable[[int], None],
    ) -> None:
        """Get the files of one rank; what has come is taken out of ``wanted``."""
        with self._kept(self._channel(rank)) as stream:
            stream.alive = lambda: alive() and not self._closed
            while wanted:
                name, size = wanted[0]
                receive(stream, folder, name, size, str(self._who["rank"]), told)
                wanted.pop(0)

    def _begin(self, work: Callable[[], None]) -> None:
        def run() -> None:
            # The side that wants the file sees its connection end, and says so.
            with contextlib.suppress(CopyError, OSError):
                work()

        threading.Thread(target=run, name="copy", daemon=True).start()

    @contextlib.contextmanager
    def _kept(self, stream: Stream) -> Iterator[Stream]:
        """Have ``close`` end this connection too; closed at the end."""
        with stream.sock as sock:
            with self._changed:
                if self._closed:
                    raise CopyError("the run is ending")
                self._open.add(sock)
            try:
                yield stream
            finally:
                with self._changed:
                    self._open.discard(sock)

    def _give(self, stream: Stream) -> None:
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
        if rank == 0:
            self._give(stream)
        elif rank is None:
            stream.sock.close()
        else:
            with self._kept(stream), self._kept(self._channel(rank)) as other:
                pump(stream, other)

    def _channel(self, rank: int) -> Stream:
        """A connection at whose other end that rank answers."""
        if self._who["rank"] != 0:
            return self._connect({"purpose": "copy", "from": rank})
        ticket = secrets.token_hex(16)
        with self._changed:
            self._tickets[ticket] = None
            self._ask(rank, {"kind": "_give", "ticket": ticket})
            limit = time.monotonic() + COMES
            while self._tickets[ticket] is None and not self._closed and time.monotonic() < limit:
                self._changed.wait(limit - time.monotonic())
            stream = self._tickets.pop(ticket)
        if stream is None:
            raise CopyError("rank %s did not connect within %d s" % (rank, COMES))
        return stream

    def _connect(self, purpose: Dict[str, Any]) -> Stream:
        """Connect to rank 0 and greet."""
        sock = socket.socket(self._address[0], socket.SOCK_STREAM)
        try:
            sock.settimeout(DEADLINE)
            sock.connect(self._address[1])
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller = Caller(self._token, str(self._who["run"]), int(self._who["rank"]))
            sock.sendall(caller.first())
            sock.sendall(caller.take(_line(sock)))
            assert caller.session is not None
            stream = Stream(sock, caller.session)
            stream.say(dict(self._who, **purpose))
            admitted(stream.hear() or {"refused": "it closed the connection"})
        except (OSError, NotOursError, StrangerError, RefusedError, CopyError) as error:
            sock.close()
            raise CopyError("no connection to rank 0: %s" % error) from error
        except BaseException:
            sock.close()
            raise
        return stream


def _line(sock: socket.socket) -> bytes:
    """One line of the greeting. Byte by byte: what follows belongs to the frames."""
    line = b""
    while not line.endswith(b"\n"):
        byte = sock.recv(1)
        if not byte or len(line) > HELLO:
            raise NotOursError("it closed the connection")
        line += byte
    return line
