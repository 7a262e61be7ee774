"""docs/checks.md is up to date, and has every check."""

import subprocess
import sys
from pathlib import Path

from provision import checks

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "checks.md"


def test_the_page_is_up_to_date():
    argv = [sys.executable, ROOT / "scripts" / "pages" / "checks.py", "--print"]
    text = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=120).stdout
    assert text == PAGE.read_text(encoding="utf-8"), "run scripts/pages/checks.py"


def test_the_page_has_every_check():
    headings = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("### ")]
    assert sorted(headings) == sorted(f"### {check}" for check in checks.ids())
