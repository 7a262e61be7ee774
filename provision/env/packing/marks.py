"""Decide how a file depends on where the environment lies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile

from provision.env.bundle.manifest import Mark
from provision.env.packing import chunks
from provision.env.relocation import shebangs
from provision.env.relocation.prefixes import Search
from provision.env.source.scan import Found

_TELLING = 16  # bytes; to look for fewer takes as long as to look for several longer ones


@dataclass(frozen=True)
class Seeking:
    """What is sought in every file.

    Attributes:
        search: the source paths.
        rooms: for binaries that conda rewrites, the length of its placeholder, by path.
        programs: names in ``bin``; a script there that asks ``/usr/bin/env`` for one of them runs only in an activated
            environment, and is therefore given its interpreter like every other.
    """

    search: Search
    rooms: Mapping[str, int] = field(default_factory=dict)
    programs: frozenset[bytes] = frozenset()

    def marks(self, found: Found, data: bytes) -> tuple[Mark, ...]:
        """How ``found``, whose content is ``data``, depends on the prefix; empty if it does not."""
        if found.type == "link":
            return self._in_target(found.target)
        if found.type in ("dir", "hard") or found.path.endswith(".pyc"):
            return ()  # Python corrects the path in a .pyc when it loads it
        at = [(match.start(), spelling.target) for match, spelling in self.search.occurrences(data)]
        return self.judged(found.path, data, at, binary=bool(at) and b"\0" in data)

    def judged(self, path: str, head: bytes, at: Iterable[tuple[int, str]], *, binary: bool) -> tuple[Mark, ...]:
        """The marks of a file.

        Args:
            path: the file.
            head: its beginning.
            at: where it holds sources: offsets and relocations' targets.
            binary: it holds a NUL byte.
        """
        record = (Mark("record"),) if chunks.is_record(path) else ()
        wanted = shebangs.env_program(head) if path.startswith("bin/") else None
        script = {Mark("shebang")} if wanted and wanted[0] in self.programs else set()
        at = tuple(at)
        if at and binary:
            room = self.rooms.get(path, 0)
            return (*sorted({Mark("binary", target, room) for _, target in at}), *record)
        end = shebangs.head_end(head) if at else 0
        kinds = {Mark("shebang" if start < end else "text", target) for start, target in at}
        return (*sorted(kinds | script), *record)

    def maybe(self, path: str, data: bytearray, begin: int, end: int) -> bool:
        """Whether a file, whose content is ``data[begin:end]``, may have marks: the fast way past nearly all."""
        if path.endswith(".pyc"):
            return False
        for text in self.texts:
            if data.find(text, begin, end) >= 0:
                return True
        return chunks.is_record(path) or (path.startswith("bin/") and data.startswith(b"#!", begin, end))

    @cached_property
    def texts(self) -> tuple[bytes, ...]:
        """What to look for first: where it is not, no source is. If all begin alike, that is their beginning."""
        texts = tuple(spelling.text for spelling in self.search.spellings)
        alike = takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False))
        common = bytes(column[0] for column in alike)
        return (common,) if len(common) >= _TELLING else texts

    def _in_target(self, target: str) -> tuple[Mark, ...]:
        """A symlink's target names the prefix where it begins with it and does not leave it by ``..`` again."""
        whole = os.fsencode(target)
        found = [one for one in self.search.occurrences(whole) if one[0].start() == 0]
        normal = os.path.normpath(whole)
        return tuple(
            Mark("link", spelling.target)
            for match, spelling in found
            if normal == match[0] or normal.startswith(match[0] + b"/")
        )
