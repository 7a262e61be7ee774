"""Parse and check an untrusted manifest: every field, and whether they agree with each other."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast, get_args

from provision.env.bundle import tar
from provision.env.bundle.manifest import (
    FOLDERS,
    FORMAT,
    Chunk,
    Entry,
    Manifest,
    Mark,
    MarkKind,
    Package,
    PackageKind,
    PrefixFiles,
    pause_collector,
)
from provision.errors import BundleError, shown_value
from trainer.agent.contract.untrusted import parse_json

LIMIT = 128 << 20  # bytes of a manifest; one of 200,000 files has 43 MB

_T = TypeVar("_T")
_DEPTH = 6  # levels of lists and objects: the manifest, files, an entry, its marks, a mark
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_LARGEST = 1 << 53  # sizes beyond are no sizes
_ROOM = 1 << 16  # bytes of a prefix: conda reserves 255

_ODD = re.compile(r"(?:\A|/)\.{0,2}(?:/|\Z)|\0")  # a component that is empty, ``.`` or ``..``; a NUL

# Characters that control a terminal or change how text is shown: control characters, line ends, writing directions.
_UNSHOWABLE = re.compile("[\0-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")

OWN_FOLDER = ".clusterctl"  # clusterctl's folder in an unpacked environment

LONGEST_NAME = 255  # bytes of one name, on Linux's file systems
LONGEST_PATH = 4095  # bytes of a path or of a symlink's target
LONGEST_TEXT = 4096  # characters of what describes an environment
LONGEST_NOTICE = 64 << 10  # characters; names files
MEMBER = 64 << 20  # bytes of a file in a tar chunk, which readers may hold in memory; pack writes ranges of 16 MiB
REWRITTEN = 256 << 20  # bytes of a file that is rewritten, in memory
PREFIX_FILES = 2 << 30  # bytes of all rewritten files, in memory
FOLDER_PATHS = 1 << 30  # bytes of the paths of all folders


class InvalidManifest(ValueError):  # noqa: N818 - becomes part of a sentence
    """A field is invalid, contradicts another, or would write outside the prefix."""


def parse(data: bytes) -> Manifest:
    """Parse a manifest from its JSON.

    Raises:
        BundleError: it is malformed, contradicts itself, or would write outside the prefix.
    """
    try:
        with pause_collector():
            manifest = _manifest(parse_json(data, limit=LIMIT, depth=_DEPTH))
            check(manifest)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise BundleError(f"the manifest is not valid: {reason}") from error
    return manifest


def check_format(number: object) -> None:
    """Refuse a format that this version of clusterctl does not read.

    Raises:
        BundleError: the format is older, newer or invalid.
    """
    if type(number) is not int or number < 1:
        raise BundleError(f"the bundle's format is {shown_value(number)}, which no version of clusterctl writes")
    if number < FORMAT:
        raise BundleError(
            f"the bundle has format {number}; this clusterctl reads format {FORMAT} only",
            hint="pack it again: clusterctl pack-env",
        )
    if number > FORMAT:
        raise BundleError(
            f"the bundle has format {number}; this clusterctl reads format {FORMAT} only",
            hint="use the version of clusterctl that packed it, or a later one",
        )


def _manifest(raw: Any) -> Manifest:
    raw = _as(raw, dict, "the manifest")
    check_format(raw["format"])
    architectures = raw.get("gpu_architectures")
    versions = _as(raw["versions"], dict, "versions")
    return Manifest(
        format=raw["format"],
        name=_text(raw, "name"),
        tool=_text(raw, "tool"),
        created=_text(raw, "created"),
        platform=_text(raw, "platform"),
        python=_text(raw, "python"),
        glibc=_text(raw, "glibc") if raw.get("glibc") is not None else None,
        source_prefix=_absolute(_text(raw, "source_prefix")),
        versions={str(key): None if value is None else _as(value, str, key) for key, value in versions.items()},
        gpu_architectures=None if architectures is None else _texts(architectures, "gpu_architectures"),
        packages=_each(raw, "packages", _package),
        chunks=_each(raw, "chunks", _chunk),
        prefix_files=_read_key("prefix_files", _prefix_files, raw["prefix_files"]),
        files=_each(raw, "files", _entry),
        relocations=_relocations(_as(raw["relocations"], list, "relocations")),
        notices=_texts(raw["notices"], "notices"),
    )


def _each(raw: Mapping[str, Any], key: str, read: Callable[[Any], _T]) -> tuple[_T, ...]:
    """Read every item of a list. An error names the list, the number of the item and the key in it."""
    items = _as(raw[key], list, key)
    found: list[_T] = []
    try:
        for item in items:
            found.append(read(item))  # noqa: PERF401 - their number is in the error
    except (ValueError, KeyError, TypeError) as error:
        why = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise InvalidManifest(f"{key}[{len(found)}]: {why}") from error
    return tuple(found)


def _read_key(key: str, read: Callable[[Any], _T], raw: Any) -> _T:
    """Read one object. An error names it."""
    try:
        return read(raw)
    except (ValueError, KeyError, TypeError) as error:
        why = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise InvalidManifest(f"{key}: {why}") from error


def _entry(raw: Any) -> Entry:
    """Read an entry. Written for speed: an environment has tens of thousands."""
    if type(raw) is not dict:
        raise InvalidManifest("an entry is not a dict")
    path, kind, mode, mtime = raw["path"], raw["type"], raw["mode"], raw["mtime"]
    if type(path) is not str:
        raise InvalidManifest("path is not a str")
    if type(mode) is not int or not 0 <= mode <= 0o777:
        raise InvalidManifest(f"mode of {path!r} is {mode!r}, outside 0 to 0o777")
    if type(mtime) is not int or not 0 <= mtime <= _LARGEST:
        raise InvalidManifest(f"mtime of {path!r} is {shown_value(mtime)}")
    size, sha256, target = _content(raw, path, kind)
    indexes, is_raw = _chunks_of(raw["chunk"], path) if "chunk" in raw else ((), False)
    marks = tuple(_mark(one, path) for one in _as(raw["prefix"], list, path)) if "prefix" in raw else ()
    return Entry(path, kind, mode, mtime, size, sha256, target, indexes, is_raw, marks)


def _content(raw: Any, path: str, kind: object) -> tuple[int, str, str]:
    """The size and sha256 of a file, or the target of a link."""
    if kind == "file":
        size, sha256 = raw["size"], raw["sha256"]
        if type(size) is not int or not 0 <= size <= _LARGEST:
            raise InvalidManifest(f"size of {path!r} is {shown_value(size)}")
        if type(sha256) is not str or not _DIGEST.match(sha256):
            raise InvalidManifest(f"sha256 of {path!r} is not a sha256")
        return size, sha256, ""
    if kind in ("link", "hard"):
        target = _text(raw, "target")
        if not target:
            raise InvalidManifest(f"{path!r} is a link without a target")
        return 0, "", target
    if kind != "dir":
        raise InvalidManifest(f"type of {path!r} is {shown_value(kind)}")
    return 0, "", ""


def _chunks_of(chunk: object, path: str) -> tuple[tuple[int, ...], bool]:
    """The numbers of an entry's chunks, and whether they are ranges."""
    if type(chunk) is int:
        return (chunk,), False
    if isinstance(chunk, list) and all(type(index) is int for index in chunk):
        return tuple(chunk), True
    raise InvalidManifest(f"chunk of {path!r} is not a number")


