"""Prepare the files of an archive that contain the source prefix. Pure: bytes in, bytes out.

In text the prefix becomes a placeholder that occurs nowhere else. Python scripts ask ``/usr/bin/env`` for their
interpreter, as in conda-pack, until ``bin/conda-unpack`` writes its path. Symlinks into the environment become relative
and need no rewriting.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from provision.env.bundle.manifest import Entry, Manifest
from provision.env.relocation import binaries, records, shebangs
from provision.env.relocation.prefixes import Search, plain
from provision.env.relocation.relocate import stale_bytecode

MARK = "/opt/clusterctl_"
PLACEHOLDER = (MARK + "placehold_" * 24)[:255]  # as long as conda-build's, so every package has room for it

_SHORTEST = 40  # bytes; a shorter placeholder might occur by chance
_LONG = "/" + "x" * 4096  # a prefix that fits into no binary


@dataclass(frozen=True)
class Prepared:
    """How the archive differs from the bundle.

    Attributes:
        files: entries and their bytes (none for a link), sorted by path.
        dropped: paths in chunks that are not in the archive, or are in ``files`` instead.
        records: conda-unpack's table: path, placeholder, ``text`` or ``binary``.
        scripts: scripts that ask ``/usr/bin/env`` for a program of ``bin``: path and program.
        hash_lists: RECORD files, then conda-meta files.
        spare: binaries that also work with the source prefix.
        notices: what will not work after conda-unpack.
    """

    files: tuple[tuple[Entry, bytes], ...]
    dropped: frozenset[str]
    records: tuple[tuple[str, str, str], ...]
    scripts: tuple[tuple[str, str], ...]
    hash_lists: tuple[str, ...]
    spare: tuple[str, ...]
    notices: tuple[str, ...]


@dataclass
class _Collected:
    """Prepared files and the tables of conda-unpack."""

    files: dict[str, tuple[Entry, bytes]] = field(default_factory=dict)
    records: list[tuple[str, str, str]] = field(default_factory=list)
    scripts: list[tuple[str, str]] = field(default_factory=list)
    spare: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def prepare(manifest: Manifest, prefix_files: Mapping[str, bytes]) -> Prepared:
    """Prepare the files that depend on the prefix, from their packed bytes.

    Args:
        manifest: of the bundle.
        prefix_files: ``Bundle.prefix_files()``.
    """
    search = Search(manifest.relocations)
    programs = frozenset(os.fsencode(entry.path[4:]) for entry in manifest.files if entry.path.startswith("bin/"))
    found = _Collected()
    for entry in manifest.marked:
        if entry.type == "link":
            found.files[entry.path] = replace(entry, target=_relative(entry, search)), b""
            continue
        if entry.raw:
            found.notices.append(f"{entry.path} is too large to be rewritten, and contains {manifest.source_prefix}")
            continue
        data = prefix_files[entry.path]
        kinds = {mark.kind for mark in entry.marks}
        if "binary" in kinds:
            content = _binary(entry, data, search, found)
        else:
            script = _script(entry.path, data, search, programs, found) if "shebang" in kinds else None
            content = search.replace(data, _at(PLACEHOLDER, search)) if script is None else script
            if PLACEHOLDER.encode() in content:
                found.records.append((entry.path, PLACEHOLDER, "text"))
        found.files[entry.path] = _sized(entry, content)
    names = {path for path, _, _ in found.records} | {path for path, _ in found.scripts}
    copies = _copies(manifest, found, names)
    lists = _update_lists(manifest, found, names | copies)
    return Prepared(
        files=tuple(found.files[path] for path in sorted(found.files)),
        dropped=_stale(manifest, names | copies) | copies,
        records=tuple(sorted(found.records, key=lambda record: (record[2], record[0], -len(record[1])))),
        scripts=tuple(sorted(found.scripts)),
        hash_lists=lists,
        spare=tuple(sorted(found.spare)),
        notices=tuple(found.notices),
    )


def _at(prefix: str, search: Search) -> dict[str, str]:
    """The new path of each relocation's target."""
    return {target: posixpath.join(prefix, target).rstrip("/") for _, target in search.relocations}


def _relative(entry: Entry, search: Search) -> str:
    """The target of a link: relative if it is in the environment, else unchanged."""
    target = os.fsdecode(search.replace(os.fsencode(entry.target), _at(PLACEHOLDER, search)))
    if target != PLACEHOLDER and not target.startswith(PLACEHOLDER + "/"):
        return entry.target
    here = posixpath.dirname(f"{PLACEHOLDER}/{entry.path}")
    return posixpath.relpath(target, here)


