"""One lane: the stream that is fed to its first node, and what its nodes report."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError
from provision.render import render
from provision.transfer.units import UNIT, batches, units

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from provision.model import Leg, Remote
    from provision.transfer.target import Target
    from provision.transfer.units import Digest, Unit

BLOCK = 256 << 10  # bytes that are written at once: each write is a sign of life
_LOOK = 0.5  # seconds between two looks whether a lane was broken off
_NUMBER = re.compile(r"[0-9]{1,18}")
QUIET = 3.0  # seconds without a report after which a lane that was broken off is cut


@dataclass
class Seat:
    """A node's place in a lane."""

    target: Target
    number: int  # of the node in this transfer: how it names itself in reports
    lacking: frozenset[str]
    kept: frozenset[str]
    owed: OrderedDict[int, Unit] = field(default_factory=OrderedDict)  # units that were sent and not reported
    packed: set[int] = field(default_factory=set)  # last units of legs that have come and are not unpacked
    heard: float = field(default_factory=time.monotonic)  # when it last reported, or first had something to do
    due: float = 0.0  # when the first unit that it owes had reached the node before it
    ended: bool = False


@dataclass(frozen=True)
class Failure:
    """What a node could not do: where it was writing, the free blocks and inodes there, and a program's words."""

    where: str
    free: tuple[int, int]
    words: str


@dataclass
class Outcome:
    """How a lane came to its end. Names are those of nodes."""

    ended: set[str] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)  # who lost the node behind it, and how
    bad: set[str] = field(default_factory=set)  # who was sent a damaged unit
    failed: dict[str, Failure] = field(default_factory=dict)
    stalled: str = ""
    error: ClusterctlError | None = None  # what became of the connection to the first node
    code: int = 0  # of the first node's script


