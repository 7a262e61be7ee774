"""One chain of nodes: the stream to its first node, and the reports of its nodes.

A node verifies and relays bytes unit by unit; ``templates/transfer/receive.sh.j2`` describes a unit's header.
``batches`` and ``units`` divide parts into units and are pure.
"""

from __future__ import annotations

import hashlib
import queue
import re
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from provision.errors import ClusterctlError
from provision.render import quote

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from provision.model import Part, Remote
    from provision.transfer.nodes import Target

UNIT = 4 << 20  # bytes; a node starts about ten processes per unit, and each node of a chain is one unit behind
KEYS = 32  # parts in a unit at most: its header contains their keys
Digest = Literal["b2sum", "sha256sum"]
# b2sum is twice as fast as a sha256sum without OpenSSL (Debian's). busybox has none.
DIGESTS: dict[Digest, tuple[str, ...]] = {"b2sum": ("b2sum", "-l", "256"), "sha256sum": ("sha256sum",)}
_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789/._+-")


@dataclass(frozen=True)
class Batch:
    """Parts that are unpacked together, and which of a chain's nodes need them."""

    parts: tuple[Part, ...]
    needs: tuple[bool, ...]

    @property
    def size(self) -> int:
        """Bytes on the wire."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class Unit:
    """A piece of a batch. ``data`` is empty if every node that needs the unit has kept it."""

    number: int
    mask: str  # a letter for each node of the chain, see receive.sh.j2
    size: int
    batch: Batch
    last: bool
    header: bytes
    data: tuple[bytes, ...]

    def passes(self, position: int) -> bool:
        """Whether the node at this position takes the unit, for itself or for a later node."""
        return self.mask[position:].strip("-") != ""


def batches(parts: Sequence[Part], lacking: Sequence[Collection[str]], *, unit: int = UNIT) -> Iterator[Batch]:
    """The parts that any node of a chain lacks, in order; small tar parts that the same nodes lack share a unit.

    Args:
        parts: all parts of the chain's wire form.
        lacking: for every node of the chain, the keys that it lacks.
        unit: bytes of a unit.
    """
    waiting: list[Part] = []
    before: tuple[bool, ...] = ()
    for part in parts:
        needs = tuple(part.key in keys for keys in lacking)
        if not any(needs):
            continue
        alone = part.kind != "tar"
        full = len(waiting) == KEYS or sum(each.size for each in waiting) + part.size > unit
        if waiting and (alone or full or needs != before):
            yield Batch(tuple(waiting), before)
            waiting = []
        if alone:
            yield Batch((part,), needs)
        else:
            waiting.append(part)
            before = needs
    if waiting:
        yield Batch(tuple(waiting), before)


def units(
    batch: Batch, kept: Sequence[Collection[str]], digest: Digest, first: int, *, unit: int = UNIT
) -> Iterator[Unit]:
    """The units of a batch, numbered from ``first``.

    Args:
        batch: whole parts.
        kept: for every node of the chain, the digests of units that it kept from an earlier stream.
        digest: the program with which the chain's nodes verify units.
        first: the number of the first unit.
        unit: bytes of a unit.

    Raises:
        ClusterctlError: a part does not have its announced size. Errors of a part's iterator, before its last unit.
    """
    number = first
    for data, last in _cut(batch, unit):
        hasher = hashlib.blake2b(digest_size=32) if digest == "b2sum" else hashlib.sha256()
        for block in data:
            hasher.update(block)
        total = hasher.hexdigest()
        mask = "".join(
            ("s" if total in mine else "n") if needs else "-" for needs, mine in zip(batch.needs, kept, strict=True)
        )
        size = sum(map(len, data))
        wanted = mask.lstrip("-").startswith("n")
        header = f"unit {number} {mask} {size} {total} {int(last)} {_description(batch)}\n".encode("ascii")
        yield Unit(number, mask, size, batch, last, header, tuple(data) if wanted else ())
        number += 1


def _cut(batch: Batch, unit: int) -> Iterator[tuple[list[bytes], bool]]:
    """The batch's bytes in pieces of ``unit`` bytes, each a list of blocks, and whether it is the last piece.

    A piece is yielded when a byte follows or the batch has ended, so the part has verified its last piece.
    """
    piece: list[bytes] = []
    room = unit
    for block in _blocks(batch):
        start = 0
        while start < len(block):
            if not room:
                yield piece, False
                piece, room = [], unit
            data = block[start : start + room]
            piece.append(data)
            room -= len(data)
            start += len(data)
    yield piece, True


def _blocks(batch: Batch) -> Iterator[bytes]:
    for part in batch.parts:
        size = 0
        for block in part.blocks():
            size += len(block)
            yield block
        if size != part.size:
            raise ClusterctlError(f"{part.path or part.key} has {size} bytes where {part.size} were announced")


def _description(batch: Batch) -> str:
    part = batch.parts[0]
    keys = ",".join(each.key for each in batch.parts)
    return f"{part.kind} {keys} {part.offset >> 20} {part.mode:o} {part.mtime} {_escape(part.path)}"


def _escape(path: str) -> str:
    r"""A path as one word for sh's ``printf %b``: all but plain letters become ``\0NNN``."""
    raw = path.encode("utf-8", "surrogateescape")
    return "".join(chr(byte) if byte in _PLAIN else f"\\0{byte:03o}" for byte in raw) or "-"