def _script(path: str, data: bytes, search: Search, programs: frozenset[bytes], found: _Collected) -> bytes | None:
    """A script whose first line contains the prefix or one of its programs; None for other scripts."""
    new = _at(PLACEHOLDER, search)
    wanted = shebangs.env_program(data)
    if wanted and wanted[0] in programs:
        found.scripts.append((path, os.fsdecode(wanted[0])))
        return data[: len(data) - len(wanted[2])] + search.replace(wanted[2], new)
    script = shebangs.split(data, search)
    if script is None:
        return None
    program, options, body = (search.replace(part, new) for part in script)
    name = program.removeprefix(f"{PLACEHOLDER}/bin/".encode())
    if name in programs and not options:
        found.scripts.append((path, os.fsdecode(name)))
        return b"#!/usr/bin/env " + name + b"\n" + body
    return b"#!" + program + (b" " + options if options else b"") + b"\n" + body


def _binary(entry: Entry, data: bytes, search: Search, found: _Collected) -> bytes:
    """A binary with conda's room gets a placeholder that fills it; other binaries keep the source prefix for now."""
    room = max(mark.room for mark in entry.marks)
    if room >= _SHORTEST and all(not mark.target for mark in entry.marks):
        placeholder = PLACEHOLDER[:room]
        try:
            content, left = binaries.rewrite(data, search, _at(placeholder, search), room=room)
        except binaries.CannotRewrite:
            left = "it lacks the room"
        if not left:
            found.records.append((entry.path, placeholder, "binary"))
            return content
    try:  # paths that the loader searches can be relative to the file's folder, and then need no rewriting
        data, left = binaries.rewrite(data, search, _at(_LONG, search), path=entry.path)
    except binaries.CannotRewrite:
        left = ""
    if "archive" in left:
        found.notices.append(f"{entry.path}: {left}")
        return data
    found.spare += [entry.path] if left else []
    spelled = {match.group() for match, _ in search.occurrences(data)}
    found.records += [
        (entry.path, source, "binary")
        for source, target in search.relocations
        if not target and plain(source) in spelled
    ]
    if any(mark.target for mark in entry.marks):
        found.notices.append(f"{entry.path}: conda-unpack cannot rewrite the path of a checkout in a binary")
    return data


def _update_lists(manifest: Manifest, found: _Collected, names: set[str]) -> tuple[str, ...]:
    """Update the lists of hashes for the archive. Returns those that conda-unpack must update again, RECORD first."""
    packed = {entry.path: entry.sha256 for entry in manifest.marked}
    prepared = (entry for entry, _ in found.files.values() if entry.type == "file")
    changed = {entry.path: entry for entry in prepared if entry.path in names or entry.sha256 != packed[entry.path]}
    later = {path: replace(changed[path], sha256="0" * 64) for path in names}  # differs from now, whatever it becomes
    lists = []
    for path in sorted(manifest.records, key=lambda path: (path.startswith("conda-meta/"), path)):
        entry, data = found.files[path]
        if path not in names and records.update(path, data, later, PLACEHOLDER) == data:
            continue
        lists.append(path)
        found.files[path] = _sized(entry, records.update(path, data, changed, PLACEHOLDER))
        changed[path] = found.files[path][0]
        later[path] = replace(changed[path], sha256="0" * 64)
    return tuple(lists)


def _copies(manifest: Manifest, found: _Collected, names: set[str]) -> set[str]:
    """Hard links to files that conda-unpack replaces become separate files, which it replaces too."""
    copies = {entry.path: entry.target for entry in manifest.files if entry.type == "hard" and entry.target in names}
    for path, target in copies.items():
        entry, data = found.files[target]
        found.files[path] = replace(entry, path=path), data
        found.records += [(path, old, mode) for where, old, mode in found.records if where == target]
        found.scripts += [(path, program) for where, program in found.scripts if where == target]
        found.spare += [path] if target in found.spare else []
    return set(copies)


def _stale(manifest: Manifest, names: set[str]) -> frozenset[str]:
    """.pyc files of .py files that conda-unpack rewrites: Python might load the outdated .pyc files."""
    return stale_bytecode(manifest, names) - {entry.target for entry in manifest.files if entry.type == "hard"}


def _sized(entry: Entry, data: bytes) -> tuple[Entry, bytes]:
    return replace(entry, size=len(data), sha256=hashlib.sha256(data).hexdigest()), data
