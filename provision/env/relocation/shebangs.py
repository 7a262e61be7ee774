"""The lines with a script's interpreter: read them, and write them for another prefix."""

from __future__ import annotations

import re
from typing import Literal

from provision.env.relocation.prefixes import Search

LIMIT = 127  # bytes that Linux reads of a first line, without its end (BINPRM_BUF_SIZE before 5.1)
LATER_LIMIT = 255  # the same from Linux 5.1 on

Form = Literal["line", "long line", "exec", "activated", "other"]
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


def split(data: bytes, search: Search) -> tuple[bytes, bytes, bytes] | None:
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


def write(program: bytes, options: bytes) -> bytes:
    """The lines that start a script with ``program``.

    If one line is too long for some Linux, the path contains a space, or there are several options (Linux passes them
    as one), a Python script gets lines that ``sh`` reads as an ``exec`` and Python as a string. Other languages have no
    such form: they get a line as long as any Linux reads it, and otherwise need the activated environment.
    """
    line = b"#!" + program + (b" " + options if options else b"")
    one_line = b" " not in program and b" " not in options
    name = program.rpartition(b"/")[2]
    if len(line) <= LIMIT and one_line:
        return line + b"\n"
    if name.startswith((b"python", b"pypy")):
        words = b'"%b"' % program + (b" " + options if options else b"")
        return b"#!/bin/sh\n'''exec' " + words + b' "$0" "$@"\n' + b"' '''\n"
    if len(line) <= LATER_LIMIT and b" " not in program:
        return line + b"\n"
    return b"#!/usr/bin/env " + (b"-S %b %b" % (name, options) if options else name) + b"\n"


def form(data: bytes) -> Form:
    """How a script starts."""
    if _EXEC.match(data):
        return "exec"
    if not data.startswith(b"#!"):
        return "other"
    if _ENV.match(data):
        return "activated"
    line = data[: data.find(b"\n") + 1 or len(data)].rstrip(b"\r\n")
    return "line" if len(line) <= LIMIT else "long line"
