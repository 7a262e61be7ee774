"""Copies of checkpoints on other nodes, by real agents: a lost disk loses no step."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import SAVE, Run, eventually
from test_agent_nodes import Runs

# Saves checkpoint-10 with 300 kB of random content for each rank, then waits for the file "go" and exits with its
# content. A resumed one prints its checkpoint and a digest of all files that its node has of it.
TRAINER = (
    SAVE
    + """
import hashlib, time
rank = int(os.environ["CLUSTERCTL_NODE"][1:])
start = os.environ.get("CLUSTERCTL_CHECKPOINT")
if start:
    path = pathlib.Path(start)
    data = (path / ("rng_state_%d.pth" % rank)).read_bytes()
    print("resumed", path.name, hashlib.sha256(data).hexdigest(), flush=True)
    sys.exit(0)
for step in map(int, sys.argv[1:]):
    save(step, rank=rank, weights=rank == 0)
    with zipfile.ZipFile("out/checkpoint-%d/rng_state_%d.pth" % (step, rank), "w") as file:
        file.writestr("data", os.urandom(300000))
    while not os.path.exists("go-%d" % step):
        time.sleep(0.02)
sys.exit(int(open("go-%d" % step).read()))
""".replace("import hashlib", "import os, hashlib", 1)
)
RESUME = {"output": "out", "known": True, "env": {"CLUSTERCTL_CHECKPOINT": "{checkpoint}"}}


class Kept(Runs):
    """A run whose checkpoints are copied."""

    def train(self, *steps, copies=None, code=None, **plan):
        return self.plan(code or TRAINER, *steps, resume=RESUME, copies=copies or {}, backoff=0.0, **plan)

    def copied(self, step, times=1):
        """The event that rank 0 writes when a checkpoint is copied, for the given time."""

        def found():
            events = [event for event in self.parts[0].events() if event["event"] == "copied" and event["step"] == step]
            return events[times - 1] if len(events) >= times else None

        return eventually(found, 30)

    def go(self, step, code):
        for part in self.parts:
            (part.folder / "go").write_text(str(code))
            (part.folder / "go").rename(part.folder / f"go-{step}")

    def resume(self):
        """Another agent for each node, as ``clusterctl resume`` starts it."""
        for part in self.parts:
            plan = json.loads(part.path.read_text()) | {"resuming": True}
            part.path.write_text(json.dumps(plan))
        return self.begin()

    def own(self, rank, step=10):
        return self.parts[rank].folder / f"out/checkpoint-{step}/rng_state_{rank}.pth"

    def copies(self, rank):
        """The copies on a node, by name."""
        found = (self.parts[rank].folder / "out/.clusterctl-copies").rglob("*")
        return {path.name: path for path in found if path.is_file()}

    def lines(self, rank):
        return [event["line"] for event in self.parts[rank].events() if event["event"] == "log"]

    def notices(self, rank):
        return [event["text"] for event in self.parts[rank].events() if event["event"] == "notice"]


@pytest.fixture
def run(tmp_path):
    made = []

    def make(count=2):
        made.append(Kept(tmp_path, count))
        return made[0]

    yield make
    for part in made[0].parts if made else ():
        part.close()


def digest(data):
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_output_folder_comes_back_from_copies(run, lost):
    runs = run().train(10, restarts=1)
    event = runs.copied(10)
    assert (event["checkpoint"], event["on"]) == ("checkpoint-10", ["n0", "n1"])
    assert event["bytes"] > 600000
    assert runs.parts[0].state()["copied"]["step"] == 10
    contents = [digest(runs.own(rank).read_bytes()) for rank in (0, 1)]
    shutil.rmtree(runs.parts[lost].folder / "out")
    runs.go(10, 1)
    assert runs.wait_end()["state"] == "finished"
    for rank in (0, 1):
        assert f"resumed checkpoint-10 {contents[rank]}" in runs.lines(rank)


def test_a_damaged_copy_is_refused_for_an_older_checkpoint(run):
    runs = run().train(10, 20, restarts=1)
    runs.copied(10)
    runs.go(10, 0)
    runs.copied(20)
    older = [digest(runs.own(rank).read_bytes()) for rank in (0, 1)]
    folder = runs.parts[0].folder / "out/.clusterctl-copies"
    damaged = next(path for path in folder.rglob("rng_state_1.pth") if "-20@" in str(path))
    with damaged.open("r+b") as file:  # as a bad disk: size and time stay
        times = (damaged.stat().st_atime_ns, damaged.stat().st_mtime_ns)
        file.seek(200000)
        file.write(bytes(64))
    os.utime(damaged, ns=times)
    shutil.rmtree(runs.parts[1].folder / "out")
    (runs.parts[1].folder / "go-20").touch()
    runs.go(20, 1)
    assert runs.wait_end()["state"] == "finished"
    for rank in (0, 1):
        assert f"resumed checkpoint-10 {older[rank]}" in runs.lines(rank)
    assert any("a copy is damaged and was removed" in text for text in runs.notices(0))


def test_copies_that_do_not_fit_are_reported_at_the_first_save(run):
    runs = run().train(10, copies={"space": 100000})
    text = eventually(lambda: next((each for each in runs.notices(1) if "is not copied to this node" in each), ""), 30)
    assert "do not fit (--copies-space is 100000)" in text
    assert "resume with a larger --copies-space or with --copies 0" in text
    runs.go(10, 0)
    assert runs.wait_end()["state"] == "finished"  # the training continues


def test_the_last_checkpoint_is_copied_although_the_program_has_ended(run):
    """At the given speed it would take a day."""
    runs = run()
    runs.go(10, 0)
    runs.train(10, copies={"rate": 10})
    assert runs.wait_end()["state"] == "finished"
    event = runs.copied(10)
    assert (event["checkpoint"], event["on"]) == ("checkpoint-10", ["n0", "n1"])
    assert runs.parts[0].state()["copied"]["step"] == 10
    assert runs.parts[0].state()["copying"] is None
    for rank in (0, 1):
        name = f"rng_state_{1 - rank}.pth"
        assert runs.copies(rank)[name].read_bytes() == runs.own(1 - rank).read_bytes()
    assert any("copying checkpoint-10 to other nodes before the run ends" in text for text in runs.notices(0))


def test_more_copies_than_other_nodes(run):
    runs = run().train(10, copies={"peers": 3})
    assert runs.copied(10)["on"] == ["n0", "n1"]
    assert any("--copies 3: there are 1 other nodes" in text for text in runs.notices(0))


def test_a_resumed_run_copies_only_what_is_missing(run):
    runs = run().train(10)
    runs.copied(10)
    runs.go(10, 1)
    assert runs.wait_end()["state"] == "failed"
    missing = runs.copies(1)["rng_state_0.pth"]
    manifest = next(path for name, path in runs.copies(1).items() if name.endswith(".jsonl"))
    lines = [line for line in manifest.read_text().splitlines() if "rng_state_0.pth" not in line]
    manifest.write_text("\n".join(lines) + '\n{"file": "cut o')  # as an agent that was killed in between
    kept = {name: path.stat().st_ino for name, path in runs.copies(1).items()}
    for part in runs.parts:
        (part.folder / "wait").touch()
    again = TRAINER.replace(
        "    sys.exit(0)\n", "    while os.path.exists('wait'): time.sleep(0.02)\n    sys.exit(0)\n"
    )
    runs.train(10, resuming=True, code=again)
    event = runs.copied(10, times=2)
    assert event["bytes"] == missing.stat().st_size
    after = {name: path.stat().st_ino for name, path in runs.copies(1).items()}
    assert {name for name in kept if kept[name] != after[name]} == {"rng_state_0.pth"}
    for part in runs.parts:
        (part.folder / "wait").unlink()
    assert runs.wait_end()["state"] == "finished"


# --- memory ------------------------------------------------------------------------------------------------------

SAVER = (
    SAVE.replace('"out/checkpoint-%d" % step', 'sys.argv[1] + "/checkpoint-%d" % step')
    + """
