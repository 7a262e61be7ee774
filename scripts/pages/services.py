#!/usr/bin/env python3
"""Writes the tables of services in docs/services.md and docs/inventory.md from provision/services.

scripts/pages/services.py          writes the tables
scripts/pages/services.py --check  fails if one differs
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from provision import services  # noqa: E402

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


def page(path: Path) -> str:
    """The page with its new table, which ends at the first line that is not a row."""
    before, mark, after = path.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        sys.exit(f"{path} lacks the line {MARK}")
    lines = after.splitlines(keepends=True)
    rows = next((number for number, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return before + mark + TABLES[path.name] + "".join(lines[rows:])


TABLES = {
    "services.md": table("what it sets up", {name: services.get(name).ABOUT for name in services.ordered()}),
    "inventory.md": table("options", {name: keys(name) for name in services.ordered()}),
}


def main() -> None:
    """Writes or checks both pages."""
    for name in TABLES:
        path = ROOT / "docs" / name
        text = page(path)
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif text != path.read_text(encoding="utf-8"):
            sys.exit(f"{path.relative_to(ROOT)} differs from provision/services: run scripts/pages/services.py")


if __name__ == "__main__":
    main()
