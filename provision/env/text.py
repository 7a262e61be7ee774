"""Format numbers, lists and tables for lines of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 80
LABEL = 14  # columns of a line's label


def size(count: float) -> str:
    """Bytes in powers of 1000, like the sizes of disks and networks."""
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def number(count: int, one: str, many: str = "") -> str:
    """A number and its noun: ``1 file``, ``3,838 files``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def line(label: str, *parts: str) -> list[str]:
    """A label and its parts, each on a separate line. No lines without parts."""
    lines = [row for part in parts for row in _wrapped(part)]
    return [f"{label if not index else '':{LABEL}} {row}".rstrip() for index, row in enumerate(lines)]


def some(items: Sequence[str], limit: int, more: str) -> list[str]:
    """The first items, and the number of the others; ``more`` is the option that shows all."""
    if len(items) <= limit:
        return list(items)
    return [*items[:limit], f"and {len(items) - limit:,} more ({more})"]


def columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Rows of a table; the last column is not padded."""
    rows = list(rows)
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    return [
        "  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1])) for row in rows
    ]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH - LABEL - 1, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    ) or [""]
