"""Legs to the units of one lane's stream. Pure: which legs share a unit, where a leg is cut, what a header says.

A unit is what a node verifies and passes on. ``templates/transfer/receive.sh.j2`` describes its header.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from provision.errors import ClusterctlError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from provision.model import Leg

UNIT = 4 << 20  # bytes; a node starts about ten processes for a unit, and a chain is as far behind as it has nodes
KEYS = 32  # legs that share a unit at most: their keys stand in its header
Digest = Literal["b2sum", "sha256sum"]
# b2sum is twice as fast where sha256sum is not OpenSSL's (Debian), and is not in busybox.
DIGESTS: dict[Digest, tuple[str, ...]] = {"b2sum": ("b2sum", "-l", "256"), "sha256sum": ("sha256sum",)}
_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789/._+-")


@dataclass(frozen=True)
class Batch:
    """Legs that are unpacked together, and which of a lane's nodes need them."""

    legs: tuple[Leg, ...]
    needs: tuple[bool, ...]

    @property
    def size(self) -> int:
        """Bytes on the wire."""
        return sum(leg.size for leg in self.legs)


@dataclass(frozen=True)
class Unit:
    """A piece of a batch. ``data`` is empty where every node that needs the unit has kept it."""

    number: int
    mask: str  # a letter for each node of the lane, see receive.sh.j2
    size: int
    batch: Batch
    last: bool
    header: bytes
    data: tuple[bytes, ...]

    def passes(self, position: int) -> bool:
        """Whether the node at this place of the lane takes the unit, for itself or for one behind it."""
        return self.mask[position:].strip("-") != ""


def batches(legs: Sequence[Leg], lacking: Sequence[Collection[str]], *, unit: int = UNIT) -> Iterator[Batch]:
    """The legs that any node of a lane lacks, in order; small tar legs that the same nodes lack share a unit.

    Args:
        legs: all legs of the lane's wire form.
        lacking: for every node of the lane the keys that it lacks.
        unit: bytes of a unit.
    """
    waiting: list[Leg] = []
    before: tuple[bool, ...] = ()
    for leg in legs:
        needs = tuple(leg.key in keys for keys in lacking)
        if not any(needs):
            continue
        alone = leg.kind != "tar"
        full = len(waiting) == KEYS or sum(each.size for each in waiting) + leg.size > unit
        if waiting and (alone or full or needs != before):
            yield Batch(tuple(waiting), before)
            waiting = []
        if alone:
            yield Batch((leg,), needs)
        else:
            waiting.append(leg)
            before = needs
    if waiting:
        yield Batch(tuple(waiting), before)


def units(
    batch: Batch, kept: Sequence[Collection[str]], digest: Digest, first: int, *, unit: int = UNIT
) -> Iterator[Unit]:
    """The units of a batch, numbered from ``first``.

    Args:
        batch: whole legs.
        kept: for every node of the lane the digests of units that it has kept from an earlier stream.
        digest: what the nodes of the lane verify units with.
        first: the number of the first unit.
        unit: bytes of a unit.

    Raises:
        ClusterctlError: a leg is not as long as it says. What a leg's own iterator raises, before its last unit.
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

    A piece comes once there is a byte behind it or the batch is over, so the last one has been verified by its leg.
    """
    piece: list[bytes] = []
    room = unit
    for block in _blocks(batch):
        start = 0
        while start < len(block):
            if not room:
                yield piece, False
                piece, room = [], unit
            part = block[start : start + room]
            piece.append(part)
            room -= len(part)
            start += len(part)
    yield piece, True


def _blocks(batch: Batch) -> Iterator[bytes]:
    for leg in batch.legs:
        size = 0
        for block in leg.blocks():
            size += len(block)
            yield block
        if size != leg.size:
            raise ClusterctlError(f"{leg.path or leg.key} has {size} bytes where {leg.size} were announced")


def _description(batch: Batch) -> str:
    leg = batch.legs[0]
    keys = ",".join(each.key for each in batch.legs)
    return f"{leg.kind} {keys} {leg.offset >> 20} {leg.mode:o} {leg.mtime} {_escape(leg.path)}"


def _escape(path: str) -> str:
    r"""A path as one word without spaces that sh's ``printf %b`` reads back: ``\0NNN`` for all but plain letters."""
    raw = path.encode("utf-8", "surrogateescape")
    return "".join(chr(byte) if byte in _PLAIN else f"\\0{byte:03o}" for byte in raw) or "-"
