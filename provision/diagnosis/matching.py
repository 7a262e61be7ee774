"""Looks a line up in the table of causes, fast: logs have ten thousands of lines, and the table hundreds of patterns.

Most patterns hold some plain text that every match has. To look for that text first costs a tenth of the pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from provision.diagnosis.cause import Cause
from provision.diagnosis.causes import TABLE


def needed(pattern: str) -> str:
    """The longest plain text that every match of a pattern holds; "" where none is to be seen.

    Only what stands outside of groups and character classes, and is not repeated or optional, is looked at.
    """
    if "(?i" in pattern:
        return ""
    parts: list[str] = [""]  # runs of plain text; a new one begins at whatever is none
    depth = place = 0
    while place < len(pattern):
        sign = pattern[place]
        if sign == "|" and depth == 0:
            return ""
        plain = ""
        step = 1
        if sign == "\\":
            plain, step = ("" if pattern[place + 1].isalnum() else pattern[place + 1]), 2
        elif sign == "[":
            step = pattern.index("]", place + 2) + 1 - place
        elif sign in "?*{":
            parts[-1] = parts[-1][:-1]
            step = pattern.index("}", place) + 1 - place if sign == "{" else 1
        elif sign in "()":
            depth += 1 if sign == "(" else -1
        elif sign not in ".^$+|":
            plain = sign
        if plain and depth == 0:
            parts[-1] += plain
        else:
            parts.append("")
        place += step
    return max(parts, key=len)


_PATTERNS = tuple(
    (needed(source), re.compile(source), cause) for cause in TABLE if not cause.differs for source in cause.lines
)
_OF_EVENTS = tuple(cause for cause in TABLE if cause.events)
COMPARING = tuple(cause for cause in TABLE if cause.differs)


def rows(text: str) -> Iterator[tuple[Cause, dict[str, str]]]:
    """The rows that know a line, in the order of the table, with what they capture; not those that compare nodes."""
    last = None
    for plain, pattern, cause in _PATTERNS:
        if plain in text and cause is not last and (found := pattern.search(text)):
            last = cause
            yield cause, {name: value for name, value in found.groupdict().items() if value}


def rows_of(event: Mapping[str, Any]) -> Iterator[tuple[Cause, dict[str, str]]]:
    """The rows that know an event."""
    for cause in _OF_EVENTS:
        if (captured := cause.take(event)) is not None:
            yield cause, captured
