"""The one tar stream that a node unpacks: chunks as they are, large files, rewritten files, folders, our own marks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from provision.env import tar
from provision.env.bundle import Bundle
from provision.env.consistency import OURS
from provision.env.manifest import Entry, Manifest, canonical, stream_order
from provision.env.members import Stream
from provision.env.relocate import Relocated
from provision.env.scan import FOLDER_MTIME

FILE_LIST = f"{OURS}/manifest.json"
COMPLETE = f"{OURS}/complete"


def stream(bundle: Bundle, relocated: Relocated, *, block: int = 1 << 20) -> Iterator[bytes]:
    """The whole stream, in blocks of at most ``block`` bytes.

    Chunks are verified while they are read. The last member is ``.clusterctl/complete``: where it is unpacked,
    everything before it was whole.

    Raises:
        BundleError: the bundle is damaged; the stream then ends without its last member.
    """
    return _in_blocks(_pieces(bundle, relocated), block)


def size(bundle: Bundle, relocated: Relocated) -> int:
    """The length of ``stream`` in bytes."""
    manifest = bundle.manifest
    kept = (entry for entry in manifest.files if entry.chunks and entry.path not in relocated.stale_pyc)
    ours = _own_members(manifest, relocated)
    return sum(
        (
            sum(map(tar.span, kept)),
            sum(tar.span(entry) for entry, _ in relocated.files),
            sum(map(len, ours)),
            len(tar.END),
        )
    )


def file_list(manifest: Manifest, relocated: Relocated) -> bytes:
    """What a node keeps to verify itself: ``[path, type, mode, mtime, size, sha256 or link target]`` of every entry."""
    entries = {entry.path: entry for entry in manifest.files if entry.path not in relocated.stale_pyc}
    entries |= {entry.path: entry for entry, _ in relocated.files}
    rows = [
        [entry.path, entry.type, entry.mode, entry.mtime, entry.size, entry.target or entry.sha256]
        for _, entry in sorted(entries.items())
    ]
    return canonical(
        {"digest": manifest.digest, "name": manifest.name, "prefix": str(relocated.prefix), "files": rows, "format": 1}
    )


def _pieces(bundle: Bundle, relocated: Relocated) -> Iterator[bytes]:
    manifest = bundle.manifest
    large = [entry for entry in manifest.files if entry.raw]
    folders = [entry for entry in manifest.files if entry.type == "dir"]
    for index, chunk in enumerate(manifest.chunks):
        if chunk.kind == "tar":
            members = manifest.members(index)
            if all(entry.type == "dir" for entry in members):
                continue  # folders come last: some of them refuse what would come after
            drop = relocated.stale_pyc.intersection(entry.path for entry in members)
            yield from _without(bundle.chunk_blocks(index), members, drop) if drop else bundle.chunk_blocks(index)
    for entry in large:
        yield tar.entry_header(entry)
        for index in entry.chunks:
            yield from bundle.chunk_blocks(index)
        yield bytes(tar.padding(entry.size))
    for entry, data in relocated.files:
        yield from (tar.entry_header(entry), data, bytes(tar.padding(len(data))))
    yield from (tar.entry_header(entry) for entry in stream_order(folders))
    yield from _own_members(manifest, relocated)
    yield tar.END


def _own_members(manifest: Manifest, relocated: Relocated) -> tuple[bytes, ...]:
    listing = file_list(manifest, relocated)
    return (
        tar.entry_header(Entry(OURS, "dir", 0o755, FOLDER_MTIME)),
        tar.header(FILE_LIST.encode(), size=len(listing), mtime=FOLDER_MTIME),
        listing,
        bytes(tar.padding(len(listing))),
        tar.header(COMPLETE.encode(), mtime=FOLDER_MTIME),
    )


def _without(blocks: Iterable[bytes], members: Iterable[Entry], drop: frozenset[str]) -> Iterator[bytes]:
    """A tar stream without some of its members; read to its end, where it is verified."""
    stream = Stream(blocks)
    for entry in members:
        for piece in stream.pieces(tar.span(entry)):
            if entry.path not in drop:
                yield bytes(piece)
    stream.drain()


def _in_blocks(pieces: Iterable[bytes], block: int) -> Iterator[bytes]:
    """The same bytes in blocks of ``block`` bytes; the last one may be shorter."""
    held: list[bytes] = []
    length = 0
    for piece in pieces:
        view = memoryview(piece)
        while length + len(view) >= block:
            cut = block - length
            yield b"".join((*held, view[:cut]))
            view, held, length = view[cut:], [], 0
        if view:
            held.append(bytes(view))
            length += len(view)
    if held:
        yield b"".join(held)