class Lane:
    """Feeds one stream. Made and run in one thread; ``check`` and ``break_off`` are called from others."""

    def __init__(
        self,
        seats: Sequence[Seat],
        legs: Sequence[Leg],
        name: str,
        digest: Digest,
        on_got: Callable[[str, int], None],
        unit: int = UNIT,
    ) -> None:
        self.seats = list(seats)
        self.sent = 0
        self.outcome = Outcome()
        self._legs = legs
        self._name = name
        self._digest = digest
        self._on_got = on_got
        self._unit = unit
        self._by_number = {seat.number: seat for seat in seats}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._over = threading.Event()
        self._closed = False
        self._complete = False
        self._wrote = time.monotonic()
        self._remote: Remote | None = None

    def run(self, remote: Remote) -> Outcome:
        """Feed the stream through ``remote`` until every node has ended or the lane is broken off.

        Raises:
            ClusterctlError: the source of the bytes is damaged.
        """
        self._remote = remote
        now = time.monotonic()
        for seat in self.seats:
            seat.heard = now
        script = render("transfer/start.sh.j2", folder=self.seats[0].target.folder)
        source = _Source(self._stream())
        try:
            result = remote.run(script, stdin=source, on_line=self._hear)
            self.outcome.code = result.rc
        except ClusterctlError as error:
            if source.failure is not None:
                raise source.failure from None
            self.outcome.error = error
        finally:
            self._over.set()
            self._stop.set()
        with self._lock:
            self.outcome.ended = {seat.target.node.name for seat in self.seats if seat.ended}
        return self.outcome

    def break_off(self) -> None:
        """Let the stream end where it is: the nodes finish what is complete."""
        self._stop.set()

    def check(self, stall: float) -> None:
        """To be called now and then: breaks the lane off when a node stands still, and cuts it when nothing helps."""
        if self._over.is_set() or self._remote is None:
            return
        now = time.monotonic()
        with self._lock:
            quiet = now - max(seat.heard for seat in self.seats)
            if not self._stop.is_set():
                silent = [(since, seat) for seat in self.seats if (since := self._silent_since(seat)) is not None]
                since, seat = min(silent, key=lambda pair: pair[0], default=(now, None))
                if seat and now - since >= stall:
                    self.outcome.stalled = seat.target.node.name
                    self._stop.set()
        if self._stop.is_set() and quiet >= QUIET and not self._closed:
            self._closed = True
            threading.Thread(target=self._remote.close, daemon=True).start()

    def _silent_since(self, seat: Seat) -> float | None:
        """Since when a node has something to do and says nothing; None when it waits for others."""
        place = self.seats.index(seat)
        first = next(iter(seat.owed), None)
        if first is not None and place == 0:
            return max(seat.heard, self._wrote)
        if first is not None and first not in self.seats[place - 1].owed:
            return max(seat.heard, seat.due)
        if seat.packed:
            return seat.heard
        # When all is done, the last that has not said so holds up those before it.
        waits = self._complete and next((each for each in reversed(self.seats) if not each.ended), None) is seat
        return max(seat.heard, self._wrote) if waits else None

    # --- what goes out -------------------------------------------------------------------------------

    def _stream(self) -> Iterator[bytes]:
        yield from self._counted(f"stream {self._name} {len(self.seats)}\n".encode("ascii"))
        for unit in ahead(self._units(), self._stop):
            self._owe(unit)
            for block in (unit.header, *unit.data):
                if self._stop.is_set():
                    return
                yield from self._counted(block)
        if not self._stop.is_set():
            yield from self._counted(b"end\n")
            self._complete = True

    def _units(self) -> Iterator[Unit]:
        number = 1
        lacking, kept = [seat.lacking for seat in self.seats], [seat.kept for seat in self.seats]
        for batch in batches(self._legs, lacking, unit=self._unit):
            for unit in units(batch, kept, self._digest, number, unit=self._unit):
                number = unit.number + 1
                yield unit

    def _counted(self, block: bytes) -> Iterator[bytes]:
        for start in range(0, len(block), BLOCK):
            part = block[start : start + BLOCK]
            self.sent += len(part)
            yield part
            self._wrote = time.monotonic()

    def _owe(self, unit: Unit) -> None:
        now, note = time.monotonic(), replace(unit, data=())
        with self._lock:
            for place, seat in enumerate(self.seats):
                if unit.passes(place):
                    if not seat.owed and not seat.packed:
                        seat.heard = now  # it had nothing to do until now
                    seat.owed[unit.number] = note

    # --- what comes back -----------------------------------------------------------------------------

    def _hear(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        number, _, words = rest.partition(" ")
        seat = self._by_number.get(int(number)) if _NUMBER.fullmatch(number) else None
        if seat is None or (word in ("got", "did") and not _NUMBER.fullmatch(words)):
            return  # what a login shell's own files print
        name = seat.target.node.name
        with self._lock:
            seat.heard = time.monotonic()
            if word == "got":
                unit = seat.owed.pop(int(words), None)
                place = self.seats.index(seat)
                if place + 1 < len(self.seats) and next(iter(self.seats[place + 1].owed), None) == int(words):
                    self.seats[place + 1].due = seat.heard
                if unit is None or unit.mask[place] == "-":
                    return
                if unit.last:
                    seat.packed.add(unit.number)
                size = unit.size
            elif word == "did":
                seat.packed.discard(int(words))
                return
            elif word == "end":
                seat.ended = True
                return
            else:
                self._trouble(word, seat, words)
                return
        self._on_got(name, size)

    def _trouble(self, word: str, seat: Seat, words: str) -> None:
        name = seat.target.node.name
        if word == "bad":
            self.outcome.bad.add(name)
        elif word == "lost":
            self.outcome.lost[name] = words
        elif word == "fail":
            place, blocks, inodes, text = [*words.split(" ", 3), "", "", "", ""][:4]
            free = (int(blocks) if _NUMBER.fullmatch(blocks) else 1, int(inodes) if _NUMBER.fullmatch(inodes) else 1)
            where = seat.target.folder if place == "folder" else seat.target.into
            self.outcome.failed.setdefault(name, Failure(where, free, text))
        else:
            return
        self._stop.set()


def ahead(source: Iterator[Unit], stop: threading.Event) -> Iterator[Unit]:
    """The same units, read and hashed in a thread of its own while the one before is being written."""
    ready: queue.Queue[Unit | Exception | None] = queue.Queue(maxsize=1)

    def put(item: Unit | Exception | None) -> bool:
        while not stop.is_set():
            with suppress(queue.Full):
                ready.put(item, timeout=_LOOK)
                return True
        return False

    def fill() -> None:
        try:
            if all(map(put, source)):
                put(None)
        except Exception as error:  # noqa: BLE001 - raised where the units are taken
            put(error)

    threading.Thread(target=fill, daemon=True).start()
    while not stop.is_set():
        try:
            item = ready.get(timeout=_LOOK)
        except queue.Empty:
            continue
        if item is None:
            return
        if isinstance(item, Exception):
            raise item
        yield item


class _Source:
    """An iterator that remembers what it raised, since a broken connection raises the same kind of error."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self.failure: Exception | None = None
        self._blocks = blocks

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._blocks
        except Exception as error:
            self.failure = error
            raise
