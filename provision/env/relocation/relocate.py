"""Rewrite the files that hold a source path for a new prefix. Pure: bytes in, bytes out."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from provision.env.bundle.manifest import Entry, Manifest
from provision.env.relocation import binaries, bytecode, records, shebangs
from provision.env.relocation.prefixes import Search
from provision.errors import UsageError

# Characters that every file takes as they are: shebangs, words of sh with and without quotes, Python strings. A space
# only breaks an unquoted word; these others would mean something to a shell, or end an entry of PATH.
_PREFIX = re.compile(r"/[^\x00-\x1f\x7f\"'`$\\:;&|<>()*?\[\]{}#!~]+\Z")


@dataclass(frozen=True)
class Relocated:
    """An environment's prefix-dependent files, as they must be at a new prefix.

    Attributes:
        prefix: the new prefix.
        files: entries with their new size and digest (a link: its new target), and their bytes (none for a link).
        stale_pyc: compiled files whose source was rewritten; they must not be unpacked.
        uncompiled: Python files without a compiled one, for the environment's own Python to compile where it will lie,
            each with the path of what comes of it.
        warnings: what will not work everywhere.
        unrewritable: paths that keep the old prefix, and why; the environment may not work without them.
    """

    prefix: PurePosixPath
    files: tuple[tuple[Entry, bytes], ...]
    stale_pyc: frozenset[str] = frozenset()
    uncompiled: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    unrewritable: tuple[tuple[str, str], ...] = ()


def relocate(manifest: Manifest, prefix_files: Mapping[str, bytes], new_prefix: PurePosixPath) -> Relocated:
    """Rewrite every file that depends on the prefix, from its packed bytes.

    Args:
        manifest: of the bundle.
        prefix_files: ``Bundle.prefix_files()``.
        new_prefix: where the environment will lie.

    Raises:
        UsageError: the new prefix is not absolute, or holds characters that no script can carry.
    """
    top = str(new_prefix)
    if not _PREFIX.match(top):
        raise UsageError(
            f"{top!r} cannot be a prefix",
            hint="it must be absolute, without quotes, control characters and what means something to a shell",
        )
    search = Search(manifest.relocations)
    new = {target: posixpath.join(top, target).rstrip("/") for _, target in manifest.relocations}
    programs = frozenset(os.fsencode(entry.path[4:]) for entry in manifest.files if entry.path.startswith("bin/"))
    links: list[tuple[Entry, bytes]] = []
    files: dict[str, tuple[Entry, bytes]] = {}
    unrewritable: list[tuple[str, str]] = []
    warnings: list[str] = []
    for entry in manifest.marked:
        if entry.type == "link":
            target = search.replace(os.fsencode(entry.target), new)
            links.append((replace(entry, target=os.fsdecode(target)), b""))
            continue
        if entry.raw:
            unrewritable.append((entry.path, f"it is too large to be rewritten, and holds {manifest.source_prefix}"))
            continue
        data = prefix_files[entry.path]
        try:
            content, left = _rewrite(entry, data, search, new, programs)
        except binaries.CannotRewrite as reason:
            content, left = data, ""
            unrewritable.append((entry.path, f"{reason}; {top} has {len(os.fsencode(top))}"))
        files[entry.path] = _sized(entry, content)
        warnings += [f"{entry.path}: {left}"] if left else []
    rewritten = {path: entry for path, (entry, data) in files.items() if data != prefix_files[path]}
    others = {entry.path: entry.target for entry in manifest.files if entry.type == "hard"}
    rewritten |= {path: rewritten[target] for path, target in others.items() if target in rewritten}
    for path in sorted(manifest.records, key=lambda path: path.startswith("conda-meta/")):
        entry, data = files[path]
        updated = records.update(path, data, rewritten, top)
        if updated != data:
            files[path] = _sized(entry, updated)
            rewritten[path] = files[path][0]
    stale = bytecode.stale(manifest, rewritten)
    return Relocated(
        prefix=new_prefix,
        files=tuple(sorted((*files.values(), *links), key=lambda pair: pair[0].path)),
        stale_pyc=stale,
        uncompiled=bytecode.uncompiled(manifest, stale),
        warnings=(*warnings, *_warnings(files.values(), top)),
        unrewritable=tuple(unrewritable),
    )


def _rewrite(
    entry: Entry, data: bytes, search: Search, new: Mapping[str, str], programs: frozenset[bytes]
) -> tuple[bytes, str]:
    """The new content of a file, and why old paths were left in it; empty if none were."""
    kinds = {mark.kind for mark in entry.marks}
    if "binary" in kinds:
        room = max(mark.room for mark in entry.marks)
        return binaries.rewrite(data, search, new, room=room, path=entry.path)
    if "shebang" in kinds:
        return _rewrite_script(data, search, new, programs), ""
    return search.replace(data, new), ""


def _rewrite_script(data: bytes, search: Search, new: Mapping[str, str], programs: frozenset[bytes]) -> bytes:
    wanted = shebangs.env_program(data)
    if wanted and wanted[0] in programs:
        name, options, body = wanted
        return shebangs.write(os.fsencode(f"{new['']}/bin/") + name, options) + search.replace(body, new)
    if script := shebangs.split(data, search):
        program, options, body = (search.replace(part, new) for part in script)
        return shebangs.write(program, options) + body
    return search.replace(data, new)


def _sized(entry: Entry, data: bytes) -> tuple[Entry, bytes]:
    return replace(entry, size=len(data), sha256=hashlib.sha256(data).hexdigest()), data


def _warnings(files: Iterable[tuple[Entry, bytes]], top: str) -> Iterator[str]:
    """Scripts that had to get another form than one plain line."""
    scripts = [(entry, data) for entry, data in files if any(mark.kind == "shebang" for mark in entry.marks)]
    longer = [entry.path for entry, data in scripts if shebangs.form(data) == "exec"]
    if longer:
        yield f"{top} is too long or holds a space: {len(longer)} Python scripts start by way of /bin/sh"
    for entry, data in scripts:
        if shebangs.form(data) == "long line":
            yield f"{entry.path}: its first line is too long for Linux before 5.1"
        elif shebangs.form(data) == "activated":
            yield f"{entry.path}: its first line would be too long; it starts only where the environment is activated"
