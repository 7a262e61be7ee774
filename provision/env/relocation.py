"""Find source paths in the bytes of files, and rewrite them for a new prefix. Pure: bytes in, bytes out.

Text, scripts, binaries and lists of hashes are rewritten differently. Only a whole path matches: ``/opt/env2``,
``/opt/env.old`` and ``/data/opt/env`` are not ``/opt/env``, but ``-I/opt/env/include`` and ``file:///opt/env`` contain
it. One search finds all sources, the longest first: an environment inside a checkout does not count as part of the
checkout.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import posixpath
import re
from base64 import urlsafe_b64encode
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from mmap import mmap
from pathlib import PurePosixPath
from typing import Literal
from urllib.parse import quote

from provision.env.bundle.manifest import PACKAGE_FILE, Entry, Manifest
from provision.env.source import elf
from provision.env.source.environment import record_path, source_of
from provision.errors import UsageError
from trainer.agent.contract.untrusted import parse_object

# Characters of an unquoted path component: ASCII, and the first byte of a longer UTF-8 character.
_COMPONENT = rb"0-9A-Za-z_+@~\xc2-\xf4-"
ENDS = rb"(?![" + _COMPONENT + rb"]|\.[." + _COMPONENT + rb"]|%[0-9A-Fa-f]{2})"
INSIDE_A_PATH = re.compile(rb"(?:/[.%\x80-\xff" + _COMPONENT + rb"]+|\.)\Z")
_LOOK_BEHIND = 256

_FILE_URL = b"file://"

Encode = Callable[[str], bytes]


def plain(path: str) -> bytes:
    """A path unchanged."""
    return os.fsencode(path)


def url(path: str) -> bytes:
    """A path in a ``file://`` URL."""
    return quote(os.fsencode(path)).encode()


def escaped(path: str) -> bytes:
    """A path in ASCII JSON, without the quotes."""
    return json.dumps(path)[1:-1].encode()


@dataclass(frozen=True)
class Spelling:
    """One way in which files contain a source path."""

    text: bytes
    target: str
    encode: Encode


@dataclass(frozen=True)
class Search:
    """Searches for source paths.

    Attributes:
        relocations: pairs of a source path and a path relative to the prefix, as in the manifest.
    """

    relocations: tuple[tuple[str, str], ...]

    @cached_property
    def spellings(self) -> tuple[Spelling, ...]:
        """Every spelling of every source, the longest first."""
        found: dict[bytes, Spelling] = {}
        for source, target in self.relocations:
            for encode in (plain, url, escaped):
                text = encode(source)
                found.setdefault(text, Spelling(text, target, encode))
        return tuple(sorted(found.values(), key=lambda spelling: (-len(spelling.text), spelling.text)))

    @cached_property
    def _pattern(self) -> re.Pattern[bytes]:
        return re.compile(b"(?:" + b"|".join(re.escape(s.text) for s in self.spellings) + b")" + ENDS)

    @cached_property
    def _by_text(self) -> dict[bytes, Spelling]:
        return {spelling.text: spelling for spelling in self.spellings}

    def occurrences(self, data: bytes | mmap) -> Iterator[tuple[re.Match[bytes], Spelling]]:
        """Where whole source paths occur."""
        for match in self._pattern.finditer(data):
            if not _longer(match):
                yield match, self._by_text[match.group()]

    def replace(self, data: bytes, new: Mapping[str, str], *, keep_length: bool = False) -> bytes:
        """Replace every occurrence by the new path of its target.

        With ``keep_length`` a shorter path is padded with slashes, which mean nothing at the end of a folder, and a
        longer one is not written: no other byte moves, so pointers into strings stay valid.
        """

        def one(match: re.Match[bytes]) -> bytes:
            if _longer(match):
                return match.group()
            spelling = self._by_text[match.group()]
            in_url = match.string[max(0, match.start() - len(_FILE_URL)) : match.start()] == _FILE_URL
            text = (url if in_url else spelling.encode)(new[spelling.target])
            if keep_length:
                return text.ljust(len(match.group()), b"/") if len(text) <= len(match.group()) else match.group()
            return text

        return self._pattern.sub(one, data)


def _longer(match: re.Match[bytes]) -> bool:
    """Whether a match is the end of a longer path, such as ``/data`` before ``/opt/env``."""
    before = match.string[max(0, match.start() - _LOOK_BEHIND) : match.start()]
    return INSIDE_A_PATH.search(before) is not None


