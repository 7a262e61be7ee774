"""Ctrl-C and SIGTERM in every stage of ``train`` on two nodes: nothing is left half done, and a rerun completes.

The agents, the link between them and the gate are real. The environment has no torch: a stand-in for torchrun starts
the script once on each node.
"""

import itertools
import json
import os
import signal
import subprocess

import killing
import pytest
from command import CLUSTERCTL, run
from tiny_env import inventory, on, pack
from training import wait_until

from provision import sandbox as sandboxes

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(900)]

ROOT = "/opt/interrupted"
LAUNCHER = """\
import os, sys
words = sys.argv[1:]
script = next(at for at, word in enumerate(words) if word.endswith(".py"))
rank = words[words.index("--node-rank") + 1]
env = {**os.environ, "RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
os.execve(sys.executable, [sys.executable, *words[script:]], env)
"""
SCRIPT = """\
import sys, time
for step in range(int(sys.argv[1])):
    print("step", step, flush=True)
    time.sleep(0.2)
"""


class Cluster:
    def __init__(self, box, folder):
        self.box, self.folder = box, folder
        self.nodes = [node.name for node in box.nodes]

    def folders(self):
        """The runs' folders on the nodes, as ``node:id``."""
        script = f"ls {ROOT}/runs 2>/dev/null; true"
        return {f"{node}:{name}" for node in self.nodes for name in on(self.box, node, "sh", "-c", script).split()}

    def processes(self):
        """Processes of any run or of its agent on the nodes, as ``node:pid``."""
        where = ROOT.replace("/opt", "/op[t]")  # so that the pattern does not find its own process
        script = f"grep -lz ^CLUSTERCTL_RUN= /proc/[0-9]*/environ; grep -la {where}/runs/ /proc/[0-9]*/cmdline; true"
        found = set()
        for node in self.nodes:
            lines = on(self.box, node, "sh", "-c", f"({script}) 2>/dev/null").split()
            found |= {f"{node}:{line.split('/')[2]}" for line in lines}
        return found

    def interrupted(self, event, number, steps):
        """``train``, with a signal at an event: the exit code and what it printed."""
        words = ("train", "--nodes", "2", "train.py", "--", str(steps))
        done = run(*words, cwd=self.folder, first=killing.first(event, number))
        return done.returncode, done.stdout + done.stderr

    def logged(self, known, text):
        """Whether a log of a new run with this text has arrived here."""
        paths = [path for path in (self.folder / "runs").glob("*/*/*.log") if path.parts[-3] not in known]
        return any(text in path.read_text() for path in paths)

    def records(self):
        """This machine's records of runs, by id."""
        return {path.parent.name: json.loads(path.read_text()) for path in (self.folder / "runs").glob("*/run.json")}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, require_sandbox, small):
    env = small.make(tmp_path_factory.mktemp("env") / "tiny")
    package = env / small.site / "torch/distributed"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "run.py").write_text(LAUNCHER)
    with sandboxes.up(
        sandboxes.Options(nodes=2, name=f"train-{os.getpid()}", directory=tmp_path_factory.mktemp("box"))
    ) as box:
        folder = inventory(box, tmp_path_factory.mktemp("folder"), prefix=f"{ROOT}/current")
        (folder / "train.py").write_text(SCRIPT)
        deployed = run("deploy", pack(env, folder / "tiny.ccb"), cwd=folder)
        assert deployed.returncode == 0, deployed.stderr
        yield Cluster(box, folder)


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_signal_at_any_event_of_train_leaves_a_consistent_state(cluster, number):
    """SIGTERM detaches from a followed run, so that run may finish: everything else is stopped or removed."""
    for event in itertools.count(1):
        before, known = cluster.folders(), set(cluster.records())
        code, message = cluster.interrupted(event, number, 3)
        note = f"event {event}, {number}: {message}"
        assert "Traceback" not in message, note
        assert code in {0, 130}, note
        made, new = cluster.folders() - before, set(cluster.records()) - known
        wait_until(lambda: not cluster.processes(), f"no process is left: {note}", 30)
        # Either nothing was started, and the nodes have nothing of it; or the run is on record, with its state.
        assert {each.partition(":")[2] for each in made} <= new, note
        for each in new:
            record = cluster.records()[each]
            assert not record["attached"], note
            assert record["state"] in ({"finished"} if code == 0 else {"stopped", "failed", "finished"}), note
            shown = run("status", each, cwd=cluster.folder)
            assert "running" not in shown.stdout, note + shown.stdout
        if code == 0:  # there is no such event: the rerun has trained
            break
        assert "interrupted" in message, note
    assert event > 5


def test_sigterm_detaches_from_a_followed_run(cluster):
    known = set(cluster.records())
    argv = [CLUSTERCTL, "train", "--nodes", "2", "train.py", "--", "100000"]
    with subprocess.Popen(
        argv, cwd=cluster.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        wait_until(lambda: cluster.logged(known, "step 1"), "the logs arrive, so the run is followed", 60)
        (new,) = set(cluster.records()) - known
        child.send_signal(signal.SIGTERM)
        message = child.communicate(timeout=60)[0]
    assert child.returncode == 0, message
    record = cluster.records()[new]
    assert (record["state"], record["attached"]) == ("running", False), message
    assert "running" in run("status", new, cwd=cluster.folder).stdout
    stopped = run("stop", new, cwd=cluster.folder)
    assert stopped.returncode == 0, stopped.stderr
    assert cluster.processes() == set()
