"""Matches lines with the table of causes. It is fast: logs have tens of thousands of lines, the table hundreds of rows.

Every match of most patterns contains some plain text. Searching for that text first takes a tenth of the time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from provision.diagnosis.cause import Cause
from provision.diagnosis.causes import TABLE


def needed(pattern: str) -> str:
    """The longest plain text that every match of a pattern contains; "" if there is none.

    It looks only outside of groups and character classes, at text that is not repeated or optional.
    """
    if "(?i" in pattern:
        return ""
    parts: list[str] = [""]  # pieces of plain text, split at everything else
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
    """The rows that match a line, in the table's order, with the captured groups; without rows that compare nodes."""
    last = None
    for plain, pattern, cause in _PATTERNS:
        if plain in text and cause is not last and (found := pattern.search(text)):
            last = cause
            yield cause, {name: value for name, value in found.groupdict().items() if value}


def rows_of(event: Mapping[str, Any]) -> Iterator[tuple[Cause, dict[str, str]]]:
    """The rows that match an event."""
    for cause in _OF_EVENTS:
        if (captured := cause.take(event)) is not None:
            yield cause, captured
