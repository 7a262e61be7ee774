"""A release as legs: a chunk with what belongs to it, a range of a large file, and last what names the new prefix.

A leg of a chunk holds, behind the chunk's own members, the files of its packages that could have held the prefix and do
not need to be rewritten, and the list by which a later deploy recognises and checks all of them. Nothing in such a leg
names a path: a node that has it in any release links it from there.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import zstandard

from provision.env.bundle import tar
from provision.env.bundle.consistency import OURS
from provision.env.bundle.manifest import Entry, Manifest, stream_order
from provision.env.bundle.reader import Bundle
from provision.env.release import lists
from provision.env.relocation.relocate import Relocated
from provision.env.source.scan import FOLDER_MTIME
from provision.model import Leg, Wire

FILES = f"{OURS}/files"  # the folder of lists
STALE = f"{OURS}/stale"  # compiled files whose source was rewritten: removed, and compiled again on the node
LINKS = f"{OURS}/links"
DESCRIPTION = f"{OURS}/release.json"
COMPLETE = f"{OURS}/complete"

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Payload:
    """Everything a node gets for one release."""

    bundle: Bundle
    relocated: Relocated

    def legs(self, wire: Wire, made: frozenset[str] = frozenset()) -> tuple[Leg, ...]:
        """The legs in the order in which they are unpacked; the last one makes the release complete.

        Args:
            wire: their form on the wire.
            made: paths of rewritten files that the node has made itself, see ``derive``.
        """
        found = [self._chunk_leg(index, wire) for index in self._steady]
        found += [leg for entry in self._manifest.files if entry.raw for leg in self._ranges(entry, wire)]
        return (*found, self._last_leg(wire, made))

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """What a node may have in another release: the names of the lists of chunks and of large files."""
        large = (self._file_key(entry) for entry in self._manifest.files if entry.raw)
        return (*(self._chunk_key(index) for index in self._steady), *large)

    def chunks(self, keys: Collection[str]) -> frozenset[int]:
        """The bundle's chunks that the legs of these keys are made of."""
        tars = {index for index in self._steady if self._chunk_key(index) in keys}
        large = (entry for entry in self._manifest.files if entry.raw)
        ranges = {
            index
            for entry in large
            for number, index in enumerate(entry.chunks)
            if f"{self._file_key(entry)}.{number}" in keys
        }
        return frozenset(tars | ranges)

    def unpacked(self, keys: Iterable[str]) -> int:
        """Bytes that the legs of these keys take where they are unpacked, not counting what a file system adds."""
        return sum(self._sizes[key] for key in keys)

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        return {leg.key: leg.size for leg in self.legs("plain")}

    @property
    def _manifest(self) -> Manifest:
        return self.bundle.manifest

    @cached_property
    def _split(self) -> _Split:
        return _divide(self._manifest, self.relocated)

    @property
    def _steady(self) -> Mapping[int, tuple[tuple[Entry, bytes], ...]]:
        return self._split.steady

    def _chunk_key(self, index: int) -> str:
        steady = self._steady[index]
        chunk = self._manifest.chunks[index]
        return lists.contents_key((entry for entry, _ in steady), chunk.key) if steady else chunk.key

    def _chunk_leg(self, index: int, wire: Wire) -> Leg:
        chunk = self._manifest.chunks[index]
        steady = self._steady[index]
        key = self._chunk_key(index)
        listed = [entry for entry in self._manifest.members(index) if entry.path not in self.relocated.stale_pyc]
        behind = [*steady, *_own(f"{FILES}/{key}", lists.lines([*listed, *(entry for entry, _ in steady)]))]
        end = _wired(b"".join(map(_member, behind)), wire)
        size = chunk.compressed if wire == "zstd" else chunk.size
        return Leg(key, "tar", size + len(end), _then(self._read(index, wire), end))

    def _read(self, index: int, wire: Wire) -> Callable[[], Iterator[bytes]]:
        return partial(self.bundle.chunk_compressed if wire == "zstd" else self.bundle.chunk_blocks, index)

    def _file_key(self, entry: Entry) -> str:
        return lists.contents_key([entry])

    def _ranges(self, entry: Entry, wire: Wire) -> Iterator[Leg]:
        offset = 0
        group = self._file_key(entry)
        for number, index in enumerate(entry.chunks):
            chunk = self._manifest.chunks[index]
            yield Leg(
                f"{group}.{number}",
                "range",
                chunk.compressed if wire == "zstd" else chunk.size,
                self._read(index, wire),
                path=entry.path,
                offset=offset,
                mode=entry.mode,
                mtime=entry.mtime,
                group=group,
            )
            offset += chunk.size

    def _last_leg(self, wire: Wire, made: frozenset[str]) -> Leg:
        """What depends on the prefix, what a linked chunk has not (links, folders), and what is ours."""
        manifest = self._manifest
        large = [entry for entry in manifest.files if entry.raw]
        final = {entry.path: entry for entry in manifest.files}
        final |= {entry.path: entry for entry, _ in self.relocated.files}
        symlinks = [entry for entry in final.values() if entry.type == "link"]
        rewritten = self._split.rewritten
        changed = [entry for entry, _ in rewritten]
        description = {
            "name": manifest.name,
            "digest": manifest.digest,
            "prefix": str(self.relocated.prefix),
            "created": manifest.created,
            "versions": dict(manifest.versions),
        }
        # Every other name of a file is listed as one too: a file that no list names was added later.
        others = [
            replace(final[entry.target], path=entry.path)
            for entry in manifest.files
            if entry.type == "hard" and entry.path not in self.relocated.stale_pyc
        ]
        own = {
            **({f"{FILES}/{lists.contents_key(others)}": lists.lines(others)} if others else {}),
            f"{FILES}/{lists.contents_key(changed)}": lists.lines(changed),
            **{f"{FILES}/{self._file_key(entry)}": lists.lines([entry]) for entry in large},
            LINKS: lists.links(sorted(symlinks, key=lambda entry: entry.path)),
            STALE: b"".join(lists.escaped(path) + b"\n" for path in sorted(self.relocated.stale_pyc)),
            DESCRIPTION: json.dumps(description, sort_keys=True, indent=1).encode() + b"\n",
        }
        sent = [(entry, data) for entry, data in rewritten if entry.path not in made]
        members = [*sent, *((entry, b"") for entry in symlinks), *((entry, b"") for entry in self._tail())]
        members += [member for path, data in own.items() for member in _own(path, data)]
        members += [(Entry(OURS, "dir", 0o755, FOLDER_MTIME), b""), *_own(COMPLETE, b"")]
        data = _wired(b"".join(map(_member, members)), wire)
        key = lists.contents_key(changed, str(self.relocated.prefix), manifest.digest)
        return Leg(key, "last", len(data), partial(_blocks, data))

    def _tail(self) -> tuple[Entry, ...]:
        """Hard links, and the folders that would not come into being by themselves, or not with their mode."""
        files = self._manifest.files
        parents = {entry.path.rpartition("/")[0] for entry in files if entry.path not in self.relocated.stale_pyc}
        hard = [entry for entry in files if entry.type == "hard"]
        folders = [e for e in files if e.type == "dir" and (e.mode != 0o755 or e.path not in parents)]
        return (*hard, *stream_order(folders))


