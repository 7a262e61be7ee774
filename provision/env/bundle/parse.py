"""Read a manifest that nobody vouches for: every field is checked before anything is done with it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast, get_args

from provision.env import collector
from provision.env.bundle.consistency import check
from provision.env.bundle.manifest import (
    FORMAT,
    Chunk,
    Entry,
    Manifest,
    Mark,
    MarkKind,
    Package,
    PackageKind,
    PrefixFiles,
)
from provision.errors import BundleError, shown_value
from trainer.untrusted import parse_json

LIMIT = 128 << 20  # bytes of a manifest; one of 200,000 files has 43 MB

_T = TypeVar("_T")
_DEPTH = 6  # levels of lists and objects: the manifest, files, an entry, its marks, a mark
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_LARGEST = 1 << 53  # sizes beyond are no sizes
_ROOM = 1 << 16  # bytes of a prefix: conda reserves 255


class _Bad(ValueError):  # noqa: N818 - becomes part of a sentence
    """A field that is not what it must be."""


def parse(data: bytes) -> Manifest:
    """A manifest from its JSON.

    Raises:
        BundleError: it is not well formed, contradicts itself, or would write outside the prefix.
    """
    try:
        with collector.paused():
            manifest = _manifest(parse_json(data, limit=LIMIT, depth=_DEPTH))
            check(manifest)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise BundleError(f"the manifest is not valid: {reason}") from error
    return manifest


def check_format(number: object) -> None:
    """Refuse a format that this version of the tool does not know.

    Raises:
        BundleError: the format is newer, or none at all.
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
        prefix_files=_named("prefix_files", _prefix_files, raw["prefix_files"]),
        files=_each(raw, "files", _entry),
        relocations=_relocations(_as(raw["relocations"], list, "relocations")),
        notices=_texts(raw["notices"], "notices"),
    )


def _each(raw: Mapping[str, Any], key: str, read: Callable[[Any], _T]) -> tuple[_T, ...]:
    """Every item of a list; an error names the list, the item's number and the key in it."""
    items = _as(raw[key], list, key)
    found: list[_T] = []
    try:
        for item in items:
            found.append(read(item))  # noqa: PERF401 - how many there are tells which one is wrong
    except (ValueError, KeyError, TypeError) as error:
        why = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise _Bad(f"{key}[{len(found)}]: {why}") from error
    return tuple(found)


def _named(key: str, read: Callable[[Any], _T], raw: Any) -> _T:
    """One object; an error names it."""
    try:
        return read(raw)
    except (ValueError, KeyError, TypeError) as error:
        why = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise _Bad(f"{key}: {why}") from error


def _entry(raw: Any) -> Entry:
    """An entry; an environment has tens of thousands, so this one is written to be quick."""
    if type(raw) is not dict:
        raise _Bad("an entry is not a dict")
    path, kind, mode, mtime = raw["path"], raw["type"], raw["mode"], raw["mtime"]
    if type(path) is not str:
        raise _Bad("path is not a str")
    if type(mode) is not int or not 0 <= mode <= 0o777:
        raise _Bad(f"mode of {path!r} is {mode!r}, which is none of 0 to 0o777")
    if type(mtime) is not int or not 0 <= mtime <= _LARGEST:
        raise _Bad(f"mtime of {path!r} is {shown_value(mtime)}")
    size, sha256, target = _content(raw, path, kind)
    indexes, is_raw = _place(raw["chunk"], path) if "chunk" in raw else ((), False)
    marks = tuple(_mark(one, path) for one in _as(raw["prefix"], list, path)) if "prefix" in raw else ()
    return Entry(path, kind, mode, mtime, size, sha256, target, indexes, is_raw, marks)


def _content(raw: Any, path: str, kind: object) -> tuple[int, str, str]:
    """Size and sha256 of a file, and the target of a link."""
    if kind == "file":
        size, sha256 = raw["size"], raw["sha256"]
        if type(size) is not int or not 0 <= size <= _LARGEST:
            raise _Bad(f"size of {path!r} is {shown_value(size)}")
        if type(sha256) is not str or not _DIGEST.match(sha256):
            raise _Bad(f"sha256 of {path!r} is no sha256")
        return size, sha256, ""
    if kind in ("link", "hard"):
        target = _text(raw, "target")
        if not target:
            raise _Bad(f"{path!r} is a link to nowhere")
        return 0, "", target
    if kind != "dir":
        raise _Bad(f"type of {path!r} is {shown_value(kind)}")
    return 0, "", ""


def _place(chunk: object, path: str) -> tuple[tuple[int, ...], bool]:
    """The chunks that an entry names, and whether they are ranges."""
    if type(chunk) is int:
        return (chunk,), False
    if isinstance(chunk, list) and all(type(index) is int for index in chunk):
        return tuple(chunk), True
    raise _Bad(f"chunk of {path!r} is no number")


def _mark(raw: Any, path: str) -> Mark:
    items = _as(raw, list, f"prefix of {path!r}")
    if len(items) not in (2, 3):
        raise _Bad(f"prefix of {path!r} has a mark of {len(items)} items")
    kind, target, *room = items
    for one in room:
        if type(one) is not int or not 0 <= one <= _ROOM:
            raise _Bad(f"prefix of {path!r} has a room of {shown_value(one)} bytes")
    return Mark(_one_of(kind, MarkKind, f"prefix of {path!r}"), _as(target, str, path), room[0] if room else 0)


def _chunk(raw: Any) -> Chunk:
    raw = _as(raw, dict, "a chunk")
    if raw["kind"] not in ("tar", "raw"):
        raise _Bad(f"kind is {shown_value(raw['kind'])}")
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
        raise _Bad("relocations must be pairs that end with the prefix")
    for pair in pairs:
        _absolute(pair[0])
    return tuple((pair[0], pair[1]) for pair in pairs)


def _absolute(path: str) -> str:
    if not path.startswith("/") or path == "/":
        raise _Bad(f"{shown_value(path)} is not an absolute path")
    return path


def _as(value: object, kind: type[_T], what: object) -> _T:
    if type(value) is not kind:
        raise _Bad(f"{what} is not a {kind.__name__}")
    return value


def _one_of(value: object, kinds: Any, what: str) -> Any:
    if type(value) is not str or value not in get_args(kinds):
        raise _Bad(f"{what} is of the kind {shown_value(value)}")
    return value


def _text(raw: Mapping[str, Any], key: str) -> str:
    return _as(raw[key], str, key)


def _texts(raw: Any, what: str) -> tuple[str, ...]:
    return tuple(_as(one, str, what) for one in cast("Iterable[Any]", _as(raw, list, what)))


def _count(raw: Mapping[str, Any], key: str) -> int:
    value = _as(raw[key], int, key)
    if not 0 <= value <= _LARGEST:
        raise _Bad(f"{key} is {shown_value(value)}")
    return value


def _digest(raw: Mapping[str, Any], key: str) -> str:
    value = _text(raw, key)
    if not _DIGEST.match(value):
        raise _Bad(f"{key} is no sha256")
    return value