SHEBANG_LIMIT = 127  # bytes that Linux reads of a first line, without its end (BINPRM_BUF_SIZE before 5.1)
LATER_SHEBANG_LIMIT = 255  # the same from Linux 5.1 on

ScriptForm = Literal["line", "long line", "exec", "activated", "other"]
"""How a script starts: with a line that every Linux reads, with a line that needs Linux 5.1, through ``/bin/sh``, or
through ``/usr/bin/env`` and therefore only in an activated environment. ``other`` is not a script."""

_LINE = re.compile(rb"#![ \t]*")
_ENV = re.compile(
    rb"#![ \t]*/usr/bin/env[ \t]+(?:-S[ \t]*)?(?P<name>[^\s=/-][^\s=/]*)[ \t]*(?P<options>[^\r\n]*)(?:\r?\n|\Z)"
)
# What pip and uv (whose string ends in a third line), conda and rattler (whose string ends in a comment) write if a
# line would be too long or contain a space; Python reads it as a string.
_EXEC = re.compile(
    rb"""#!/bin/sh\n'''exec' (?P<quote>["']?)(?P<program>/[^\n"']*?)(?P=quote)(?P<options>(?: -[^ \n]+)*)"""
    rb""" "\$0" "\$@"(?:\n' '''\n| \#'''\n)"""
)


def head_end(data: bytes) -> int:
    """The end of the lines with a script's interpreter; 0 without any."""
    if match := _EXEC.match(data):
        return match.end()
    if data.startswith(b"#!"):
        return data.find(b"\n") + 1 or len(data)
    return 0


def env_program(data: bytes) -> tuple[bytes, bytes, bytes] | None:
    """The program that a script asks ``/usr/bin/env`` for, its options, and the lines after; None for other scripts."""
    match = _ENV.match(data)
    return (match["name"], match["options"].strip(), data[match.end() :]) if match else None


def split_script(data: bytes, search: Search) -> tuple[bytes, bytes, bytes] | None:
    """A script's interpreter, its options and the lines after; None if the interpreter is in no source path."""
    end = head_end(data)
    if match := _EXEC.match(data):
        ours = next(search.occurrences(match["program"]), None)
        return (match["program"], match["options"].strip(), data[end:]) if ours else None
    start = _LINE.match(data)
    first = next(search.occurrences(data[:end]), None)
    if start is None or first is None or first[0].start() != start.end():
        return None
    after = first[0].end()  # the source path may contain spaces, the rest does not
    inside, _, options = data[after:end].rstrip().partition(b" ")
    return first[0].group() + inside, options.strip(), data[end:]


def write_shebang(program: bytes, options: bytes) -> bytes:
    """The lines that start a script with ``program``.

    If one line is too long for some Linux, the path contains a space, or there are several options (Linux passes them
    as one), a Python script gets lines that ``sh`` reads as an ``exec`` and Python as a string. Other languages have no
    such form: they get a line as long as any Linux reads it, and otherwise need the activated environment.
    """
    line = b"#!" + program + (b" " + options if options else b"")
    one_line = b" " not in program and b" " not in options
    name = program.rpartition(b"/")[2]
    if len(line) <= SHEBANG_LIMIT and one_line:
        return line + b"\n"
    if name.startswith((b"python", b"pypy")):
        words = b'"%b"' % program + (b" " + options if options else b"")
        return b"#!/bin/sh\n'''exec' " + words + b' "$0" "$@"\n' + b"' '''\n"
    if len(line) <= LATER_SHEBANG_LIMIT and b" " not in program:
        return line + b"\n"
    return b"#!/usr/bin/env " + (b"-S %b %b" % (name, options) if options else name) + b"\n"


def script_form(data: bytes) -> ScriptForm:
    """How a script starts."""
    if _EXEC.match(data):
        return "exec"
    if not data.startswith(b"#!"):
        return "other"
    if _ENV.match(data):
        return "activated"
    line = data[: data.find(b"\n") + 1 or len(data)].rstrip(b"\r\n")
    return "line" if len(line) <= SHEBANG_LIMIT else "long line"


