"""Read a manifest that nobody vouches for: every field is checked before anything is done with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
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
from provision.errors import BundleError

_T = TypeVar("_T")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_LARGEST = 1 << 53  # sizes beyond are no sizes


class _Bad(ValueError):  # noqa: N818 - becomes part of a sentence
    """A field that is not what it must be."""


def parse(data: bytes) -> Manifest:
    """A manifest from its JSON.

    Raises:
        BundleError: it is not well formed, contradicts itself, or would write outside the prefix.
    """
    try:
        with collector.paused():
            manifest = _manifest(json.loads(data))
            check(manifest)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise BundleError(f"the manifest is not valid: {reason}") from error
    return manifest


def check_format(number: object) -> None:
    """Refuse a format that this version of the tool does not know.

    Raises:
        BundleError: the format is newer, or none at all.
    """
    if type(number) is not int or number < 1:
        raise BundleError(f"the bundle's format is {number!r}, which no version of clusterctl writes")
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
        packages=tuple(_package(one) for one in _as(raw["packages"], list, "packages")),
        chunks=tuple(_chunk(one) for one in _as(raw["chunks"], list, "chunks")),
        prefix_files=_prefix_files(_as(raw["prefix_files"], dict, "prefix_files")),
        files=tuple(_entry(one) for one in _as(raw["files"], list, "files")),
        relocations=_relocations(_as(raw["relocations"], list, "relocations")),
        notices=_texts(raw["notices"], "notices"),
    )


def _entry(raw: Any) -> Entry:
    """An entry; an environment has tens of thousands, so this one is written to be quick."""
    raw = _as(raw, dict, "an entry")
    path, kind, mode = _text(raw, "path"), raw["type"], raw["mode"]
    if type(mode) is not int or not 0 <= mode <= 0o777:
        raise _Bad(f"{path!r} has mode {mode!r}")
    size, sha256, target = 0, "", ""
    if kind == "file":
        size, sha256 = _count(raw, "size"), _digest(raw, "sha256")
    elif kind in ("link", "hard"):
        target = _text(raw, "target")
        if not target or "\0" in target:
            raise _Bad(f"{path!r} is a link to nowhere")
    elif kind != "dir":
        raise _Bad(f"{path!r} is of the type {kind!r}")
    chunk = raw.get("chunk")
    is_raw = type(chunk) is list
    indexes = (chunk,) if type(chunk) is int else tuple(chunk) if is_raw else ()
    if (chunk is not None and not is_raw and not indexes) or (
        is_raw and any(type(index) is not int for index in indexes)
    ):
        raise _Bad(f"{path!r} names a chunk that is no number")
    marks = tuple(_mark(one, path) for one in _as(raw["prefix"], list, path)) if "prefix" in raw else ()
    return Entry(path, kind, mode, _count(raw, "mtime"), size, sha256, target, indexes, is_raw, marks)


def _mark(raw: Any, path: str) -> Mark:
    kind, target, *room = _as(raw, list, path)
    return Mark(_one_of(kind, MarkKind, path), _as(target, str, path), _as(room[0], int, path) if room else 0)


def _chunk(raw: Any) -> Chunk:
    raw = _as(raw, dict, "a chunk")
    if raw["kind"] not in ("tar", "raw"):
        raise _Bad(f"a chunk's kind is {raw['kind']!r}")
    return Chunk(
        digest=_digest(raw, "digest"),
        key=_digest(raw, "key"),
        kind=raw["kind"],
        package=_text(raw, "package"),
        size=_count(raw, "size"),
        compressed=_count(raw, "compressed"),
        offset=_count(raw, "offset"),
    )


def _prefix_files(raw: Mapping[str, Any]) -> PrefixFiles:
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
    if not path.startswith("/") or path == "/" or "\0" in path:
        raise _Bad(f"{path!r} is not an absolute path")
    return path


def _as(value: object, kind: type[_T], what: object) -> _T:
    if type(value) is not kind:
        raise _Bad(f"{what} is not a {kind.__name__}")
    return value


def _one_of(value: object, kinds: Any, what: str) -> Any:
    if value not in get_args(kinds):
        raise _Bad(f"{what!r} is of the kind {value!r}")
    return value


def _text(raw: Mapping[str, Any], key: str) -> str:
    return _as(raw[key], str, key)


def _texts(raw: Any, what: str) -> tuple[str, ...]:
    return tuple(_as(one, str, what) for one in cast("Iterable[Any]", _as(raw, list, what)))


def _count(raw: Mapping[str, Any], key: str) -> int:
    value = _as(raw[key], int, key)
    if not 0 <= value <= _LARGEST:
        raise _Bad(f"{key} is {value}")
    return value


def _digest(raw: Mapping[str, Any], key: str) -> str:
    value = _text(raw, key)
    if not _DIGEST.match(value):
        raise _Bad(f"{key} is no sha256")
    return value
