"""Rewrite the files that contain a source path for a new prefix. Pure: bytes in, bytes out."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from provision.env.bundle.manifest import Entry, Manifest
from provision.env.relocation import rewrite
from provision.env.relocation.rewrite import Search
from provision.env.source.packages import source_of
from provision.errors import UsageError

# Characters that need no escaping anywhere: shebangs, sh words with and without quotes, Python strings. A space only
# breaks an unquoted word; the excluded characters have a meaning in a shell, or end an entry of PATH.
PREFIX = re.compile(r"/[^\x00-\x1f\x7f\"'`$\\:;&|<>()*?\[\]{}#!~]+\Z")


_VERSION = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True)
class Relocated:
    """An environment's prefix-dependent files for a new prefix.

    Attributes:
        prefix: the new prefix.
        files: entries with their new size and digest (a link: its new target), and their bytes (none for a link).
        stale_pyc: .pyc files whose .py file was rewritten; they must not be unpacked.
        uncompiled: .py files without a .pyc file, each with the path of that file. The environment's own Python
            compiles them on the node.
        warnings: what does not work everywhere.
        unrewritable: paths that keep the old prefix, and why; without them the environment may not work.
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
        new_prefix: where the environment will be.

    Raises:
        UsageError: the new prefix is not absolute, or has characters that scripts cannot contain.
    """
    top = str(new_prefix)
    if not PREFIX.match(top):
        raise UsageError(
            f"{top!r} cannot be a prefix",
            hint="it must be absolute, without quotes, control characters and characters with a meaning in a shell",
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
            unrewritable.append((entry.path, f"it is too large to be rewritten, and contains {manifest.source_prefix}"))
            continue
        data = prefix_files[entry.path]
        try:
            content, left = _rewrite(entry, data, search, new, programs)
        except rewrite.CannotRewrite as reason:
            content, left = data, ""
            unrewritable.append((entry.path, f"{reason}; {top} has {len(os.fsencode(top))}"))
        files[entry.path] = update_size(entry, content)
        warnings += [f"{entry.path}: {left}"] if left else []
    rewritten = {path: entry for path, (entry, data) in files.items() if data != prefix_files[path]}
    others = {entry.path: entry.target for entry in manifest.files if entry.type == "hard"}
    rewritten |= {path: rewritten[target] for path, target in others.items() if target in rewritten}
    for path in sorted(manifest.records, key=lambda path: path.startswith("conda-meta/")):
        entry, data = files[path]
        updated = rewrite.update_hashes(path, data, rewritten, top)
        if updated != data:
            files[path] = update_size(entry, updated)
            rewritten[path] = files[path][0]
    stale = stale_bytecode(manifest, rewritten)
    return Relocated(
        prefix=new_prefix,
        files=tuple(sorted((*files.values(), *links), key=lambda pair: pair[0].path)),
        stale_pyc=stale,
        uncompiled=uncompiled_modules(manifest, stale),
        warnings=(*warnings, *_warnings(files.values(), top)),
        unrewritable=tuple(unrewritable),
    )


def stale_bytecode(manifest: Manifest, rewritten: Container[str]) -> frozenset[str]:
    """The .pyc files whose .py file is in ``rewritten``."""
    return frozenset(
        entry.path for entry in manifest.files if entry.path.endswith(".pyc") and source_of(entry.path) in rewritten
    )


def uncompiled_modules(manifest: Manifest, stale: Container[str]) -> dict[str, str]:
    """Modules that Python would compile at every start, since a release is read-only.

    Args:
        manifest: of the bundle.
        stale: .pyc files that are not unpacked.

    Returns:
        The .py files of the standard library, ``site-packages`` and checkouts that have no .pyc file for the
        environment's Python, each with the path of that file.
    """
    version = _VERSION.match(manifest.python)
    if version is None:
        return {}
    tops = (f"lib/python{version[1]}.{version[2]}/", *(f"{target}/" for _, target in manifest.relocations if target))
    tag = f"cpython-{version[1]}{version[2]}"
    sources = [entry.path for entry in manifest.files if entry.path.endswith(".py") and entry.path.startswith(tops)]
    compiled = {entry.path for entry in manifest.files if entry.path.endswith(".pyc") and entry.path not in stale}
    # compileall reads one path from each line, and strips spaces
    lacking = {path: _bytecode_path(path, tag) for path in sources if path.splitlines() == [path.strip()]}
    return {path: cached for path, cached in lacking.items() if cached not in compiled}


def _rewrite(
    entry: Entry, data: bytes, search: Search, new: Mapping[str, str], programs: frozenset[bytes]
) -> tuple[bytes, str]:
    """The new content of a file, and why old paths remain in it; empty if none do."""
    kinds = {mark.kind for mark in entry.marks}
    if "binary" in kinds:
        room = max(mark.room for mark in entry.marks)
        return rewrite.rewrite_binary(data, search, new, room=room, path=entry.path)
    if "shebang" in kinds:
        return _rewrite_script(data, search, new, programs), ""
    return search.replace(data, new), ""


def _rewrite_script(data: bytes, search: Search, new: Mapping[str, str], programs: frozenset[bytes]) -> bytes:
    wanted = rewrite.env_program(data)
    if wanted and wanted[0] in programs:
        name, options, body = wanted
        return rewrite.write_shebang(os.fsencode(f"{new['']}/bin/") + name, options) + search.replace(body, new)
    if script := rewrite.split_script(data, search):
        program, options, body = (search.replace(part, new) for part in script)
        return rewrite.write_shebang(program, options) + body
    return search.replace(data, new)


def update_size(entry: Entry, data: bytes) -> tuple[Entry, bytes]:
    """A file's entry with the size and sha256 of its new content, and the content."""
    return replace(entry, size=len(data), sha256=hashlib.sha256(data).hexdigest()), data


def _warnings(files: Iterable[tuple[Entry, bytes]], top: str) -> Iterator[str]:
    """Warnings about scripts that need more than one plain line to start."""
    scripts = [(entry, data) for entry, data in files if any(mark.kind == "shebang" for mark in entry.marks)]
    longer = [entry.path for entry, data in scripts if rewrite.script_form(data) == "exec"]
    if longer:
        yield f"{top} is too long or contains a space: {len(longer)} Python scripts start through /bin/sh"
    for entry, data in scripts:
        if rewrite.script_form(data) == "long line":
            yield f"{entry.path}: its first line is too long for Linux before 5.1"
        elif rewrite.script_form(data) == "activated":
            yield f"{entry.path}: its first line would be too long; it starts only in the activated environment"


def _bytecode_path(path: str, tag: str) -> str:
    folder, name = posixpath.split(path)
    return f"{folder}/__pycache__/{name.removesuffix('.py')}.{tag}.pyc"