BLOCK = 256 << 10  # bytes per write: each write shows that the node still reads
_LOOK = 0.5  # seconds between two checks whether a chain was aborted
_NUMBER = re.compile(r"[0-9]{1,18}")
QUIET = 3.0  # seconds without a report after which an aborted chain's connection is closed


@dataclass
class ChainNode:
    """A node's state in a chain."""

    target: Target
    number: int  # the node's number in this transfer, which its reports contain
    lacking: frozenset[str]
    kept: frozenset[str]
    owed: OrderedDict[int, Unit] = field(default_factory=OrderedDict)  # units that were sent and not reported
    packed: set[int] = field(default_factory=set)  # last units of parts that arrived and are not unpacked
    last_report: float = field(default_factory=time.monotonic)  # when it last reported, or first had work
    due: float = 0.0  # when its first owed unit reached the node before it
    ended: bool = False


@dataclass(frozen=True)
class Failure:
    """A node's report of a failure: the folder, its free blocks and inodes, and the program's message."""

    where: str
    free: tuple[int, int]
    words: str


@dataclass
class Outcome:
    """How a chain ended, by node names."""

    ended: set[str] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)  # nodes that lost the next node, with the reason
    bad: set[str] = field(default_factory=set)  # nodes that received a damaged unit
    failed: dict[str, Failure] = field(default_factory=dict)
    stalled: str = ""
    error: ClusterctlError | None = None  # the error of the connection to the first node
    code: int = 0  # the exit code of the first node's script


