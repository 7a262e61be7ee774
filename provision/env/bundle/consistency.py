"""Whether a manifest is safe to unpack and agrees with itself."""

from __future__ import annotations

import os
import re
from collections.abc import Collection

from provision.env.bundle import tar
from provision.env.bundle.manifest import FOLDERS, Entry, Manifest

_ODD = re.compile(r"(?:\A|/)\.{0,2}(?:/|\Z)|\0")  # a component that is empty, or a dot, or two; a NUL

# What a terminal acts upon, or shows as another text than it is: control characters, line ends, and what turns writing.
_UNSHOWABLE = re.compile("[\0-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")

OURS = ".clusterctl"  # clusterctl's own folder in an unpacked environment

LONGEST_NAME = 255  # bytes of one name, on Linux's file systems
LONGEST_PATH = 4095  # bytes of a path or of a symlink's target
LONGEST_TEXT = 4096  # characters of what describes an environment
LONGEST_NOTICE = 64 << 10  # characters; names files
MEMBER = 64 << 20  # bytes of a file in a tar chunk, some of which are held in memory; pack makes ranges of 16 MiB
REWRITTEN = 256 << 20  # bytes of a file that is rewritten, in memory
PREFIX_FILES = 2 << 30  # bytes of all that may be rewritten, which are held in memory
_FOLDERS = 1 << 30  # bytes of the paths of all folders


class Inconsistent(ValueError):  # noqa: N818 - becomes part of a sentence
    """A manifest that contradicts itself or would write outside the prefix."""


def check(manifest: Manifest) -> None:
    """Check everything that can be known without reading a chunk.

    Raises:
        Inconsistent: the message says which path or chunk.
        UnicodeEncodeError: a path stands for no bytes.
    """
    _check_description(manifest)
    for _, target in manifest.relocations:
        if target:
            _check_path(target)
    if manifest.prefix_files.size > PREFIX_FILES:
        raise Inconsistent(
            f"prefix_files has {manifest.prefix_files.size} bytes, more than the {PREFIX_FILES} that are read"
        )
    _check_files(manifest)
    _check_chunks(manifest)


def check_name(name: str) -> None:
    """Check the name of an environment, which becomes that of files and of a conda environment.

    Raises:
        Inconsistent: it is no name of a file, or would not be shown as it is.
        UnicodeEncodeError: it stands for no bytes.
    """
    if not name or name in (".", "..") or "/" in name or len(os.fsencode(name)) > LONGEST_NAME:
        raise Inconsistent(f"name is {name[:80]!r}, which is no name of a file")
    _check_text("name", name)


def _check_description(manifest: Manifest) -> None:
    """What people are shown, and what becomes a name or an argument elsewhere."""
    check_name(manifest.name)
    for key in ("tool", "created", "platform", "python", "glibc"):
        _check_text(key, getattr(manifest, key) or "")
    for path in (manifest.source_prefix, *(source for source, _ in manifest.relocations)):
        _check_text("source_prefix" if path == manifest.source_prefix else "relocations", path)
        if len(os.fsencode(path)) > LONGEST_PATH:
            raise Inconsistent(f"the path {path[:80]!r}... is longer than {LONGEST_PATH} bytes")
    for key, value in manifest.versions.items():
        _check_text("versions", key)
        _check_text(f"versions[{key!r}]", value or "")
    for text in manifest.gpu_architectures or ():
        _check_text("gpu_architectures", text)
    for number, package in enumerate(manifest.packages):
        _check_text(f"packages[{number}].name", package.name)
        _check_text(f"packages[{number}].version", package.version)
    for number, text in enumerate(manifest.notices):  # they may quote paths, which may hold anything
        os.fsencode(text)
        if len(text) > LONGEST_NOTICE or "\0" in text:
            raise Inconsistent(f"notices[{number}] is longer than {LONGEST_NOTICE} characters, or holds a NUL")


def _check_text(key: str, text: str) -> None:
    if len(text) > LONGEST_TEXT:
        raise Inconsistent(f"{key} has {len(text)} characters, more than the {LONGEST_TEXT} allowed")
    if found := _UNSHOWABLE.search(text):
        raise Inconsistent(f"{key} holds the control character {found[0]!r}")
    if not text.isascii():
        os.fsencode(text)


def _check_files(manifest: Manifest) -> None:
    """Paths are relative, plain, in order, different, and beneath folders only."""
    leaves: set[str] = set()
    folders: set[str] = set()
    previous = ""
    files: dict[str, Entry] = {}
    targets = {target for _, target in manifest.relocations}
    spent = 0
    for entry in manifest.files:
        path = entry.path
        _check_path(path)
        if path <= previous:
            raise Inconsistent(f"{path!r} occurs twice or out of order")
        previous = path
        spent += _add_folders(path, folders, leaves)
        if spent > _FOLDERS:
            raise Inconsistent(f"{path!r}: the paths of all folders have more than the {_FOLDERS} bytes allowed")
        (folders if entry.type == "dir" else leaves).add(path)
        if entry.marks:
            _check_marks(entry, targets)
        elif not entry.chunks:
            raise Inconsistent(f"the bytes of {path!r} are nowhere")
        if entry.type == "file":
            files[path] = entry
            if entry.size > MEMBER and not entry.raw:
                _check_size(entry)
        elif entry.target:
            _check_target(entry)
            if entry.type == "hard":
                _check_hard_link(entry, files.get(entry.target))


def _add_folders(path: str, folders: set[str], leaves: Collection[str]) -> int:
    """Add the folders that a path is in, and tell how long their paths are together."""
    spent = 0
    folder = path.rpartition("/")[0]
    while folder and folder not in folders:
        if folder in leaves:
            raise Inconsistent(f"{path!r} lies beneath {folder!r}, which is no folder")
        folders.add(folder)
        spent += len(folder)
        folder = folder.rpartition("/")[0]
    return spent


def _check_target(entry: Entry) -> None:
    if len(os.fsencode(entry.target)) > LONGEST_PATH or "\0" in entry.target:
        raise Inconsistent(f"target of {entry.path!r} is no path: it holds a NUL, or over {LONGEST_PATH} bytes")


def _check_size(entry: Entry) -> None:
    limit = REWRITTEN if entry.marks else MEMBER
    if entry.size > limit:
        raise Inconsistent(
            f"size of {entry.path!r} is {entry.size}, more than the {limit} bytes that are held in memory"
        )


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
    for number, chunk in enumerate(manifest.chunks):
        os.fsencode(chunk.package)
        if len(chunk.package) > LONGEST_PATH or "\0" in chunk.package:
            raise Inconsistent(f"chunks[{number}].package holds a NUL, or over {LONGEST_PATH} characters")
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
    if len(path) > LONGEST_NAME or not path.isascii():
        _check_lengths(path)


def _check_lengths(path: str) -> None:
    data = os.fsencode(path)
    if len(data) > LONGEST_PATH or max(map(len, data.split(b"/"))) > LONGEST_NAME:
        raise Inconsistent(
            f"{path[:80]!r}... has over {LONGEST_PATH} bytes, or over {LONGEST_NAME} in one name: no disk holds it"
        )


def _check_unusual(path: str) -> None:
    if _ODD.search(path):
        raise Inconsistent(f"{path!r} is not a path inside the environment")
    if path.startswith(OURS) and path[len(OURS) :][:1] in ("", "/"):
        raise Inconsistent(f"{path!r} is where clusterctl keeps its own files")
