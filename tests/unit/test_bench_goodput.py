"""Figures of `scripts/bench goodput`, from faults that were injected before; and its trainer's checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import goodput
import pytest
from goodput import Found, Hit, Watch, rows
from goodput_faults import FAULTS

from trainer.agent.contract.effective import Effective

ROOT = Path(__file__).resolve().parents[2]
TRAINER = ROOT / "scripts/benchmarks/goodput_trainer.py"


def test_the_figures_count_what_was_tried():
    hits = [
        Hit("rank", "SIGKILL to rank of node01", survived=True, first=4.0, new=6.0, repeated=10),
        Hit("rank", "SIGKILL to rank of node02", survived=True, first=6.0, new=9.0, repeated=20),
        Hit("node", "node04 without power", survived=True, first=30.0, new=33.0, repeated=60),
        Hit("node", "node03 without power", survived=False, why="the run ended: lost"),
        Hit("tear", "node01", survived=False, why="not tried: there is no checkpoint yet"),
    ]
    accounts = [Effective(training=60, recovering=10, top=5), Effective(training=30, top=9)]
    text = "\n".join(rows(Found(hits, accounts), 240))
    for line in (
        "| effective training time | 90.0 % |",
        "| faults survived without intervention | 3 of 4 |",
        "| fault to the first step of the next attempt, median and longest | 6 s, 30 s |",
        "| fault to the first new step, median and longest | 9 s, 33 s |",
        "| lost node to the first new step, median and longest | 33 s, 33 s |",
        "| steps repeated after a lost node, of 240 between two saves, median and most | 60, 60 |",
        "| repeated steps after a fault, median and most | 20, 60 |",
        "| healthy nodes condemned | 0 |",
        "| a rank is killed | 2 of 2 | 7.5 s |",
        "| a node loses its power and its disk for good | 1 of 2 | 33.0 s |",
        "tear: node01: not tried: there is no checkpoint yet",
    ):
        assert line in text.splitlines()
    empty = rows(Found(condemned=["node02 in run 1"]), 240)
    assert "| effective training time | unknown |" in empty
    assert "| healthy nodes condemned | 1 |" in empty
    assert "| lost node to the first new step, median and longest | not tried |" in empty


class Box:
    """Nodes whose files are folders."""

    def __init__(self, folder):
        self.folder = folder

    def node_root(self, name):
        return self.folder / name


class Watched:
    """A run whose agents' events the test writes."""

    def __init__(self, folder, names):
        self.cluster, self.names = SimpleNamespace(box=Box(folder)), names
        for position, name in enumerate(names):
            (folder / name / f"run/logs/node{position}").mkdir(parents=True)

    def record(self):
        return {"folder": "/run"}

    def write(self, name, *events):
        path = self.cluster.box.node_root(name) / f"run/logs/node{self.names.index(name)}/events.jsonl"
        with path.open("a") as file:
            file.writelines(json.dumps(event) + "\n" for event in events)


def test_the_events_are_followed_when_rank_0_moves_to_a_spare(tmp_path):
    run = Watched(tmp_path, ["a", "b", "c"])
    watch = Watch(run)
    one = {"event": "attempt", "time": 1.0, "attempt": 1, "nodes": ["a", "b"], "checkpoint": None, "began": 0.0}
    for name in run.names:
        run.write(name, one)
    run.write("a", {"event": "progress", "time": 2.0, "step": 7})
    run.write("b", {"event": "progress", "time": 2.0, "step": 99})  # not rank 0's
    watch.look()
    assert (watch.top, watch.members, watch.spares) == (7, ["a", "b"], 1)
    watch.struck.add("a")
    two = {"event": "attempt", "time": 5.0, "attempt": 2, "nodes": ["c", "b"], "checkpoint": "step-6", "step": 6}
    run.write("c", two, {"event": "replaced", "time": 5.0, "node": "a"}, {"event": "progress", "time": 7.0, "step": 8})
    run.write("b", two)
    run.write("a", {"event": "end", "time": 6.0, "state": "failed"})
    watch.look()
    assert (watch.top, watch.members, watch.spares, watch.attempts) == (8, ["c", "b"], 0, 2)
    assert (watch.end, watch.lost - watch.struck) == (None, set())
    spent = watch.spent()
    assert (spent.restarts, spent.repeated, spent.top, spent.total) == (1, 1, 8, 7.0)
    run.write("c", {"event": "end", "time": 8.0, "state": "failed"})
    watch.look()
    assert watch.end is None
    run.write("b", {"event": "end", "time": 8.0, "state": "failed"})
    watch.look()
    assert watch.end["state"] == "failed"


def test_faults_are_chosen_by_their_names():
    plain = goodput.parse(["--launcher", "plain"]).faults
    assert plain == [name for name in FAULTS if name != "launcher"]
    assert goodput.parse([]).faults == list(FAULTS)
    assert {"node", "agent"} == set(FAULTS) - set(goodput.parse(["--spares", "0"]).faults)
    assert goodput.parse(["--faults", "rank,node"]).faults == ["rank", "node"]
    for wrong in (["--faults", "rnk"], ["--nodes", "1"], ["--every", "0"]):
        with pytest.raises(SystemExit):
            goodput.parse(wrong)


def test_every_fault_is_in_the_documentation():
    section = (ROOT / "docs/benchmarks.md").read_text().partition("## Effective training time")[2].partition("\n## ")[0]
    words = {
        "rank": "killed or stopped rank",
        "stop": "killed or stopped rank",
        "launcher": "killed launcher",
        "cut": "without a network",
        "tear": "torn checkpoint",
        "disk": "full disk",
        "controller": "killed controller",
        "agent": "killed agent",
        "node": "power and its disk for good",
    }
    assert set(words) == set(FAULTS)
    for word in words.values():
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