class Chain:
    """Sends one stream. Created and run in one thread; other threads call ``check`` and ``abort``."""

    def __init__(
        self,
        nodes: Sequence[ChainNode],
        parts: Sequence[Part],
        name: str,
        digest: Digest,
        on_got: Callable[[str, int], None],
        unit: int = UNIT,
    ) -> None:
        self.nodes = list(nodes)
        self.sent = 0
        self.outcome = Outcome()
        self._parts = parts
        self._name = name
        self._digest = digest
        self._on_got = on_got
        self._unit = unit
        self._places = {node.number: place for place, node in enumerate(self.nodes)}  # by the node's number
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._over = threading.Event()
        self._closed = False
        self._complete = False
        self._wrote = time.monotonic()
        self._remote: Remote | None = None

    def run(self, remote: Remote) -> Outcome:
        """Send the stream through ``remote`` until every node has ended or the chain is aborted.

        Raises:
            ClusterctlError: the source of the bytes is damaged.
        """
        self._remote = remote
        now = time.monotonic()
        for node in self.nodes:
            node.last_report = now
        script = f"exec sh {quote(self.nodes[0].target.folder)}/receive"
        source = _Source(self._stream())
        try:
            result = remote.run(script, stdin=source, on_line=self._on_report)
            self.outcome.code = result.rc
        except ClusterctlError as error:
            if source.failure is not None:
                raise source.failure from None
            self.outcome.error = error
        finally:
            self._over.set()
            self._stop.set()
        with self._lock:
            self.outcome.ended = {node.target.node.name for node in self.nodes if node.ended}
        return self.outcome

    def abort(self) -> None:
        """End the stream at the current unit; the nodes finish complete parts."""
        self._stop.set()

    def check(self, stall: float) -> None:
        """Abort the chain if a node stalls, and close its connection if that does not help. Call it regularly."""
        if self._over.is_set() or self._remote is None:
            return
        now = time.monotonic()
        with self._lock:
            quiet = now - max(node.last_report for node in self.nodes)
            if not self._stop.is_set():
                last = next((node for node in reversed(self.nodes) if not node.ended), None)
                silent = [
                    (since, node)
                    for place, node in enumerate(self.nodes)
                    if (since := self._silent_since(node, place, last)) is not None
                ]
                since, node = min(silent, key=lambda pair: pair[0], default=(now, None))
                if node and now - since >= stall:
                    self.outcome.stalled = node.target.node.name
                    self._stop.set()
        if self._stop.is_set() and quiet >= QUIET and not self._closed:
            self._closed = True
            threading.Thread(target=self._remote.close, daemon=True).start()

    def _silent_since(self, node: ChainNode, place: int, last: ChainNode | None) -> float | None:
        """Since when a node has had work without reporting; None if it waits for other nodes.

        Args:
            node: the node.
            place: its place in the chain.
            last: the last node that has not ended.
        """
        first = next(iter(node.owed), None)
        if first is not None and place == 0:
            return max(node.last_report, self._wrote)
        if first is not None and first not in self.nodes[place - 1].owed:
            return max(node.last_report, node.due)
        if node.packed:
            return node.last_report
        # At the end, the last node that has not reported it delays the nodes before it.
        return max(node.last_report, self._wrote) if self._complete and last is node else None

    # --- sending -------------------------------------------------------------------------------------

    def _stream(self) -> Iterator[bytes]:
        yield from self._counted(f"stream {self._name} {len(self.nodes)}\n".encode("ascii"))
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
        lacking, kept = [node.lacking for node in self.nodes], [node.kept for node in self.nodes]
        for batch in batches(self._parts, lacking, unit=self._unit):
            for unit in units(batch, kept, self._digest, number, unit=self._unit):
                number = unit.number + 1
                yield unit

    def _counted(self, block: bytes) -> Iterator[bytes]:
        for start in range(0, len(block), BLOCK):
            data = block[start : start + BLOCK]
            self.sent += len(data)
            yield data
            self._wrote = time.monotonic()

    def _owe(self, unit: Unit) -> None:
        now, note = time.monotonic(), replace(unit, data=())
        with self._lock:
            for place, node in enumerate(self.nodes):
                if unit.passes(place):
                    if not node.owed and not node.packed:
                        node.last_report = now  # it had no work until now
                    node.owed[unit.number] = note

    # --- reports -------------------------------------------------------------------------------------

    def _on_report(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        number, _, words = rest.partition(" ")
        place = self._places.get(int(number)) if _NUMBER.fullmatch(number) else None
        if place is None or (word in ("got", "did") and not _NUMBER.fullmatch(words)):
            return  # output of the login shell's files
        node = self.nodes[place]
        name = node.target.node.name
        with self._lock:
            node.last_report = time.monotonic()
            if word == "got":
                unit = node.owed.pop(int(words), None)
                if place + 1 < len(self.nodes) and next(iter(self.nodes[place + 1].owed), None) == int(words):
                    self.nodes[place + 1].due = node.last_report
                if unit is None or unit.mask[place] == "-":
                    return
                if unit.last:
                    node.packed.add(unit.number)
                size = unit.size
            elif word == "did":
                node.packed.discard(int(words))
                return
            elif word == "end":
                node.ended = True
                return
            else:
                self._on_failure(word, node, words)
                return
        self._on_got(name, size)

    def _on_failure(self, word: str, node: ChainNode, words: str) -> None:
        name = node.target.node.name
        if word == "bad":
            self.outcome.bad.add(name)
        elif word == "lost":
            self.outcome.lost[name] = words
        elif word == "fail":
            place, blocks, inodes, text = [*words.split(" ", 3), "", "", "", ""][:4]
            free = (int(blocks) if _NUMBER.fullmatch(blocks) else 1, int(inodes) if _NUMBER.fullmatch(inodes) else 1)
            where = node.target.folder if place == "folder" else node.target.into
            self.outcome.failed.setdefault(name, Failure(where, free, text))
        else:
            return
        self._stop.set()


def ahead(source: Iterator[Unit], stop: threading.Event) -> Iterator[Unit]:
    """The same units, read and hashed in a separate thread while the previous one is written."""
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
        except Exception as error:  # noqa: BLE001 - raised in the thread that reads the units
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
    """An iterator that remembers its exception, because a broken connection raises the same kind."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self.failure: Exception | None = None
        self._blocks = blocks

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._blocks
        except Exception as error:
            self.failure = error
            raise
