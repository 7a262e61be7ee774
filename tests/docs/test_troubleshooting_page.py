"""docs/troubleshooting.md matches the table of causes and the rules."""

import subprocess
import sys
from pathlib import Path

from provision.diagnosis.causes import TABLE
from provision.diagnosis.conditions import RULES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"


def test_the_page_is_up_to_date():
    argv = [sys.executable, ROOT / "scripts" / "pages" / "troubleshooting.py", "--print"]
    text = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=120).stdout
    assert text == PAGE.read_text(encoding="utf-8"), "run scripts/pages/troubleshooting.py"


def test_the_page_has_every_cause_and_rule():
    headings = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("### ")]
    assert sorted(headings) == sorted(f"### {row.id}" for row in (*TABLE, *RULES))
