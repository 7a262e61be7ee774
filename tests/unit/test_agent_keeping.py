"""Copies of checkpoints on other nodes, by real agents: a lost disk loses no step."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import SAVE, eventually
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
    print("resumed", path.name, hashlib.sha256((path / ("rng_state_%d.pth" % rank)).read_bytes()).hexdigest(), flush=True)
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

    def train(self, *steps, copies=None, **plan):
        return self.plan(TRAINER, *steps, resume=RESUME, copies=copies or {}, backoff=0.0, **plan)

    def copied(self, step):
        """The event that rank 0 writes when a checkpoint is copied."""

        def found():
            events = [event for event in self.parts[0].events() if event["event"] == "copied"]
            return next((event for event in events if event["step"] == step), None)

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
    import hashlib

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
