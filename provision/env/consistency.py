"""Whether a manifest is safe to unpack and agrees with itself."""

from __future__ import annotations

import os

from provision.env import tar
from provision.env.manifest import Manifest

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
    targets = {target for _, target in manifest.relocations}
    for entry in manifest.files:
        _check_path(entry.path)
        os.fsencode(entry.target)
        if entry.path <= previous:
            raise Inconsistent(f"{entry.path!r} occurs twice or out of order")
        previous = entry.path
        folder = entry.path.rpartition("/")[0]
        while folder and folder not in folders:
            if folder in leaves:
                raise Inconsistent(f"{entry.path!r} lies beneath {folder!r}, which is no folder")
            folders.add(folder)
            folder = folder.rpartition("/")[0]
        (folders if entry.type == "dir" else leaves).add(entry.path)
        if not entry.marks and not entry.chunks:
            raise Inconsistent(f"the bytes of {entry.path!r} are nowhere")
        if entry.marks and (entry.chunks or entry.type == "dir"):
            raise Inconsistent(f"{entry.path!r} cannot hold the prefix and lie in a chunk")
        if any(mark.target not in targets for mark in entry.marks):
            raise Inconsistent(f"{entry.path!r} holds a path that is not among the relocations")


def _check_chunks(manifest: Manifest) -> None:
    """Every chunk is as long as what the entries say lies in it."""
    expected = [0] * len(manifest.chunks)
    for entry in manifest.files:
        if not all(0 <= index < len(expected) for index in entry.chunks):
            raise Inconsistent(f"{entry.path!r} names a chunk that does not exist")
        kind = "raw" if entry.raw else "tar"
        if not all(manifest.chunks[index].kind == kind for index in entry.chunks):
            raise Inconsistent(f"{entry.path!r} names a chunk of the wrong kind")
        if entry.raw:
            if sum(manifest.chunks[index].size for index in entry.chunks) != entry.size or entry.type != "file":
                raise Inconsistent(f"the ranges of {entry.path!r} do not add up")
            for index in entry.chunks:
                expected[index] = manifest.chunks[index].size
        elif entry.chunks:
            expected[entry.chunks[0]] += tar.span(entry)
    if expected != [chunk.size for chunk in manifest.chunks]:
        raise Inconsistent("a chunk is not as long as its members")
    if sum(tar.span(entry) for entry in manifest.marked if entry.type == "file") != manifest.prefix_files.size:
        raise Inconsistent("the prefix files are not as long as their members")


def _check_path(path: str) -> None:
    parts = path.split("/")
    if not path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise Inconsistent(f"{path!r} is not a path inside the environment")
    if parts[0] == OURS:
        raise Inconsistent(f"{path!r} is where clusterctl keeps its own files")
    os.fsencode(path)
