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
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple

from link.copying import pump, receive, serve
from link.frames import NotOursError, parse
from link.proof import DEADLINE, HELLO, Caller, RefusedError, StrangerError
from link.stream import CopyError, Stream

COMES = 20.0  # seconds for the connection of a node that was asked to connect
TRIES = 3  # for each node that gives files: connections break


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
        self._tickets: Dict[str, Optional[socket.socket]] = {}
        self._changed = threading.Condition()

    def close(self) -> None:
        """End everything that is under way."""
        with self._changed:
            self._closed = True
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()

    def accept(self, hello: Dict[str, Any], sock: socket.socket) -> None:
        """Rank 0: take a connection whose other end has proved that it belongs to the run."""
        self._begin(lambda: self._accepted(hello, sock))

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
        with self._kept(self._channel(rank)) as sock:
            stream = Stream(sock, lambda: alive() and not self._closed)
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
    def _kept(self, sock: socket.socket) -> Any:
        """Have ``close`` end this connection too; closed at the end."""
        with sock:
            with self._changed:
                if self._closed:
                    raise CopyError("the run ends")
                self._open.add(sock)
            try:
                yield sock
            finally:
                with self._changed:
                    self._open.discard(sock)

    def _give(self, sock: socket.socket) -> None:
        with self._kept(sock):
            serve(Stream(sock), self.folder)

    def _accepted(self, hello: Dict[str, Any], sock: socket.socket) -> None:
        if hello.get("purpose") == "give":
            ticket = hello.get("ticket")
            with self._changed:
                if ticket in self._tickets and self._tickets[ticket] is None:
                    self._tickets[ticket] = sock
                    self._changed.notify_all()
                    return
            sock.close()
        elif hello.get("from") == 0:
            self._give(sock)
        else:
            with self._kept(sock), self._kept(self._channel(hello.get("from"))) as other:
                pump(Stream(sock), Stream(other))

    def _channel(self, rank: Any) -> socket.socket:
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
            sock = self._tickets.pop(ticket)
        if sock is None:
            raise CopyError("rank %s did not connect within %d s" % (rank, COMES))
        return sock

    def _connect(self, purpose: Dict[str, Any]) -> socket.socket:
        """Connect to rank 0 and greet."""
        sock = socket.socket(self._address[0], socket.SOCK_STREAM)
        try:
            sock.settimeout(DEADLINE)
            sock.connect(self._address[1])
            caller = Caller(self._token, dict(self._who, **purpose))
            sock.sendall(caller.first())
            while caller.welcome is None:
                sock.sendall(caller.take(parse(_line(sock))))
        except (OSError, NotOursError, StrangerError, RefusedError) as error:
            sock.close()
            raise CopyError("no connection to rank 0: %s" % error) from error
        except BaseException:
            sock.close()
            raise
        return sock


def _line(sock: socket.socket) -> bytes:
    """One line of the greeting. Byte by byte: what follows the last line belongs to somebody else."""
    line = b""
    while not line.endswith(b"\n"):
        byte = sock.recv(1)
        if not byte or len(line) > HELLO:
            raise NotOursError("it ended the connection")
        line += byte
    return line
