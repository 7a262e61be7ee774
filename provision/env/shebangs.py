"""The lines that name a script's interpreter: read them, and write them for another prefix."""

from __future__ import annotations

import re

from provision.env.prefixes import Search

LIMIT = 127  # bytes that Linux reads of a first line, without its end (BINPRM_BUF_SIZE before 5.1)

_LINE = re.compile(rb"#![ \t]*")
_ENV_PYTHON = re.compile(rb"#![ \t]*/usr/bin/env[ \t]+(python[0-9.]*)[ \t]*(?:\r?\n|\Z)")
# What pip, conda and uv write where a shebang would be too long or hold a space; Python takes it for a string.
_EXEC = re.compile(
    rb"""#!/bin/sh\n'''exec' (?P<quote>["']?)(?P<program>/[^\n"']*?)(?P=quote)(?P<options>(?: -[^ \n]+)*)"""
    rb""" "\$0" "\$@"\n' '''\n"""
)


def head_end(data: bytes) -> int:
    """Where the lines that name a script's interpreter end; 0 if it has none."""
    if match := _EXEC.match(data):
        return match.end()
    if data.startswith(b"#!"):
        return data.find(b"\n") + 1 or len(data)
    return 0


def env_python(data: bytes) -> tuple[bytes, bytes] | None:
    """The Python that a script wants from ``/usr/bin/env``, and the lines after; None for any other script."""
    match = _ENV_PYTHON.match(data)
    return (match[1], data[match.end() :]) if match else None


def split(data: bytes, search: Search) -> tuple[bytes, bytes, bytes] | None:
    """A script's interpreter, its options and the lines after; None if the interpreter lies at no source."""
    end = head_end(data)
    if match := _EXEC.match(data):
        ours = next(search.occurrences(match["program"]), None)
        return (match["program"], match["options"].strip(), data[end:]) if ours else None
    start = _LINE.match(data)
    first = next(search.occurrences(data[:end]), None)
    if start is None or first is None or first[0].start() != start.end():
        return None
    after = first[0].end()  # the source itself may hold spaces, what follows it does not
    inside, _, options = data[after:end].rstrip().partition(b" ")
    return first[0].group() + inside, options.strip(), data[end:]


def write(program: bytes, options: bytes) -> bytes:
    """The line, or lines, that start a script with ``program``.

    Where one line would be too long for Linux or the path holds a space, a Python script gets the form that ``sh``
    reads as an ``exec`` and Python as a string. Other languages have no such form and keep the plain line.
    """
    line = b"#!" + program + (b" " + options if options else b"")
    fits = len(line) <= LIMIT and b" " not in program
    if fits or not program.rpartition(b"/")[2].startswith((b"python", b"pypy")):
        return line + b"\n"
    words = b'"%b"' % program + (b" " + options if options else b"")
    return b"#!/bin/sh\n'''exec' " + words + b' "$0" "$@"\n' + b"' '''\n"


def is_exec(data: bytes) -> bool:
    """Whether a script starts by way of ``/bin/sh``."""
    return _EXEC.match(data) is not None


def starts(data: bytes, prefix: bytes) -> bool:
    """Whether Linux can read the first line of a script whose interpreter lies beneath ``prefix``."""
    line = data[: data.find(b"\n") + 1 or len(data)].rstrip(b"\r\n")
    return prefix not in line or (len(line) <= LIMIT and b" " not in prefix)