import os, shutil, time
steps = int(sys.argv[2])
for step in range(1, steps + 1):
    save(step, rank=None)
    if step > 2:
        shutil.rmtree(sys.argv[1] + "/checkpoint-%d" % (step - 2))
    while not os.path.exists("go-%d" % step):
        time.sleep(0.02)
(pathlib.Path(sys.argv[1]) / "model.safetensors").write_bytes(b"final")
"""
)


def alone(folder, steps, **plan):
    run = Run(folder)
    resume = {"output": "out", "known": True, "env": {"CLUSTERCTL_CHECKPOINT": "{checkpoint}"}}
    run.plan(SAVER, "{output}", steps, resume=resume, copies={"memory": True}, **plan)
    run.begin()
    return run


def ram_of(run):
    return Path(f"/dev/shm/clusterctl-{os.geteuid()}/{run.id}-n0")


def test_checkpoints_in_memory_reach_the_disk_and_are_deleted_there_too(tmp_path):
    run = alone(tmp_path, 3)
    try:
        out = tmp_path / "out"
        for step in (1, 2, 3):
            eventually((out / f"checkpoint-{step}/trainer_state.json").exists, 30)
            (tmp_path / f"go-{step}").touch()
        assert run.wait_end()["state"] == "finished"
        found = sorted(path.name for path in out.iterdir())
        assert found == ["checkpoint-2", "checkpoint-3", "model.safetensors"]
        assert not any(path.is_symlink() for path in out.rglob("*"))
        assert not ram_of(run).exists()
    finally:
        run.close()


@pytest.mark.parametrize("victim", ["rank", "agent"])
def test_a_kill_right_after_a_save_to_memory_loses_nothing(tmp_path, victim):
    run = alone(tmp_path, 1)
    try:
        eventually((ram_of(run) / "checkpoint-1/training_args.bin").exists, 30)  # the last file
        os.kill(run.state()["command" if victim == "rank" else "pid"], signal.SIGKILL)
        eventually(lambda: any(event["event"] == "end" for event in run.events()), 30)
        assert (tmp_path / "out/checkpoint-1/trainer_state.json").is_file()
        assert (tmp_path / "out/checkpoint-1/optimizer.pt").is_file()
        assert not ram_of(run).exists()
    finally:
        run.close()


def test_memory_that_is_too_small_is_reported_and_the_disk_used(tmp_path):
    big = tmp_path / "out/checkpoint-7/model.safetensors"
    big.parent.mkdir(parents=True)
    with big.open("wb") as file:
        file.truncate(1 << 42)  # sparse: it needs no space
    run = alone(tmp_path, 1)
    try:
        eventually((tmp_path / "out/checkpoint-1/trainer_state.json").exists, 30)
        assert not ram_of(run).exists()
        (tmp_path / "go-1").touch()
        assert run.wait_end()["state"] == "finished"
        texts = [event["text"] for event in run.events() if event["event"] == "notice"]
        assert any("saved to the disk, because RAM cannot be used: /dev/shm has" in text for text in texts), texts
    finally:
        run.close()


def test_a_folder_in_memory_that_is_deleted_deletes_nothing_on_the_disk(tmp_path):
    run = alone(tmp_path, 1)
    try:
        eventually((tmp_path / "out/checkpoint-1/training_args.bin").exists, 30)  # it is written last
        shutil.rmtree(ram_of(run))  # as systemd at logout
        os.kill(run.state()["command"], signal.SIGKILL)
        assert run.wait_end()["state"] == "failed"
        assert (tmp_path / "out/checkpoint-1/optimizer.pt").is_file()
        texts = [event["text"] for event in run.events() if event["event"] == "notice"]
        assert any("was deleted: what was only in RAM is lost" in text for text in texts), texts
    finally:
        run.close()