def _mark(raw: Any, path: str) -> Mark:
    items = _as(raw, list, f"prefix of {path!r}")
    if len(items) not in (2, 3):
        raise InvalidManifest(f"prefix of {path!r} has a mark of {len(items)} items")
    kind, target, *room = items
    for one in room:
        if type(one) is not int or not 0 <= one <= _ROOM:
            raise InvalidManifest(f"prefix of {path!r} has a room of {shown_value(one)} bytes")
    return Mark(_one_of(kind, MarkKind, f"prefix of {path!r}"), _as(target, str, path), room[0] if room else 0)


def _chunk(raw: Any) -> Chunk:
    raw = _as(raw, dict, "a chunk")
    if raw["kind"] not in ("tar", "raw"):
        raise InvalidManifest(f"kind is {shown_value(raw['kind'])}")
    return Chunk(
        digest=_digest(raw, "digest"),
        key=_digest(raw, "key"),
        kind=raw["kind"],
        package=_text(raw, "package"),
        size=_count(raw, "size"),
        compressed=_count(raw, "compressed"),
        offset=_count(raw, "offset"),
    )


def _prefix_files(raw: Any) -> PrefixFiles:
    raw = _as(raw, dict, "it")
    return PrefixFiles(
        digest=_digest(raw, "digest"),
        size=_count(raw, "size"),
        compressed=_count(raw, "compressed"),
        offset=_count(raw, "offset"),
    )


def _package(raw: Any) -> Package:
    raw = _as(raw, dict, "a package")
    return Package(_text(raw, "name"), _text(raw, "version"), _one_of(raw["kind"], PackageKind, "a package"))