# Archives contain checksums of their parts: zip (also .pt and .npz), gzip, zstd, xz, bzip2.
_ARCHIVES = (b"PK\x03\x04", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh")

# The rest of a path that compilers put into messages (__FILE__).
_SOURCE_FILE = re.compile(rb"/[^\0\n:]*\.(?:c|cc|cpp|cxx|cu|cuh|h|hh|hpp|hxx|inl|ipp|rs|py|pyx|f90)(?=[\0\n: ])")


class CannotRewrite(ValueError):  # noqa: N818 - the message becomes a reason, not an error
    """A binary that cannot be changed; the message says why."""


def rewrite_binary(
    data: bytes, search: Search, new: Mapping[str, str], *, room: int = 0, path: str = ""
) -> tuple[bytes, str]:
    """Replace source paths in a binary without changing its size.

    In a file from conda (``room``), strings are NUL-padded to their length with conda's placeholder, and can become
    shorter or longer within that. In other files a shorter path is padded with slashes, so that the rest of its string
    does not move: linkers let strings share their ends.

    A longer path cannot be written. A path that the loader searches for libraries is replaced by a path from
    ``$ORIGIN`` (the file's folder) if that fits. Remaining old paths are an error in binaries that conda declares and
    in bytes that a program loads, unless they name a source file for messages. Elsewhere (debug information, caches,
    archives) they give a warning.

    Args:
        data: the file.
        search: the sources.
        new: the new path of each relocation's target.
        room: the length of conda's placeholder; 0 without one.
        path: the file's path, relative to the prefix; empty to write no ``$ORIGIN`` paths.

    Returns:
        The new content, and why old paths remain in it; empty if none do.

    Raises:
        CannotRewrite: an old path would remain that a program may use.
    """
    if room and (padded := _pad_strings(data, search, new, room)) is not None:
        return padded, ""
    if data.startswith(_ARCHIVES):
        return data, "it keeps the old path, since it is an archive with checksums"
    if path:
        data = _from_origin(data, search, new, path)
    too_long = [
        match
        for match, spelling in search.occurrences(data)
        if len(match[0]) < len(spelling.encode(new[spelling.target]))
    ]
    if too_long:
        reason = f"it is a binary with room for a path of {min(len(match[0]) for match in too_long)} bytes"
        if room or is_used(data, too_long):
            raise CannotRewrite(reason)
        return search.replace(data, new, keep_length=True), f"it keeps the old path in unused places: {reason}"
    return search.replace(data, new, keep_length=True), ""


def is_used(data: bytes | mmap, found: list[re.Match[bytes]]) -> bool:
    """Whether a running program may use one of the matched paths."""
    if data[:4] != elf.MAGIC:
        return False
    loaded = elf.loaded_ranges(data)
    return any(any(match.start() in part for part in loaded) and not names_source(data, match.end()) for match in found)


def names_source(data: bytes | mmap, end: int) -> bool:
    """Whether a path that ends at ``end`` continues with the name of a source file, as in compilers' messages."""
    return _SOURCE_FILE.match(data, end) is not None


def _from_origin(data: bytes, search: Search, new: Mapping[str, str], path: str) -> bytes:
    """Replace paths that the loader searches by paths from the file's folder if the new path is too long."""
    pieces = []
    done = 0
    for part in elf.run_paths(data):
        for match, spelling in search.occurrences(data):
            fits = len(spelling.encode(new[spelling.target])) <= len(match[0])
            if fits or match.start() not in part or match.start() < done:
                continue
            relative = posixpath.relpath(spelling.target or ".", posixpath.dirname(path) or ".")
            origin = os.fsencode(f"$ORIGIN/{relative}")
            if len(origin) <= len(match[0]):
                pieces += [data[done : match.start()], origin.ljust(len(match[0]), b"/")]
                done = match.end()
    return b"".join([*pieces, data[done:]])


def _pad_strings(data: bytes, search: Search, new: Mapping[str, str], room: int) -> bytes | None:
    """Rewrite C strings within the room of conda's placeholder; None if they lack that room."""
    pieces = []
    done = 0
    for match, _ in search.occurrences(data):
        start = match.start()
        if start < done:
            continue  # in the string that was just rewritten
        end = data.find(b"\0", start)
        string = data[start:end]
        spare = sum(room - len(found.group()) for found, _ in search.occurrences(string))
        rewritten = search.replace(string, new)
        capacity = len(string) + spare
        if end < 0 or spare < 0 or len(rewritten) > capacity or data[end : end + spare + 1].strip(b"\0"):
            return None
        pieces += [data[done:start], rewritten.ljust(capacity, b"\0")]
        done = start + capacity
    return b"".join([*pieces, data[done:]])


def update_hashes(path: str, data: bytes, rewritten: Mapping[str, Entry], prefix: str) -> bytes:
    """Update the hashes of rewritten files in a list; the other hashes do not change.

    Args:
        path: the path of the list.
        data: its content, already rewritten for the new prefix.
        rewritten: the new entries of rewritten files, by path.
        prefix: the new prefix; a RECORD may use it for files outside ``site-packages``.
    """
    return (
        _update_conda_meta(data, rewritten) if path.endswith(".json") else _update_record(path, data, rewritten, prefix)
    )


def _update_record(path: str, data: bytes, rewritten: Mapping[str, Entry], prefix: str) -> bytes:
    site = posixpath.dirname(posixpath.dirname(path))
    lines = []
    for line in data.decode("utf-8", "surrogateescape").splitlines(keepends=True):
        row = next(csv.reader([line]), [])
        entry = rewritten.get(record_path(row[0], site, prefix)) if len(row) == 3 and row[1] else None
        end = line[len(line.rstrip("\r\n")) :]
        lines.append(record_row(row[0], bytes.fromhex(entry.sha256), entry.size, end=end) if entry else line)
    return "".join(lines).encode("utf-8", "surrogateescape")


def record_row(name: str, sha256: bytes, size: int, *, end: str) -> str:
    """A row of a RECORD for a file; ``end`` is the line end."""
    digest = urlsafe_b64encode(sha256).rstrip(b"=").decode()
    row = io.StringIO()
    csv.writer(row, lineterminator=end).writerow([name, f"sha256={digest}", size])
    return row.getvalue()


def _update_conda_meta(data: bytes, rewritten: Mapping[str, Entry]) -> bytes:
    try:
        package = parse_object(data, limit=PACKAGE_FILE)
        listed = package["paths_data"]["paths"]
        changed = False
        for one in listed:
            entry = rewritten.get(one["_path"])
            if entry is not None and one.get("sha256_in_prefix") != entry.sha256:
                one["sha256_in_prefix"] = entry.sha256
                changed = True
    except (ValueError, KeyError, TypeError, AttributeError):
        return data  # not a package's file; conda ignores it too
    return json.dumps(package, indent=2, sort_keys=True).encode() if changed else data


# --- a bundle's files -----------------------------------------------------------------------------

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
        except CannotRewrite as reason:
            content, left = data, ""
            unrewritable.append((entry.path, f"{reason}; {top} has {len(os.fsencode(top))}"))
        files[entry.path] = update_size(entry, content)
        warnings += [f"{entry.path}: {left}"] if left else []
    rewritten = {path: entry for path, (entry, data) in files.items() if data != prefix_files[path]}
    others = {entry.path: entry.target for entry in manifest.files if entry.type == "hard"}
    rewritten |= {path: rewritten[target] for path, target in others.items() if target in rewritten}
    for path in sorted(manifest.records, key=lambda path: path.startswith("conda-meta/")):
        entry, data = files[path]
        updated = update_hashes(path, data, rewritten, top)
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
        return rewrite_binary(data, search, new, room=room, path=entry.path)
    if "shebang" in kinds:
        return _rewrite_script(data, search, new, programs), ""
    return search.replace(data, new), ""


def _rewrite_script(data: bytes, search: Search, new: Mapping[str, str], programs: frozenset[bytes]) -> bytes:
    wanted = env_program(data)
    if wanted and wanted[0] in programs:
        name, options, body = wanted
        return write_shebang(os.fsencode(f"{new['']}/bin/") + name, options) + search.replace(body, new)
    if script := split_script(data, search):
        program, options, body = (search.replace(part, new) for part in script)
        return write_shebang(program, options) + body
    return search.replace(data, new)


def update_size(entry: Entry, data: bytes) -> tuple[Entry, bytes]:
    """A file's entry with the size and sha256 of its new content, and the content."""
    return replace(entry, size=len(data), sha256=hashlib.sha256(data).hexdigest()), data


def _warnings(files: Iterable[tuple[Entry, bytes]], top: str) -> Iterator[str]:
    """Warnings about scripts that need more than one plain line to start."""
    scripts = [(entry, data) for entry, data in files if any(mark.kind == "shebang" for mark in entry.marks)]
    longer = [entry.path for entry, data in scripts if script_form(data) == "exec"]
    if longer:
        yield f"{top} is too long or contains a space: {len(longer)} Python scripts start through /bin/sh"
    for entry, data in scripts:
        if script_form(data) == "long line":
            yield f"{entry.path}: its first line is too long for Linux before 5.1"
        elif script_form(data) == "activated":
            yield f"{entry.path}: its first line would be too long; it starts only in the activated environment"


def _bytecode_path(path: str, tag: str) -> str:
    folder, name = posixpath.split(path)
    return f"{folder}/__pycache__/{name.removesuffix('.py')}.{tag}.pyc"
