"""The smallest world: this machine alone without ssh."""

import itertools
import json
import re
import shlex
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import command
import killing
import pytest
from training import PLAIN, Attached, Training

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(600)]

TINY = """
import sys
for step in range(1, int(sys.argv[sys.argv.index("--steps") + 1]) + 1):
    print(f"step {step} loss {1 / step}", flush=True)
    if step == 2 and "--wide" in sys.argv:
        sys.exit("OutOfMemoryError: CUDA out of memory")
"""
LONG = ("--output", "out", "steps.py", "--", "--steps", "100000", "--output", "out")


class Alone(Training):
    """This machine, whose environment is the active one; its runs are in a folder of the test."""

    def __init__(self, folder, env):
        self.folder, self.nodes = folder, []
        self.environ = {"CONDA_PREFIX": str(env), "XDG_DATA_HOME": str(folder / "data home")}
        shutil.copytree(PLAIN, folder, dirs_exist_ok=True)

    def run(self, *argv, timeout=300, first=""):
        return command.run(*argv, cwd=self.folder, env=self.environ, timeout=timeout, first=first)


@pytest.fixture
def alone(tmp_path):
    """An environment with Python alone."""
    python = tmp_path / "env/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    alone = Alone(tmp_path / "job", tmp_path / "env")
    yield alone
    for folder in (alone.folder / "runs").glob("*"):
        alone.run("stop", folder.name)


def test_llamafactory_on_this_machine_without_ssh(lab_env, lab_project, tmp_path):
    alone = Alone(tmp_path, lab_env)
    for name in ("model", "data"):
        (alone.folder / name).symlink_to(lab_project / name)
    text = (lab_project / "train.yaml").read_text()
    (alone.folder / "train.yaml").write_text(re.sub(r"max_steps: .*", "max_steps: 4", text))
    trained = alone.run("train", "--nodes", "1")
    assert trained.returncode == 0, trained.stderr
    run = alone.last_run().name
    assert alone.record(run)["state"] == "finished"
    assert "world size 1" in trained.stdout, trained.stdout
    shown = alone.run("status", run)
    assert shown.returncode == 0, shown.stderr
    assert "finished" in shown.stdout
    assert "4/4" in shown.stdout


def test_logs_and_stop_without_ssh(alone):
    started = alone.run("train", "--nodes", "1", "--detach", *LONG)
    assert started.returncode == 0, started.stderr
    run = alone.last_run().name
    until = time.monotonic() + 60
    while "step 3 " not in (logs := alone.run("logs", run)).stdout:
        assert time.monotonic() < until, logs.stdout + logs.stderr
        time.sleep(0.5)
    assert "rank 0 of 1, local rank 0" in logs.stdout
    reported = alone.run("report", run, "--output", "live.html")
    assert reported.returncode == 0, reported.stderr
    assert "the run was running when this report was written" in (alone.folder / "live.html").read_text()
    pictured = alone.run("monitor", run, "--language", "zh", "--picture", "screen.svg", "--size", "80x24")
    assert pictured.returncode == 0, pictured.stderr
    picture = (alone.folder / "screen.svg").read_text()
    assert run in picture
    assert "运行中" in picture
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "").replace("https://www.textualize.io", "")
    saved = alone.run("save", run)
    assert saved.returncode == 2
    assert "cannot save without stopping" in saved.stderr
    stopped = alone.run("stop", run)
    assert stopped.returncode == 0, stopped.stderr
    assert "no process left" in " ".join(stopped.stdout.split())
    collected = alone.run("collect", run, "--only", "logs", "--to", "here")
    assert collected.returncode == 0, collected.stderr
    reported = alone.run("report", f"here/{run}")
    assert reported.returncode == 0, reported.stderr
    page = (alone.folder / f"report-{run}.html").read_text()
    assert '<b class="state stopped">' in page
    assert "steps.py --output out --steps 100000" in page or "steps.py --steps 100000 --output out" in page


def test_compare_and_bisect_resumes_after_ctrl_c(alone, monkeypatch):
    """Three settings differ, and one of them lets the job fail."""
    (alone.folder / "tiny.py").write_text(TINY)
    for name, value, words in (("good", "1", ()), ("bad", "2", ("--wide", "--seed", "9"))):
        argv = ("--name", name, "--env", f"UNUSED={value}", "tiny.py", "--", "--steps", "3", *words)
        alone.run("train", "--nodes", "1", *argv)
    compared = alone.run("compare", "good", "bad")
    assert compared.returncode == 0, compared.stderr
    assert re.search(r"arguments: .*\n  --wide +not set -> set\n  --seed +not set -> 9\n", compared.stdout), (
        compared.stdout
    )
    assert re.search(r"variables: .*\n  UNUSED +1 +-> 2\n", compared.stdout)
    assert "packages:" not in compared.stdout
    kept = next((alone.folder / "runs").glob("*-bad-*/run.json"))
    hidden = kept.rename(kept.with_name("hidden"))
    asked = alone.run("compare", "good", "bad")
    assert asked.returncode == 0, asked.stderr
    assert "this machine has no record of it" in asked.stdout
    assert re.search(r"because the record of BAD lacks them: .*arguments", asked.stdout), asked.stdout
    hidden.rename(kept)
    argv = ("compare", "good", "bad", "--bisect", "--json", "--", "tiny.py", "--steps", "2")
    for name, value in alone.environ.items():
        monkeypatch.setenv(name, value)
    first = Attached(alone, argv, "round 2")
    first.send(signal.SIGINT)
    assert first.finish() == 130, first.output
    assert "round 1: GOOD: good" in first.output
    again = alone.run(*argv)
    assert again.returncode == 0, again.stderr
    assert "2 rounds of the interrupted bisection are kept" in again.stderr
    assert "round 1:" not in again.stderr
    found = json.loads(again.stdout)["bisect"]
    assert (found["cause"], found["sure"]) == (["--wide"], True), again.stdout
    assert found["rounds"][1]["verdict"] == "bad"
    assert "CUDA out of memory" in found["rounds"][1]["text"]
    assert shlex.split(found["commands"]["bad"])[-4:] == ["tiny.py", "--steps", "2", "--wide"]


def test_ctrl_c_at_every_other_event_of_train_leaves_no_process(alone):
    """The gate, the start, the training and its end; SIGTERM only detaches from a followed run."""
    words = ("train", "--nodes", "1", "steps.py", "--", "--steps", "3", "--pause", "0")
    for event in itertools.count(1, 2):
        child = alone.run(*words, first=killing.first(event, "SIGINT"))
        message = child.stdout + child.stderr
        assert child.returncode in {0, 130}, message
        if child.returncode == 0:  # there is no such event: the rerun has trained
            break
        assert "interrupted" in message
        for folder in (alone.folder / "data home/clusterctl/runs").glob("*"):
            left = marked(folder.name)
            assert left == [], f"event {event}: {message}"
    assert event > 4
    assert alone.record()["state"] == "finished"


def marked(run):
    """The processes of a run on this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"CLUSTERCTL_RUN={run}".encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found