def _relocations(raw: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    pairs = tuple(_texts(pair, "relocations") for pair in raw)
    if not all(len(pair) == 2 for pair in pairs) or not pairs or pairs[-1][1]:
        raise InvalidManifest("relocations must be pairs that end with the prefix")
    for pair in pairs:
        _absolute(pair[0])
    return tuple((pair[0], pair[1]) for pair in pairs)


def _absolute(path: str) -> str:
    if not path.startswith("/") or path == "/":
        raise InvalidManifest(f"{shown_value(path)} is not an absolute path")
    return path


def _as(value: object, kind: type[_T], what: object) -> _T:
    if type(value) is not kind:
        raise InvalidManifest(f"{what} is not a {kind.__name__}")
    return value


def _one_of(value: object, kinds: Any, what: str) -> Any:
    if type(value) is not str or value not in get_args(kinds):
        raise InvalidManifest(f"{what} is of the kind {shown_value(value)}")
    return value


def _text(raw: Mapping[str, Any], key: str) -> str:
    return _as(raw[key], str, key)


def _texts(raw: Any, what: str) -> tuple[str, ...]:
    return tuple(_as(one, str, what) for one in cast("Iterable[Any]", _as(raw, list, what)))


def _count(raw: Mapping[str, Any], key: str) -> int:
    value = _as(raw[key], int, key)
    if not 0 <= value <= _LARGEST:
        raise InvalidManifest(f"{key} is {shown_value(value)}")
    return value


def _digest(raw: Mapping[str, Any], key: str) -> str:
    value = _text(raw, key)
    if not _DIGEST.match(value):
        raise InvalidManifest(f"{key} is not a sha256")
    return value


def check(manifest: Manifest) -> None:
    """Check everything that can be checked without reading a chunk.

    Raises:
        InvalidManifest: the message names the path or chunk.
        UnicodeEncodeError: a path cannot be encoded.
    """
    _check_description(manifest)
    for _, target in manifest.relocations:
        if target:
            _check_path(target)
    if manifest.prefix_files.size > PREFIX_FILES:
        raise InvalidManifest(
            f"prefix_files has {manifest.prefix_files.size} bytes, more than the limit of {PREFIX_FILES}"
        )
    _check_files(manifest)
    _check_chunks(manifest)


def check_name(name: str) -> None:
    """Check the name of an environment, which is used for files and for a conda environment.

    Raises:
        InvalidManifest: it is not a file name, or has invisible characters.
        UnicodeEncodeError: it cannot be encoded.
    """
    if not name or name in (".", "..") or "/" in name or len(os.fsencode(name)) > LONGEST_NAME:
        raise InvalidManifest(f"name is {name[:80]!r}, which is not a file name")
    _check_text("name", name)


def _check_description(manifest: Manifest) -> None:
    """Check texts that are shown to users or become names and arguments."""
    check_name(manifest.name)
    for key in ("tool", "created", "platform", "python", "glibc"):
        _check_text(key, getattr(manifest, key) or "")
    for path in (manifest.source_prefix, *(source for source, _ in manifest.relocations)):
        _check_text("source_prefix" if path == manifest.source_prefix else "relocations", path)
        if len(os.fsencode(path)) > LONGEST_PATH:
            raise InvalidManifest(f"the path {path[:80]!r}... is longer than {LONGEST_PATH} bytes")
    for key, value in manifest.versions.items():
        _check_text("versions", key)
        _check_text(f"versions[{key!r}]", value or "")
    for text in manifest.gpu_architectures or ():
        _check_text("gpu_architectures", text)
    for number, package in enumerate(manifest.packages):
        _check_text(f"packages[{number}].name", package.name)
        _check_text(f"packages[{number}].version", package.version)
    for number, text in enumerate(manifest.notices):  # they may quote paths with any characters
        os.fsencode(text)
        if len(text) > LONGEST_NOTICE or "\0" in text:
            raise InvalidManifest(f"notices[{number}] is longer than {LONGEST_NOTICE} characters or contains a NUL")


def _check_text(key: str, text: str) -> None:
    if len(text) > LONGEST_TEXT:
        raise InvalidManifest(f"{key} has {len(text)} characters, more than the limit of {LONGEST_TEXT}")
    if found := _UNSHOWABLE.search(text):
        raise InvalidManifest(f"{key} contains the control character {found[0]!r}")
    if not text.isascii():
        os.fsencode(text)


def _check_files(manifest: Manifest) -> None:
    """Check that paths are relative, normal, in order, different, and only inside folders."""
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
            raise InvalidManifest(f"{path!r} occurs twice or out of order")
        previous = path
        spent += _add_folders(path, folders, leaves)
        if spent > FOLDER_PATHS:
            raise InvalidManifest(f"{path!r}: the paths of all folders have more than {FOLDER_PATHS} bytes, the limit")
        (folders if entry.type == "dir" else leaves).add(path)
        if entry.marks:
            _check_marks(entry, targets)
        elif not entry.chunks:
            raise InvalidManifest(f"{path!r} is in no chunk")
        if entry.type == "file":
            files[path] = entry
            if entry.size > MEMBER and not entry.raw:
                _check_size(entry)
        elif entry.target:
            _check_target(entry)
            if entry.type == "hard":
                _check_hard_link(entry, files.get(entry.target))


def _add_folders(path: str, folders: set[str], leaves: Collection[str]) -> int:
    """Add the folders above a path; returns the total length of the added paths."""
    spent = 0
    folder = path.rpartition("/")[0]
    while folder and folder not in folders:
        if folder in leaves:
            raise InvalidManifest(f"{path!r} is inside {folder!r}, which is not a folder")
        folders.add(folder)
        spent += len(folder)
        folder = folder.rpartition("/")[0]
    return spent


def _check_target(entry: Entry) -> None:
    if len(os.fsencode(entry.target)) > LONGEST_PATH or "\0" in entry.target:
        raise InvalidManifest(
            f"target of {entry.path!r} is not a path: it contains a NUL or has over {LONGEST_PATH} bytes"
        )


def _check_size(entry: Entry) -> None:
    limit = REWRITTEN if entry.marks else MEMBER
    if entry.size > limit:
        raise InvalidManifest(f"size of {entry.path!r} is {entry.size}, more than the limit of {limit} bytes in memory")


def _check_marks(entry: Entry, targets: Collection[str]) -> None:
    if (entry.chunks and not entry.raw) or entry.type in ("dir", "hard"):
        raise InvalidManifest(f"{entry.path!r} cannot contain the prefix and be in a chunk")
    if any(mark.target not in targets for mark in entry.marks):
        raise InvalidManifest(f"{entry.path!r} contains a path that is not in the relocations")
    if entry.raw and any(mark.kind != "binary" for mark in entry.marks):
        raise InvalidManifest(f"{entry.path!r} is rewritten and split into ranges")


def _check_hard_link(entry: Entry, target: Entry | None) -> None:
    if target is None:
        raise InvalidManifest(f"{entry.path!r} is a hard link to {entry.target!r}, which is not a file before it")
    if (entry.mode, entry.mtime) != (target.mode, target.mtime):
        raise InvalidManifest(f"{entry.path!r} is a hard link to {entry.target!r} and differs from it")


def _check_chunks(manifest: Manifest) -> None:
    """Check that every chunk has the size of its entries."""
    for number, chunk in enumerate(manifest.chunks):
        os.fsencode(chunk.package)
        if len(chunk.package) > LONGEST_PATH or "\0" in chunk.package:
            raise InvalidManifest(f"chunks[{number}].package contains a NUL or has over {LONGEST_PATH} characters")
    expected = [0] * len(manifest.chunks)
    kinds = [(chunk.kind, chunk.package == FOLDERS) for chunk in manifest.chunks]
    for entry in manifest.files:
        kind = ("raw" if entry.raw else "tar", entry.type in ("dir", "hard"))
        for index in entry.chunks:
            if not 0 <= index < len(expected):
                raise InvalidManifest(f"{entry.path!r} names a chunk that does not exist")
            if kinds[index] != kind:
                raise InvalidManifest(f"{entry.path!r} names a chunk of the wrong kind")
            expected[index] += manifest.chunks[index].size if entry.raw else tar.span(entry)
        if entry.raw and (sum(manifest.chunks[i].size for i in entry.chunks) != entry.size or entry.type != "file"):
            raise InvalidManifest(f"the ranges of {entry.path!r} do not add up")
    if expected != [chunk.size for chunk in manifest.chunks]:
        raise InvalidManifest("a chunk does not have the size of its members")
    if sum(map(tar.span, manifest.rewritable)) != manifest.prefix_files.size:
        raise InvalidManifest("the prefix files do not have the size of their members")


def _check_path(path: str) -> None:
    if not path or path[0] in "./" or path[-1] == "/" or "/." in path or "//" in path or "\0" in path:
        _check_unusual(path)  # only then: matching every path takes long
    if len(path) > LONGEST_NAME or not path.isascii():
        _check_lengths(path)


def _check_lengths(path: str) -> None:
    data = os.fsencode(path)
    if len(data) > LONGEST_PATH or max(map(len, data.split(b"/"))) > LONGEST_NAME:
        raise InvalidManifest(f"{path[:80]!r}... has over {LONGEST_PATH} bytes, or over {LONGEST_NAME} in one name")


def _check_unusual(path: str) -> None:
    if _ODD.search(path):
        raise InvalidManifest(f"{path!r} is not a path inside the environment")
    if path.startswith(OWN_FOLDER) and path[len(OWN_FOLDER) :][:1] in ("", "/"):
        raise InvalidManifest(f"{path!r} is reserved for clusterctl's own files")
