"""docs/troubleshooting.md matches the table of causes and the rules, docs/replays.md the replays."""

import subprocess
import sys
from pathlib import Path

import pytest

from provision.diagnosis.causes import TABLE
from provision.diagnosis.conditions import RULES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"


@pytest.mark.parametrize("name", ["troubleshooting", "replays"])
def test_the_page_is_up_to_date(name):
    argv = [sys.executable, ROOT / "scripts" / "pages" / f"{name}.py", "--print"]
    text = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=120).stdout
    assert text == PAGE.with_name(f"{name}.md").read_text(encoding="utf-8"), f"run scripts/pages/{name}.py"


def test_the_page_has_every_cause_and_rule():
    headings = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("### ")]
    assert sorted(headings) == sorted(f"### {row.id}" for row in (*TABLE, *RULES))
