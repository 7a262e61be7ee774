"""docs/troubleshooting.md has every cause and every rule."""

from pathlib import Path

from provision.diagnosis.causes import TABLE
from provision.diagnosis.conditions import RULES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"


def test_the_page_has_every_cause_and_rule():
    headings = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("### ")]
    assert sorted(headings) == sorted(f"### {row.id}" for row in (*TABLE, *RULES))
