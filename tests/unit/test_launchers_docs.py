"""docs/launchers.md has every variable that a run is given, and none that it is not."""

from __future__ import annotations

import json
import re
from pathlib import Path

from provision.launchers import UNSET, filled
from trainer.agent.contract.plan import from_object

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/launchers.md").read_text(encoding="utf-8")
GOLDEN = sorted((ROOT / "tests/golden/launchers").glob("*.json"))


def documented():
    table = PAGE.split("## The environment of a run")[1].split("Removed from")[0]
    rows = re.findall(r"^\| (`[A-Z].*?) \|", table, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([A-Z_]+)`", row)}


def test_table_matches_the_variables_that_launchers_set():
    files = [list(map(from_object, json.loads(path.read_text())["plans"])) for path in GOLDEN]
    plans = [plan for each in files for plan in filled(each, {plan.node: "eth0" for plan in each})]
    users = {"HF_TOKEN"}  # given by a test
    given = {name for plan in plans for name in plan.env} - users
    given |= {name for plan in plans if plan.resume for name in plan.resume.env}
    assert documented() == given


def test_removed_variables():
    taken = PAGE.split("Removed from a node's environment:")[1].split(".\n")[0]
    assert tuple(re.findall(r"`([A-Z_]+)`", taken)) == UNSET
