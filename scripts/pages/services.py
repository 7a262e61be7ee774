#!/usr/bin/env python3
"""Writes the tables of services in docs/services.md and docs/inventory.md from provision/services."""

from __future__ import annotations

import sys

from generated import ROOT, write

from provision import services

MARK = "<!-- scripts/pages/services.py writes this table from provision/services; a test compares them. -->\n\n"


def link(name: str) -> str:
    """A service's page."""
    return f"[`{name}`](services/{name}.md)"


def keys(name: str) -> str:
    """A service's options."""
    return ", ".join(f"`{key}`" for key in services.get(name).Options.model_fields) or "none"


def table(title: str, rows: dict[str, str]) -> str:
    """A row for each service."""
    return f"| service | {title} |\n|---|---|\n" + "".join(
        f"| {link(name)} | {text} |\n" for name, text in rows.items()
    )


def page(name: str) -> str:
    """The page with its new table, which ends at the first line that is not a row."""
    before, mark, after = (ROOT / name).read_text(encoding="utf-8").partition(MARK)
    if not mark:
        sys.exit(f"{name} lacks the line {MARK}")
    lines = after.splitlines(keepends=True)
    rows = next((number for number, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return before + mark + TABLES[name] + "".join(lines[rows:])


TABLES = {
    "docs/services.md": table("what it sets up", {name: services.get(name).ABOUT for name in services.ordered()}),
    "docs/inventory.md": table("options", {name: keys(name) for name in services.ordered()}),
}


if __name__ == "__main__":
    write({name: page(name) for name in TABLES})
