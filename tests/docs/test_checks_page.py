"""docs/checks.md has every check."""

from pathlib import Path

from provision import checks

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "checks.md"


def test_the_page_has_every_check():
    headings = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("### ")]
    assert sorted(headings) == sorted(f"### {check}" for check in checks.ids())
