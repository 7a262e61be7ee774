"""Decides which node copies which files of a checkpoint, and which copies to remove. Pure: reads agents' offers."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..checkpoints.files import File

FREE = 0.1  # share of the disk that copies leave free, if there is no other limit
NEWEST = 2  # checkpoints of which copies are kept, if there is no other limit

FileToCopy = Tuple[str, int, int, int]  # its path below the checkpoint, size, modification time, the rank that has it


class Generation(NamedTuple):
    """One save of a checkpoint: a later save under the same name is another one.

    Attributes:
        name: the checkpoint's path below the output folder.
        single: it is one file.
        saved: when its newest file was written, in nanoseconds since the epoch.
        step: its step, if it has one.
    """

    name: str
    single: bool
    saved: int
    step: Optional[int]


def holders_of(rank: int, ranks: Sequence[int], disks: Mapping[int, str], count: int) -> List[int]:
    """The nodes that hold the copies of a node's files: the next ``count`` ranks with other disks.

    Args:
        rank: the node that wrote the files.
        ranks: all nodes, in order.
        disks: by rank, a text that is equal for nodes that share the output folder.
        count: how many copies.
    """
    at = ranks.index(rank)
    used = {disks.get(rank, rank)}
    found: List[int] = []
    for other in (*ranks[at + 1 :], *ranks[:at]):
        disk = disks.get(other, other)
        if len(found) < count and disk not in used:
            used.add(disk)
            found.append(other)
    return found


def files_to_copy(
    offers: Mapping[int, Mapping[str, Any]],
    generation: Generation,
    count: int,
    members: Optional[Sequence[int]] = None,
) -> Dict[int, List[FileToCopy]]:
    """The files that each node must copy, so that ``count`` other nodes have each node's files. Empty lists too.

    Only nodes that hold a copy are listed. A file that a holder has itself, equal in size and content, is not copied.
    ``members`` are the nodes that write checkpoints, None for all; the others, spares, only hold copies.
    """
    own = {rank: _entry(offer.get("checkpoints", ()), generation.name, None) for rank, offer in offers.items()}
    held = {rank: _entry(offer.get("copies", ()), generation.name, generation.saved) for rank, offer in offers.items()}
    disks = {rank: str(entry["disk"]) for rank, entry in own.items() if entry is not None and entry.get("disk")}
    found: Dict[int, Dict[str, FileToCopy]] = {}
    for rank in sorted(own if members is None else members):
        files = _files(own[rank])
        for holder in holders_of(rank, sorted(own), disks, count) if files else ():
            mine, copied = _files(own[holder]), _files(held[holder])
            wanted = found.setdefault(holder, {})
            for name, file in files.items():
                if not (_same(mine.get(name), file) or _same(copied.get(name), file) or name in wanted):
                    wanted[name] = (name, file.size, file.mtime, rank)
    return {holder: sorted(files.values()) for holder, files in sorted(found.items())}


def shared_by_all(offers: Mapping[int, Mapping[str, Any]], name: str) -> bool:
    """Whether all nodes that have a checkpoint share the folder it is in."""
    entries = [_entry(offer.get("checkpoints", ()), name, None) for offer in offers.values()]
    return all(entries) and len({entry.get("disk") for entry in entries if entry}) == 1


def _entry(entries: Iterable[Mapping[str, Any]], name: str, saved: Optional[int]) -> Optional[Mapping[str, Any]]:
    return next((one for one in entries if one["name"] == name and saved in (None, one.get("saved"))), None)


def _files(entry: Optional[Mapping[str, Any]]) -> Dict[str, File]:
    """The complete files of an entry."""
    found = {name: File(*facts) for name, facts in entry["files"].items()} if entry else {}
    return {name: file for name, file in found.items() if not file.torn}


def _same(mine: Optional[File], other: File) -> bool:
    return mine is not None and (mine.size, mine.mark) == (other.size, other.mark)


class Kept(NamedTuple):
    """Copies of one save on this node. ``folder``: where they are, below the output folder."""

    folder: str
    saved: int
    bytes: int


class Room(NamedTuple):
    """The limits for copies on this node's disk, in bytes. ``space``: the user's limit; None: ``FREE`` counts."""

    space: Optional[int]
    free: int
    total: int


def to_remove(kept: Iterable[Kept], needed: int, protected: "set[str]", room: Room) -> Tuple[List[str], Optional[int]]:
    """The folders to remove, oldest first, before ``needed`` bytes are copied; and how many bytes then still lack.

    ``kept`` includes the copies that are arriving. Copies in ``protected`` folders stay: these, and the newest that are
    complete on all nodes. The second value is None if nothing lacks.
    """
    kept = sorted(kept, key=lambda one: one.saved)
    used, free = sum(one.bytes for one in kept), room.free
    removed: List[str] = []
    removable = [one for one in kept if one.folder not in protected]
    many = len(kept) - NEWEST if room.space is None else 0

    def lacking() -> int:
        if room.space is not None:
            return max(used + needed - room.space, needed - free)
        return needed - int(free - FREE * room.total)

    for one in removable:
        if lacking() <= 0 and len(removed) >= many:
            break
        removed.append(one.folder)
        used, free = used - one.bytes, free + one.bytes
    return removed, lacking() if lacking() > 0 else None
