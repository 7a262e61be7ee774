"""Figures of `scripts/bench goodput`, from faults that were injected before; and its trainer's checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import goodput
import pytest
from goodput import Hit, rows
from goodput_faults import FAULTS

from trainer.agent.contract.effective import Effective

ROOT = Path(__file__).resolve().parents[2]
TRAINER = ROOT / "scripts/benchmarks/goodput_trainer.py"


def test_the_figures_count_what_was_tried():
    hits = [
        Hit("rank", "SIGKILL to rank of node01", survived=True, first=4.0, new=6.0, repeated=10),
        Hit("rank", "SIGKILL to rank of node02", survived=True, first=6.0, new=9.0, repeated=20),
        Hit("node", "node03 without power", survived=False, why="the run ended: lost"),
        Hit("tear", "node01", survived=False, why="not tried: there is no checkpoint yet"),
    ]
    text = "\n".join(rows(hits, Effective(training=90, recovering=10, top=5), []))
    for line in (
        "| effective training time | 90.0 % |",
        "| faults survived without intervention | 2 of 3 |",
        "| fault to the first step of the next attempt, median and longest | 5 s, 6 s |",
        "| fault to the first new step, median and longest | 7.5 s, 9 s |",
        "| lost node to the first new step, median and longest | not tried |",
        "| repeated steps after a fault, median and most | 15, 20 |",
        "| healthy nodes condemned | 0 |",
        "| a rank is killed | 2 of 2 | 7.5 s |",
        "| a node loses its power for good | 0 of 1 | - |",
        "tear: node01: not tried: there is no checkpoint yet",
    ):
        assert line in text.splitlines()
    assert "| effective training time | unknown |" in rows([], None, ["node02"])
    assert "| healthy nodes condemned | 1 |" in rows([], None, ["node02"])


def test_faults_are_chosen_by_their_names():
    assert goodput.parse([]).faults == [name for name, fault in FAULTS.items() if fault.by_default]
    assert goodput.parse(["--faults", "rank,node"]).faults == ["rank", "node"]
    for wrong in (["--faults", "rnk"], ["--nodes", "1"], ["--every", "0"]):
        with pytest.raises(SystemExit):
            goodput.parse(wrong)


def test_every_fault_is_in_the_documentation():
    section = (ROOT / "docs/benchmarks.md").read_text().partition("## Effective training time")[2].partition("\n## ")[0]
    for word in (
        "killed or stopped rank",
        "killed launcher",
        "without a network",
        "torn checkpoint",
        "killed\ncontroller",
    ):
        assert word in section


def test_the_trainer_saves_and_resumes(tmp_path):
    def train(*words):
        argv = [sys.executable, TRAINER, "--step", "0.01", "--save-every", "2", "--bytes", "10", *words]
        return subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    assert train("--steps", "9").returncode == 0
    assert sorted(path.name for path in tmp_path.glob("out/*")) == ["iter_4", "iter_6", "iter_8"]
    listed = json.loads((tmp_path / "out/iter_8/complete.json").read_text())["files"]
    assert listed == {path.name: path.stat().st_size for path in tmp_path.glob("out/iter_8/*.safetensors")}
    resumed = train("--steps", "9", "--resume", "out/iter_8")
    assert [line for line in resumed.stdout.splitlines() if line.startswith("step")] == ["step 9/9 | loss: 1.1111"]
    assert "is missing" in train("--resume", "out/iter_3").stderr
