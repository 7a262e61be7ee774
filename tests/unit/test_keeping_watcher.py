"""A program whose checkpoints are not recognised is reported after its first save."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import plan_of

from trainer.agent.keeping.watcher import DOUBTFUL, LARGE, Watcher, unknown_files
from trainer.agent.run_files import NodePlan


@pytest.fixture
def watcher(tmp_path):
    (tmp_path / "out").mkdir()
    return Watcher(NodePlan(plan_of(resume={"output": "out"}, copies={}), tmp_path, tmp_path / "plan.json"))


@pytest.mark.parametrize("name", ["state_5.npz", "epoch/weights.msgpack"])
def test_files_of_an_unknown_format_are_reported_once_with_their_name(watcher, tmp_path, name):
    path = tmp_path / "out" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(LARGE))
    watcher.look(100.0)
    assert watcher.doubts(100.0 + DOUBTFUL - 1) == []
    (text,) = watcher.doubts(100.0 + DOUBTFUL)
    assert "no checkpoint is recognised" in text
    assert f"({name})" in text
    assert "--output DIR" in text
    watcher.look(200.0)
    assert watcher.doubts(200.0 + DOUBTFUL) == []


@pytest.mark.parametrize("name", ["train.log", "runs/events.out.tfevents.1", ".hidden/x.bin", "checkpoint-5.pt"])
def test_logs_and_known_checkpoints_are_not_reported(watcher, tmp_path, name):
    path = tmp_path / "out" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(LARGE))
    watcher.look(100.0)
    assert watcher.doubts(100.0 + DOUBTFUL) == []


def test_files_from_before_the_run_do_not_count(tmp_path):
    path = tmp_path / "old.npz"
    path.write_bytes(bytes(10))
    now = time.time()
    os.utime(path, (now - 100, now - 100))
    assert unknown_files(tmp_path, now - 50).size == 0
    assert unknown_files(tmp_path, now - 150) == (10, "old.npz")
