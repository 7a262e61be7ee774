"""A row of the table of causes: what is looked for, what it means, and what mends it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

Grade = Literal["cause", "unknown", "ended", "late", "echo"]
GRADES: tuple[Grade, ...] = ("cause", "unknown", "ended", "late", "echo")  # what explains more comes first


@dataclass(frozen=True)
class Cause:
    """One thing that makes a run fail.

    ``says`` and ``fix`` may name what the patterns captured as ``{name}``. A part in ``[brackets]``, or a whole line of
    ``fix``, that names something which was not captured is left out.

    Attributes:
        id: ``subject.word``; stable, for ``--json`` and for links into the page.
        says: what happened, a sentence without its full stop.
        fix: what to do, the first thing first.
        source: where the text that is looked for is from: a URL, or ``recorded`` and with what.
        lines: patterns over one line of a log.
        events: patterns over fields of one event of the agent.
        context: a pattern of which one of the lines before it, of the same rank, must hold.
        grade: ``cause`` explains by itself. ``unknown`` is an exception that no row knows. ``ended``: a process or a
            node was ended from outside. ``late`` explains when nothing better is seen: a peer that failed gives the
            same picture. ``echo`` only says that others failed.
        lasting: it counts although the run went on for a while.
        alone: said in addition when no other node shows it.
        differs: it counts only where the captured values differ between nodes.
        more: lines after it that belong to what it says.
    """

    id: str
    says: str
    fix: tuple[str, ...]
    source: str
    lines: tuple[str, ...] = ()
    events: tuple[Mapping[str, str], ...] = ()
    context: str = ""
    grade: Grade = "cause"
    lasting: bool = False
    alone: str = ""
    differs: bool = False
    more: int = 0

    @cached_property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        """``lines``, compiled."""
        return tuple(re.compile(each) for each in self.lines)

    @cached_property
    def around(self) -> re.Pattern[str]:
        """``context``, compiled."""
        return re.compile(self.context)

    def read(self, text: str) -> dict[str, str] | None:
        """What a line captures; None when it does not match."""
        for pattern in self.patterns:
            if found := pattern.search(text):
                return {name: value for name, value in found.groupdict().items() if value}
        return None

    def take(self, event: Mapping[str, Any]) -> dict[str, str] | None:
        """What an event captures; None when it does not match."""
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
    """A cause that was seen somewhere.

    Attributes:
        cause: the row.
        node: where.
        rank: None: the launcher, or the node as a whole.
        time: epoch seconds of that node's clock; None where nothing tells.
        text: the line, or what the event said.
        captured: values by the names that the patterns give them.
        order: its place among the signs of its node and rank.
        more: the lines after it that belong to it.
        before: the last frames of the Python traceback that it ends.
        place: the file and the number of the line, as a person opens them; "" where nothing tells it.
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
        return filled(self.cause.says, self.captured)

    @property
    def fix(self) -> tuple[str, ...]:
        """The cause's advice with the captured values."""
        return tuple(
            filled(line, self.captured)
            for line in self.cause.fix
            if all(name in self.captured for name in re.findall(r"\{(\w+)\}", re.sub(r"\[[^\[\]]*\]", "", line)))
        )


def filled(template: str, captured: Mapping[str, str]) -> str:
    """``says`` or a line of ``fix`` with its values; parts in brackets only where their values are there."""

    def part(found: re.Match[str]) -> str:
        names = re.findall(r"\{(\w+)\}", found[1])
        return found[1] if all(name in captured for name in names) else ""

    text = re.sub(r"\[([^\[\]]*)\]", part, template)
    return re.sub(r"\{(\w+)\}", lambda found: captured.get(found[1], "?"), text)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):  # why {node, rank, text}; stacks {rank: text}
        return str(value["text"]) if "text" in value else "\n".join(map(str, value.values()))
    return str(value)
