"""Whether a manifest is safe to unpack and agrees with itself."""

from __future__ import annotations

import os
import re
from collections.abc import Collection

from provision.env.bundle import tar
from provision.env.bundle.manifest import FOLDERS, Entry, Manifest

_ODD = re.compile(r"(?:\A|/)\.{0,2}(?:/|\Z)|\0")  # a component that is empty, or a dot, or two; a NUL

OURS = ".clusterctl"  # clusterctl's own folder in an unpacked environment


class Inconsistent(ValueError):  # noqa: N818 - becomes part of a sentence
    """A manifest that contradicts itself or would write outside the prefix."""


def check(manifest: Manifest) -> None:
    """Check everything that can be known without reading a chunk.

    Raises:
        Inconsistent: the message says which path or chunk.
        UnicodeEncodeError: a path stands for no bytes.
    """
    for _, target in manifest.relocations:
        if target:
            _check_path(target)
    _check_files(manifest)
    _check_chunks(manifest)


def _check_files(manifest: Manifest) -> None:
    """Paths are relative, plain, in order, different, and beneath folders only."""
    leaves: set[str] = set()
    folders: set[str] = set()
    previous = ""
    files: dict[str, Entry] = {}
    targets = {target for _, target in manifest.relocations}
    for entry in manifest.files:
        path = entry.path
        _check_path(path)
        if path <= previous:
            raise Inconsistent(f"{path!r} occurs twice or out of order")
        previous = path
        folder = path.rpartition("/")[0]
        while folder and folder not in folders:
            if folder in leaves:
                raise Inconsistent(f"{path!r} lies beneath {folder!r}, which is no folder")
            folders.add(folder)
            folder = folder.rpartition("/")[0]
        (folders if entry.type == "dir" else leaves).add(path)
        if entry.marks:
            _check_marks(entry, targets)
        elif not entry.chunks:
            raise Inconsistent(f"the bytes of {path!r} are nowhere")
        if entry.type == "file":
            files[path] = entry
        elif entry.target:
            os.fsencode(entry.target)
            if entry.type == "hard":
                _check_hard_link(entry, files.get(entry.target))


def _check_marks(entry: Entry, targets: Collection[str]) -> None:
    if (entry.chunks and not entry.raw) or entry.type in ("dir", "hard"):
        raise Inconsistent(f"{entry.path!r} cannot hold the prefix and lie in a chunk")
    if any(mark.target not in targets for mark in entry.marks):
        raise Inconsistent(f"{entry.path!r} holds a path that is not among the relocations")
    if entry.raw and any(mark.kind != "binary" for mark in entry.marks):
        raise Inconsistent(f"{entry.path!r} is rewritten, and lies in ranges")


def _check_hard_link(entry: Entry, target: Entry | None) -> None:
    if target is None:
        raise Inconsistent(f"{entry.path!r} is a hard link to {entry.target!r}, which is no file before it")
    if (entry.mode, entry.mtime) != (target.mode, target.mtime):
        raise Inconsistent(f"{entry.path!r} is a hard link to {entry.target!r} and differs from it")


def _check_chunks(manifest: Manifest) -> None:
    """Every chunk is as long as what the entries say lies in it."""
    expected = [0] * len(manifest.chunks)
    kinds = [(chunk.kind, chunk.package == FOLDERS) for chunk in manifest.chunks]
    for entry in manifest.files:
        kind = ("raw" if entry.raw else "tar", entry.type in ("dir", "hard"))
        for index in entry.chunks:
            if not 0 <= index < len(expected):
                raise Inconsistent(f"{entry.path!r} names a chunk that does not exist")
            if kinds[index] != kind:
                raise Inconsistent(f"{entry.path!r} names a chunk of the wrong kind")
            expected[index] += manifest.chunks[index].size if entry.raw else tar.span(entry)
        if entry.raw and (sum(manifest.chunks[i].size for i in entry.chunks) != entry.size or entry.type != "file"):
            raise Inconsistent(f"the ranges of {entry.path!r} do not add up")
    if expected != [chunk.size for chunk in manifest.chunks]:
        raise Inconsistent("a chunk is not as long as its members")
    if sum(map(tar.span, manifest.rewritable)) != manifest.prefix_files.size:
        raise Inconsistent("the prefix files are not as long as their members")


def _check_path(path: str) -> None:
    if not path or path[0] in "./" or path[-1] == "/" or "/." in path or "//" in path or "\0" in path:
        _check_unusual(path)  # many take long to match, and nearly all are plain
    if not path.isascii():
        os.fsencode(path)


def _check_unusual(path: str) -> None:
    if _ODD.search(path):
        raise Inconsistent(f"{path!r} is not a path inside the environment")
    if path.startswith(OURS) and path[len(OURS) :][:1] in ("", "/"):
        raise Inconsistent(f"{path!r} is where clusterctl keeps its own files")
