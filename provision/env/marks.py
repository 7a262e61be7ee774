"""Decide how a file depends on where the environment lies."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from provision.env import chunks, shebangs
from provision.env.manifest import Mark
from provision.env.prefixes import Search
from provision.env.scan import Found


@dataclass(frozen=True)
class Seeking:
    """What is sought in every file.

    Attributes:
        search: the source paths.
        rooms: for binaries that conda rewrites, the length of its placeholder, by path.
        programs: names in ``bin``; a script there that asks ``/usr/bin/env`` for a Python among them runs only in an
            activated environment, and is therefore given its interpreter like every other.
    """

    search: Search
    rooms: Mapping[str, int] = field(default_factory=dict)
    programs: frozenset[bytes] = frozenset()

    def marks(self, found: Found, data: bytes) -> tuple[Mark, ...]:
        """How ``found``, whose content is ``data``, depends on the prefix; empty if it does not."""
        if found.type == "link":
            occurrences = self.search.occurrences(os.fsencode(found.target))
            return tuple(Mark("link", spelling.target) for _, spelling in occurrences)
        if found.type == "dir" or found.path.endswith(".pyc"):
            return ()  # Python corrects the path in a .pyc when it loads it
        record = (Mark("record"),) if chunks.is_record(found.path) else ()
        return (*self._in_content(found.path, data), *record)

    def _in_content(self, path: str, data: bytes) -> tuple[Mark, ...]:
        if path.startswith("bin/") and (python := shebangs.env_python(data)) and python[0] in self.programs:
            return (Mark("shebang"),)
        if not self.search.maybe(data):
            return ()
        found = list(self.search.occurrences(data))
        if b"\0" in data:
            room = self.rooms.get(path, 0)
            return tuple(sorted({Mark("binary", spelling.target, room) for _, spelling in found}))
        head = shebangs.head_end(data)
        return tuple(sorted({Mark("shebang" if at.start() < head else "text", one.target) for at, one in found}))
