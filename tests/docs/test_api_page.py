"""The example of docs/api.md is typed and runs, on this machine alone; tests/nodes/test_api.py deploys."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from provision import api

sys.path.append(str(Path(__file__).parents[1] / "nodes"))  # last, so that they hide no module
sys.path.append(str(Path(__file__).parents[1] / "unit"))

from agents import eventually
from tiny_env import make_env

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
CELL = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
CELLS = CELL.findall(PAGE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with an environment and a script, without an inventory."""
    python = make_env(tmp_path / "envs/llm") / "bin/python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    shutil.copy2(ROOT / "tests/nodes/plain_trainers/steps.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / "envs/llm"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    return tmp_path


def test_the_page_has_a_cell_for_every_function():
    assert len(CELLS) >= 6
    code = "".join(code for code, _ in CELLS)
    for name in ("pack", "deploy", "train", "runs", "metrics"):
        assert f"{name}(" in code
    for name in api.__all__:
        if callable(getattr(api, name)) and name.islower():
            assert f"| `{name}(" in PAGE, f"the table of functions lacks {name}"


@pytest.mark.timeout(120)
def test_the_cells_run_and_print_what_the_page_shows(folder, capsys):
    names = {}
    for code, shown in CELLS:
        if "deploy(" in code:
            continue
        exec(compile(code, "docs/api.md", "exec"), names)
        printed = capsys.readouterr().out
        assert printed == shown or not shown, code
    assert names["trained"].run in names["found_runs"].runs
    eventually(lambda: any(path.stat().st_size for path in folder.joinpath("data").rglob("event.json")))
    [notified] = folder.joinpath("data").rglob("event.json")
    event = json.loads(notified.read_text())
    assert (event["event"], event["state"], event["step"]) == ("end", "finished", 2)


def test_the_cells_are_typed(tmp_path):
    page = tmp_path / "cells.py"
    page.write_text("".join(code for code, _ in CELLS), encoding="utf-8")
    argv = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--strict", str(page)]
    result = subprocess.run(argv, check=False, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert result.returncode == 0, result.stdout
    wrong = tmp_path / "wrong.py"
    wrong.write_text('from provision.api import train\ntrain("a.py", nodes="2")\n', encoding="utf-8")
    result = subprocess.run(
        [*argv[:-1], str(wrong)], check=False, capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert result.returncode == 1
    assert 'incompatible type "str"' in result.stdout


def test_a_hint_is_a_command_for_the_same_inventory(folder):
    inventory = folder / "other.yaml"
    inventory.write_text("prefix: /opt/llm/current\nnodes:\n  one: 127.0.0.1:9\n", encoding="utf-8")
    with pytest.raises(api.ClusterctlError) as caught:
        api.runs(inventory=inventory)
    assert caught.value.hint.endswith(f"are these nodes up? clusterctl status -i {inventory}")
    assert caught.value.reasons.keys() == {"one"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"launcher": "mpirun"}, "mpirun"), ({"zero": "4"}, "4"), ({"nodes": 2}, "2"), ({"limit": "nobody"}, "nobody")],
)
def test_an_argument_that_cannot_be_used_is_an_error(folder, arguments, text):
    with pytest.raises(api.UsageError, match=text):
        api.train("steps.py", **arguments)
