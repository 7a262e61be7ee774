"""Find source paths in the bytes of a file, and replace them. Pure functions over bytes.

Only a whole path matches: ``/opt/env2``, ``/opt/env.old`` and ``/data/opt/env`` are not ``/opt/env``, but
``-I/opt/env/include`` and ``file:///opt/env`` contain it. One search finds all sources, the longest first: an
environment inside a checkout does not count as part of the checkout.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from mmap import mmap
from urllib.parse import quote

# Characters of an unquoted path component: ASCII, and the first byte of a longer UTF-8 character.
_COMPONENT = rb"0-9A-Za-z_+@~\xc2-\xf4-"
_ENDS = rb"(?![" + _COMPONENT + rb"]|\.[." + _COMPONENT + rb"]|%[0-9A-Fa-f]{2})"
_INSIDE_A_PATH = re.compile(rb"(?:/[.%\x80-\xff" + _COMPONENT + rb"]+|\.)\Z")
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
        return re.compile(b"(?:" + b"|".join(re.escape(s.text) for s in self.spellings) + b")" + _ENDS)

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
    return _INSIDE_A_PATH.search(before) is not None
