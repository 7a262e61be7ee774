"""Every generated page is up to date."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted((ROOT / "scripts" / "pages").glob("*.py"))


@pytest.mark.parametrize("program", [each for each in PROGRAMS if each.stem != "generated"], ids=lambda path: path.stem)
def test_the_page_is_up_to_date(program):
    argv = [sys.executable, program, "--check"]
    result = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_a_page_that_differs_is_named(tmp_path):
    work = tmp_path / "scripts" / "pages"
    work.mkdir(parents=True)
    (work / "generated.py").write_text(PROGRAMS[0].with_name("generated.py").read_text(encoding="utf-8"))
    (work / "x.py").write_text("from generated import write\nwrite({'page.md': 'new'})\n")
    (tmp_path / "page.md").write_text("old")
    argv = [sys.executable, work / "x.py"]
    result = subprocess.run([*argv, "--check"], check=False, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (1, "page.md is not up to date: run scripts/pages/x.py\n")
    subprocess.run(argv, check=True, timeout=60)
    assert (tmp_path / "page.md").read_text() == "new"
    subprocess.run([*argv, "--check"], check=True, timeout=60)
