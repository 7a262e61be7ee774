"""The code blocks of the documentation and their command lines, for the tests that parse or run them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^(?: {4}.*\n)+", re.MULTILINE)


def blocks(text: str) -> list[str]:
    """Fenced and indented blocks, in the order of the page."""
    found = [(each.start(), each[2]) for each in FENCED.finditer(text)]
    without = FENCED.sub(lambda each: "\n" * len(each[0]), text)  # places stay
    found += [(each.start(), each[0]) for each in INDENTED.finditer(without)]
    return [block for _, block in sorted(found)]


def lines(block: str) -> list[str]:
    """The lines of a block, continued ones joined, without what follows two spaces: a remark."""
    joined = re.sub(r"\\\n\s*", "", block)
    return [re.split(r"  +(?=\S)", raw.strip().removeprefix("$ "))[0] for raw in joined.splitlines()]
