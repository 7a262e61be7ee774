"""Finish unpacking this environment: rewrite the files that contain its prefix.

``export`` writes this program to archives as ``bin/conda-unpack`` instead of conda-pack's, and fills in the tables
below. It runs with the archive's Python and uses only the standard library.

Improvements over conda-pack's: only files that contain the prefix are listed; scripts get the absolute path of their
interpreter and start without ``activate``; binaries without room for the prefix are reported before any file is
written; hashes in RECORD and conda-meta are updated; it can run again after an interruption.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import os
import posixpath
import re
import stat
import sys
from base64 import urlsafe_b64encode
from urllib.parse import quote

# (path, placeholder of the prefix, "text" or "binary"), as in conda-pack
_prefix_records: list[tuple[str, str, str]] = []
# (path, program): scripts that ask /usr/bin/env for a program of bin/
_script_records: list[tuple[str, str]] = []
# RECORD files, then conda-meta files: they list hashes of other files
_hash_records: list[str] = []
# binaries that also work with the old prefix if the new one is too long for them
_spare_records: list[str] = []
# the prefix where the environment was packed
_source_prefix = ""
# the beginning of placeholders with room for longer prefixes
_placeholder = ""
_version = ""

LIMIT = 127  # bytes that Linux reads of a first line, without its end (BINPRM_BUF_SIZE before 5.1)
LATER_LIMIT = 255  # the same from Linux 5.1 on
ENV = re.compile(rb"#![ \t]*/usr/bin/env[ \t]+(?:-S[ \t]*)?([^\s=/-][^\s=/]*)[ \t]*([^\r\n]*)(?:\r?\n|\Z)")
PREFIX = re.compile(rb"/[^\x00-\x1f\x7f\"'`$\\:;&|<>()*?\[\]{}#!~]+\Z")

# Only whole paths match: /opt/env2, /opt/env.old and /data/opt/env are not /opt/env.
_COMPONENT = rb"0-9A-Za-z_+@~\xc2-\xf4-"
ENDS = rb"(?![" + _COMPONENT + rb"]|\.[." + _COMPONENT + rb"]|%[0-9A-Fa-f]{2})"
INSIDE_A_PATH = re.compile(rb"(?:/[.%\x80-\xff" + _COMPONENT + rb"]+|\.)\Z")


def unpack(prefix: bytes) -> None:
    """Rewrite every file that contains the prefix.

    Raises:
        SystemExit: the new prefix does not fit into scripts or binaries; no file was changed.
    """
    if not PREFIX.match(prefix):
        sys.exit(
            f"conda-unpack: {os.fsdecode(prefix)!r} cannot be a prefix: it has special characters; move the folder"
        )
    spare = set(_spare_records)
    tight = [record for record in _prefix_records if record[2] == "binary" and len(prefix) > len(_bytes(record[1]))]
    if needed := [f"  {path}: {len(_bytes(old))} bytes" for path, old, _ in tight if path not in spare]:
        sys.exit(
            f"conda-unpack: {os.fsdecode(prefix)} has {len(prefix)} bytes; these files have no room for it:\n"
            + "\n".join(needed)
        )
    for path, old, mode in _prefix_records:
        if (path, old, mode) in tight:
            continue
        data = _read(prefix, path)
        rewrite = _text if mode == "text" else padded if _placeholder and old.startswith(_placeholder) else _in_place
        _replace(prefix, path, data, rewrite(data, _bytes(old), prefix))
    for path, program in _script_records:
        data = _read(prefix, path)
        wanted = ENV.match(data)
        if wanted and wanted[1] == _bytes(program):
            head = write_shebang(prefix + b"/bin/" + wanted[1], wanted[2].strip())
            _replace(prefix, path, data, head + data[wanted.end() :])
    _update_hashes(prefix)


def _text(data: bytes, old: bytes, new: bytes) -> bytes:
    """Rewrite a text file, and the first line of a script so that Linux can read it."""
    line, _, rest = data.partition(b"\n")
    head = b""
    if line.startswith(b"#!" + old + b"/"):
        program, _, options = line[2:].partition(b" ")
        head, data = write_shebang(program.replace(old, new), options.replace(old, new)), rest
    return head + in_text(data, old, new)


def in_text(data: bytes, old: bytes, new: bytes) -> bytes:
    """Replace the prefix in text; in URLs it is quoted."""
    return data.replace(b"file://" + old, b"file://" + quote(new).encode()).replace(old, new)


def write_shebang(program: bytes, options: bytes) -> bytes:
    """The lines that start a script; sh runs the second form, and Python reads it as a string."""
    line = b"#!" + program + (b" " + options if options else b"")
    name = program.rpartition(b"/")[2]
    if len(line) <= LIMIT and b" " not in program and b" " not in options:
        return line + b"\n"
    if name.startswith((b"python", b"pypy")):
        words = b'"' + program + b'"' + (b" " + options if options else b"")
        return b"#!/bin/sh\n'''exec' " + words + b' "$0" "$@"\n' + b"' '''\n"
    if len(line) <= LATER_LIMIT and b" " not in program:
        return line + b"\n"
    return b"#!/usr/bin/env " + (b"-S " + name + b" " + options if options else name) + b"\n"


def padded(data: bytes, old: bytes, new: bytes) -> bytes:
    """Replace the prefix in NUL-terminated strings of a binary; the rest of a string moves (conda's way)."""

    def one(match: re.Match[bytes]) -> bytes:
        return match[0].replace(old, new).ljust(len(match[0]), b"\0")

    return re.sub(re.escape(old) + rb"[^\0]*\0", one, data)


def _in_place(data: bytes, old: bytes, new: bytes) -> bytes:
    """Replace the prefix in a binary without moving bytes: a shorter prefix is padded with slashes."""

    def one(match: re.Match[bytes]) -> bytes:
        inside = INSIDE_A_PATH.search(data[max(0, match.start() - 256) : match.start()])
        return match[0] if inside else new.ljust(len(old), b"/")

    return re.sub(re.escape(old) + ENDS, one, data)


def _update_hashes(prefix: bytes) -> None:
    """Update the hashes of rewritten files in RECORD files and conda-meta."""
    paths = [path for path, _, _ in _prefix_records] + [path for path, _ in _script_records]
    rewritten = {path: _hash(_read(prefix, path)) for path in paths if path not in _hash_records}
    for path in _hash_records:
        data = _read(prefix, path)
        updated = _conda_meta(data, rewritten) if path.endswith(".json") else _record(path, data, rewritten, prefix)
        _replace(prefix, path, data, updated)
        if updated != data or path in paths:
            rewritten[path] = _hash(updated)


def _record(path: str, data: bytes, rewritten: dict[str, tuple[bytes, int]], prefix: bytes) -> bytes:
    site = posixpath.join(os.fsdecode(prefix), posixpath.dirname(posixpath.dirname(path)))
    lines = []
    for line in data.decode("utf-8", "surrogateescape").splitlines(keepends=True):
        row = next(csv.reader([line]), [])
        listed = posixpath.relpath(posixpath.join(site, row[0]), os.fsdecode(prefix)) if len(row) == 3 else ""
        if listed in rewritten and row[1]:
            digest, size = rewritten[listed]
            text = urlsafe_b64encode(digest).rstrip(b"=").decode()
            buffer = io.StringIO()
            end = line[len(line.rstrip("\r\n")) :]
            csv.writer(buffer, lineterminator=end).writerow([row[0], f"sha256={text}", size])
            line = buffer.getvalue()  # noqa: PLW2901 - the row's new text
        lines.append(line)
    return "".join(lines).encode("utf-8", "surrogateescape")


def _conda_meta(data: bytes, rewritten: dict[str, tuple[bytes, int]]) -> bytes:
    try:
        package = json.loads(data)
        changed = False
        for one in package["paths_data"]["paths"]:
            digest = rewritten[one["_path"]][0].hex() if one["_path"] in rewritten else None
            if digest and one.get("sha256_in_prefix") != digest:
                one["sha256_in_prefix"] = digest
                changed = True
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return data  # not a package's file
    return json.dumps(package, indent=2, sort_keys=True).encode() if changed else data


def _hash(data: bytes) -> tuple[bytes, int]:
    return hashlib.sha256(data).digest(), len(data)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _read(prefix: bytes, path: str) -> bytes:
    with open(prefix + b"/" + _bytes(path), "rb") as file:  # noqa: PTH123 - the name is bytes
        return file.read()


def _replace(prefix: bytes, path: str, old: bytes, new: bytes) -> None:
    """Replace a file with one rename: it may be running, and this program may be interrupted."""
    if old == new:
        return
    name = prefix + b"/" + _bytes(path)
    folder, temporary = os.path.dirname(name), name + b".conda-unpack"  # noqa: PTH120
    mode = stat.S_IMODE(os.stat(name).st_mode)  # noqa: PTH116
    folder_mode = stat.S_IMODE(os.stat(folder).st_mode)  # noqa: PTH116
    locked = not os.access(folder, os.W_OK)
    if locked:
        os.chmod(folder, folder_mode | stat.S_IWUSR)  # noqa: PTH101
    try:
        with open(temporary, "wb") as file:  # noqa: PTH123
            file.write(new)
        os.chmod(temporary, mode)  # noqa: PTH101
        os.replace(temporary, name)  # noqa: PTH105
    finally:
        if locked:
            os.chmod(folder, folder_mode)  # noqa: PTH101


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="conda-unpack", description="Finish unpacking this environment.")
    parser.add_argument("--version", action="version", version=f"conda-unpack of clusterctl {_version}")
    parser.add_argument("--verbose", "-v", action="store_true", help="ignored, for compatibility with conda-pack")
    parser.parse_args()
    # Symlinks in the path of the folder stay.
    top = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    try:
        unpack(os.fsencode(top))
    except OSError as error:
        sys.exit(f"conda-unpack: {error}")
