"""A row of the table of causes: the pattern, its meaning and the fix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

Grade = Literal["cause", "unknown", "ended", "late", "echo"]
GRADES: tuple[Grade, ...] = ("cause", "unknown", "ended", "late", "echo")  # the strongest explanation first


@dataclass(frozen=True)
class Cause:
    """One cause of a failed run.

    ``says`` and ``fix`` can use captured groups as ``{name}``. A part in ``[brackets]``, or a whole line of ``fix``, is
    omitted if one of its names was not captured.

    Attributes:
        id: ``subject.word``; stable, for ``--json`` and for links into the page.
        says: what happened, a sentence without its full stop.
        fix: what to do, the most likely fix first.
        source: the source of the pattern: a URL, or ``recorded`` and with which programs.
        lines: patterns for one line of a log.
        events: patterns for fields of one event of the agent.
        context: a pattern that one of the earlier lines of the same rank must match.
        traced: pairs of a pattern for one line and that line's own ``context``, usually a frame of its traceback.
        anywhere: the context may also be another rank's of the same node.
        several: it counts only with the logs of several nodes.
        grade: ``cause`` explains the failure. ``unknown`` is an exception without a row. ``ended``: a process or a node
            was killed from outside. ``late`` explains only without a better sign, because a failed peer causes the
            same lines. ``echo`` only follows from another failure.
        lasting: it counts even if the run continued for a while.
        alone: added to ``says`` if no other node shows it.
        differs: it counts only if the captured values differ between nodes.
        more: following lines that belong to it.
    """

    id: str
    says: str
    fix: tuple[str, ...]
    source: str
    lines: tuple[str, ...] = ()
    events: tuple[Mapping[str, str], ...] = ()
    context: str = ""
    traced: tuple[tuple[str, str], ...] = ()
    anywhere: bool = False
    several: bool = False
    grade: Grade = "cause"
    lasting: bool = False
    alone: str = ""
    differs: bool = False
    more: int = 0

    @cached_property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        """``lines``, compiled."""
        return tuple(re.compile(each) for each in self.lines)

    def read(self, text: str) -> dict[str, str] | None:
        """The captured groups of a line; None if it does not match."""
        for pattern in self.patterns:
            if found := pattern.search(text):
                return {name: value for name, value in found.groupdict().items() if value}
        return None

    def take(self, event: Mapping[str, Any]) -> dict[str, str] | None:
        """The captured groups of an event; None if it does not match."""
        for wanted in self.events:
            captured: dict[str, str] = {}
            for key, pattern in wanted.items():
                found = re.search(pattern, _text(event.get(key))) if key in event else None
                if not found:
                    break
                captured |= {name: value for name, value in found.groupdict().items() if value}
            else:
                return captured
        return None


@dataclass(frozen=True)
class Sign:
    """A match of a cause in a log or an event.

    Attributes:
        cause: the row.
        node: the node's name.
        rank: None: the launcher, or the whole node.
        time: epoch seconds of that node's clock; None if unknown.
        text: the line, or the event's text.
        captured: the captured groups.
        order: its index among the signs of its node and rank.
        more: the following lines that belong to it.
        before: the innermost frames of the Python traceback that it ends.
        place: the file and the line number; "" if unknown.
    """

    cause: Cause
    node: str
    rank: int | None = None
    time: float | None = None
    text: str = ""
    captured: Mapping[str, str] = field(default_factory=dict)
    order: int = 0
    more: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    place: str = ""

    @property
    def says(self) -> str:
        """The cause's sentence with the captured values."""
        return fill_template(self.cause.says, self.captured)

    @property
    def fix(self) -> tuple[str, ...]:
        """The cause's advice with the captured values."""
        return tuple(
            fill_template(line, self.captured)
            for line in self.cause.fix
            if all(name in self.captured for name in re.findall(r"\{(\w+)\}", re.sub(r"\[[^\[\]]*\]", "", line)))
        )


def fill_template(template: str, captured: Mapping[str, str]) -> str:
    """``says`` or a line of ``fix`` with its values; a part in brackets is omitted if one of its values is missing."""

    def part(found: re.Match[str]) -> str:
        names = re.findall(r"\{(\w+)\}", found[1])
        return found[1] if all(name in captured for name in names) else ""

    text = re.sub(r"\[([^\[\]]*)\]", part, template)
    return re.sub(r"\{(\w+)\}", lambda found: captured.get(found[1], "?"), text)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):  # why {node, rank, text}; stacks {rank: text}
        return str(value["text"]) if "text" in value else "\n".join(map(str, value.values()))
    return str(value)