@dataclass(frozen=True)
class _Split:
    """The relocated files: with the chunk beside which they lie, and those that differ from what was packed."""

    steady: Mapping[int, tuple[tuple[Entry, bytes], ...]] = field(default_factory=dict)
    rewritten: tuple[tuple[Entry, bytes], ...] = ()


def _divide(manifest: Manifest, relocated: Relocated) -> _Split:
    """Give every relocated file that was not changed to the tar chunk of the file before it in path order."""
    packed = {entry.path: entry.sha256 for entry in manifest.marked}
    chunked = [entry for entry in manifest.files if entry.type == "file" and entry.chunks and not entry.raw]
    paths = [entry.path for entry in chunked]
    steady: dict[int, list[tuple[Entry, bytes]]] = defaultdict(list)
    for entry in chunked:
        steady.setdefault(entry.chunks[0], [])
    rewritten = []
    for entry, data in relocated.files:
        if entry.type != "file":
            continue
        if entry.sha256 == packed[entry.path] and paths:
            steady[chunked[max(0, bisect_right(paths, entry.path) - 1)].chunks[0]].append((entry, data))
        else:
            rewritten.append((entry, data))
    # A chunk of symlinks alone has no list; its links come with the last leg.
    return _Split({index: tuple(steady[index]) for index in sorted(steady)}, tuple(rewritten))


def _own(path: str, data: bytes) -> list[tuple[Entry, bytes]]:
    return [(Entry(path, "file", 0o644, FOLDER_MTIME, len(data)), data)]


def _member(member: tuple[Entry, bytes]) -> bytes:
    entry, data = member
    return b"".join((tar.entry_header(entry), data, bytes(tar.padding(len(data)))))


def _wired(data: bytes, wire: Wire) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(data) if wire == "zstd" else data


def _then(blocks: Callable[[], Iterator[bytes]], end: bytes) -> Callable[[], Iterator[bytes]]:
    def both() -> Iterator[bytes]:
        yield from blocks()
        yield from _blocks(end)

    return both


def _blocks(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), _BLOCK):
        yield data[start : start + _BLOCK]
