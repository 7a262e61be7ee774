"""Find source paths in the bytes of a file, and replace them. Pure functions over bytes.

A path counts only where it is whole: ``/opt/env2``, ``/opt/env.old`` and ``/data/opt/env`` are not ``/opt/env``, while
``-I/opt/env/include`` and ``file:///opt/env`` hold it. All sources are sought at once, the longest first, so that an
environment inside a checkout is not taken for a part of the checkout.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import quote

from provision.env.manifest import Mark

# What may stand in a path component without quotes: ASCII, and the first byte of a longer UTF-8 character.
_COMPONENT = rb"0-9A-Za-z_+@~\xc2-\xf4-"
_ENDS = rb"(?![" + _COMPONENT + rb"]|\.[." + _COMPONENT + rb"]|%[0-9A-Fa-f]{2})"
_INSIDE_A_PATH = re.compile(rb"/[.%\x80-\xff" + _COMPONENT + rb"]+\Z")
_LOOK_BEHIND = 256

_SHEBANG = re.compile(rb"#![ \t]*")
_ENV_PYTHON = re.compile(rb"#![ \t]*/usr/bin/env[ \t]+(python[0-9.]*)[ \t]*(?=\n|\r\n|\Z)")
# What pip and conda write where a shebang would be too long or hold a space; Python takes it for a string.
_EXEC = re.compile(
    rb"""#!/bin/sh\n'''exec' (?P<quote>["']?)(?P<program>/[^\n"']*?)(?P=quote)(?P<options>(?: -[^ \n]+)*)"""
    rb""" "\$0" "\$@"\n' '''\n"""
)
# Archives with check sums inside: a change would break them.
_ARCHIVES = (b"PK\x03\x04", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh")

SHEBANG_LIMIT = 127  # bytes that Linux reads of a first line, without its end (BINPRM_BUF_SIZE before 5.1)

Encode = Callable[[str], bytes]


def plain(path: str) -> bytes:
    """A path as itself."""
    return os.fsencode(path)


def url(path: str) -> bytes:
    """A path as in a ``file://`` URL."""
    return quote(os.fsencode(path)).encode()


def escaped(path: str) -> bytes:
    """A path as in ASCII JSON, without the quotes."""
    return json.dumps(path)[1:-1].encode()


@dataclass(frozen=True)
class Spelling:
    """One way in which files write a source path."""

    text: bytes
    target: str
    encode: Encode


@dataclass(frozen=True)
class Search:
    """The sources that are sought.

    Attributes:
        relocations: pairs of source path and path relative to the prefix, as in the manifest.
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
        return re.compile(b"(?:" + b"|".join(re.escape(s.text) for s in self.spellings) + b")" + _ENDS)

    @cached_property
    def _by_text(self) -> dict[bytes, Spelling]:
        return {spelling.text: spelling for spelling in self.spellings}

    @cached_property
    def overlap(self) -> int:
        """Bytes that two windows on a large file must share so that no occurrence is missed."""
        return max(len(spelling.text) for spelling in self.spellings) + _LOOK_BEHIND

    def maybe(self, data: bytes) -> bool:
        """Whether a source occurs at all: the fast way past nearly every file."""
        return any(spelling.text in data for spelling in self.spellings)

    def occurrences(self, data: bytes) -> Iterator[tuple[re.Match[bytes], Spelling]]:
        """Where sources occur whole."""
        for match in self._pattern.finditer(data):
            if not _longer(match):
                yield match, self._by_text[match.group()]

    def replace(self, data: bytes, new: Mapping[str, str], *, keep_length: bool = False) -> bytes:
        """Replace every occurrence by the new path of its target.

        With ``keep_length`` a shorter path is filled up with slashes, which mean nothing at the end of a folder's name:
        every other byte keeps its place, and with it whatever points into the middle of a string.
        """

        def one(match: re.Match[bytes]) -> bytes:
            if _longer(match):
                return match.group()
            spelling = self._by_text[match.group()]
            text = spelling.encode(new[spelling.target])
            return text.ljust(len(match.group()), b"/") if keep_length else text

        return self._pattern.sub(one, data)

    def marks(self, data: bytes, *, room: int = 0, programs: frozenset[bytes] = frozenset()) -> tuple[Mark, ...]:
        """How a file holds the sources; empty if it does not.

        Args:
            data: the file's content.
            room: the length of conda's placeholder in a file that conda rewrites as a binary.
            programs: names in ``bin``; a script of that folder that asks ``/usr/bin/env`` for a Python among them
                is marked too, since it runs only in an activated environment.
        """
        if programs and (match := _ENV_PYTHON.match(data)) and match[1] in programs:
            return (Mark("shebang"),)
        if not self.maybe(data):
            return ()
        found = list(self.occurrences(data))
        if b"\0" in data:
            return _unique(Mark("binary", spelling.target, room) for _, spelling in found)
        head = head_end(data)
        return _unique(Mark("shebang" if m.start() < head else "text", s.target) for m, s in found)


def is_archive(data: bytes) -> bool:
    """Whether a file is of a kind that carries check sums of its parts."""
    return data.startswith(_ARCHIVES)


def head_end(data: bytes) -> int:
    """Where the lines that name a script's interpreter end; 0 if it has none."""
    if match := _EXEC.match(data):
        return match.end()
    if data.startswith(b"#!"):
        return data.find(b"\n") + 1 or len(data)
    return 0


def split_shebang(data: bytes, search: Search) -> tuple[bytes, bytes, bytes] | None:
    """The interpreter of a script, its options and the lines after; None if it is not one of the environment's."""
    if match := _EXEC.match(data):
        ours = any(True for _ in search.occurrences(match["program"]))
        return (match["program"], match["options"].strip(), data[match.end() :]) if ours else None
    start = _SHEBANG.match(data)
    first = next(search.occurrences(data[: head_end(data)]), None)
    if start is None or first is None or first[0].start() != start.end():
        return None
    end = head_end(data)
    line = data[:end].rstrip(b"\r\n")
    rest = line[first[0].end() :].split(None, 1) if line[first[0].end() :] else []
    program = first[0].group() + (rest[0] if rest else b"")
    return program, rest[1].strip() if len(rest) > 1 else b"", data[end:]


def env_python(data: bytes) -> tuple[bytes, bytes] | None:
    """The Python that a script wants from ``/usr/bin/env`` and the lines after; None if it does not."""
    if match := _ENV_PYTHON.match(data):
        return match[1], data[head_end(data) :]
    return None


def shebang(program: bytes, options: bytes) -> bytes:
    """The first line, or lines, that start a script with ``program``.

    Where one line would be too long for Linux or the path holds a space, a Python script gets the form that ``sh``
    reads as an ``exec`` and Python as a string. Other languages have no such form and keep the plain line.
    """
    line = b"#!" + program + (b" " + options if options else b"")
    if fits(line, program) or not program.rpartition(b"/")[2].startswith((b"python", b"pypy")):
        return line + b"\n"
    words = b'"%b"' % program + (b" " + options if options else b"")
    return b"#!/bin/sh\n'''exec' " + words + b' "$0" "$@"\n' + b"' '''\n"


def fits(line: bytes, program: bytes) -> bool:
    """Whether Linux can start a script with this first line, which names ``program``."""
    return len(line) <= SHEBANG_LIMIT and b" " not in program


def _longer(match: re.Match[bytes]) -> bool:
    """Whether what was found is the end of a longer path: ``/data`` before ``/opt/env``."""
    before = match.string[max(0, match.start() - _LOOK_BEHIND) : match.start()]
    return _INSIDE_A_PATH.search(before) is not None


def _unique(marks: Iterable[Mark]) -> tuple[Mark, ...]:
    return tuple(sorted(set(marks)))
