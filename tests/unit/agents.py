"""Run agents in tests: real processes, in the foreground or as daemons, and their files."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

AGENT = Path(__file__).parents[2] / "trainer" / "agent"
PYTHON = os.environ.get("AGENT_PYTHON", sys.executable)  # to try the agent under an older Python

# A process that leaves its group and its session, writes its pid to a file, and ignores SIGTERM.
STUBBORN = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1] + ".new", "w").write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
while True:
    signal.pause()
"""

# Like torchrun, it starts each rank in its own session and ends with 1 some time after a rank has failed. It does not
# reap a failed rank before, so the agent can read its status however late it looks. Each rank writes its pid into
# rank-<N>, runs CODE, and stays until it is stopped.
LAUNCHER = """
import os, subprocess, sys, time
code, first, count, lag = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
ranks = []
for local in range(count):
    env = dict(os.environ, RANK=str(first + local), LOCAL_RANK=str(local))
    ranks.append(subprocess.Popen([sys.executable, "-c", code], env=env, start_new_session=True))
while True:
    ended = [os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for rank in ranks]
    if any(state is not None and state.si_status for state in ended):
        time.sleep(lag)
        sys.exit(1)
    if None not in ended:
        sys.exit(0)
    time.sleep(0.05)
"""
RANK = """
import os, time
name = "rank-" + os.environ["RANK"]
open(name + ".new", "w").write(str(os.getpid()))
os.rename(name + ".new", name)
time.sleep(600)
"""

# Writes a checkpoint as Hugging Face's Trainer does, with a rank's own file and, on one node, all others.
SAVE = """
import json, os, pathlib, struct, sys, zipfile

def save(step, rank=0, weights=True):
    folder = pathlib.Path("out/checkpoint-%d" % step)
    folder.mkdir(parents=True)
    names = ["rng_state.pth" if rank is None else "rng_state_%d.pth" % rank]
    if weights:
        body = b"{}" + b" " * 6
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(body)) + body)
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        names += ["optimizer.pt", "scheduler.pt", "training_args.bin"]
    for name in names:
        with zipfile.ZipFile(folder / name, "w") as file:
            file.writestr("data", "x")
"""


def plan_of(**fields):
    """A plan as the agent's modules take it."""
    from trainer.agent.contract.plan import from_object

    link = fields.get("link")
    needed = {"version": 2, "run": "r", "node": "n0", "argv": ["x"], "env": {}, "node_rank": 0}
    fields = needed | {"nnodes": len(link["nodes"]) if link else fields.get("node_rank", 0) + 1} | fields
    return from_object(fields)


def alive(mark):
    """Pids of living processes whose environment holds ``mark``."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (path / "stat").read_bytes().rpartition(b")")[2].split()[0]
            if state not in b"ZX" and mark.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
    return found


def state_of(pid):
    """The letter of a process's state in /proc, or None if there is no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    return None


def lives(pid):
    """Whether a process exists and is no zombie."""
    return state_of(pid) not in {None, "Z", "X"}


def suspend(pid):
    """Stop a process, and wait until it is stopped: SIGTERM would end one that SIGSTOP has not reached yet."""
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: state_of(pid) == "T")


def eventually(test, seconds=60.0):
    """Wait until a test is true, for events without a descriptor; returns the test's value."""
    limit = time.monotonic() + seconds
    while not (found := test()):
        assert time.monotonic() < limit, "did not happen"
        time.sleep(0.01)
    return found


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Run:
    """One node's part of a run: a plan, an agent, and its files."""

    def __init__(self, folder, rank=0, run=None):
        self.folder = folder
        self.rank = rank
        self.id = run or f"test-{uuid.uuid4().hex}"
        self.mark = f"CLUSTERCTL_RUN={self.id}"
        self.node_mark = f"CLUSTERCTL_NODE=n{rank}"
        self.agent = None
        self.path = folder / f"plan-{rank}.json"
        self.logs = folder / "logs" / f"node{rank}"

    def plan(self, code, *arguments, env=None, argv=None, **plan):
        plan = {
            "run": self.id,
            "node": f"n{self.rank}",
            "node_rank": self.rank,
            "argv": argv or [sys.executable, "-c", code, *map(str, arguments)],
            "env": {"PYTHONUNBUFFERED": "1"} | (env or {}),
            "cwd": ".",
            "logs": f"logs/node{self.rank}",
            "grace": 0.5,
            "nnodes": max(self.rank + 1, len((plan.get("link") or {}).get("nodes", [None]))),
            "version": 2,
        } | plan
        self.path.write_text(json.dumps(plan))
        return self

    def launch(self, count=2, first=0, lag=0.1, code=RANK, **plan):
        """The plan of a launcher with ranks."""
        return self.plan(LAUNCHER, code, first, count, lag, first_rank=first, processes=count, **plan)

    def command(self, *arguments):
        return [PYTHON, "-IB", str(AGENT), arguments[0], str(self.path), *map(str, arguments[1:])]

    def do(self, *arguments, check=True, **more):
        """What a command of the agent prints, as the last line's object."""
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True, check=False, timeout=90, **more)
        assert not done.stderr, done.stderr
        message = json.loads(done.stdout.splitlines()[-1])
        if check:
            assert done.returncode == 0, (message, self.log())
        return dict(message, rc=done.returncode)

    def begin(self):
        """Start the daemon."""
        message = self.do("start")
        assert message["started"], message
        return message

    def start(self, code, *arguments, inherited=None, stdout=subprocess.PIPE, **plan):
        """Start the agent in the foreground."""
        self.plan(code, *arguments, **plan)
        self.agent = subprocess.Popen(
            self.command("run"),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=inherited,
            text=True,
        )
        return self

    def events(self):
        path = self.logs / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def state(self):
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.logs / "state.json").read_text())
        return {}

    def log(self):
        path = self.logs / "agent.log"
        return path.read_text() if path.exists() else ""

    def wait_end(self, seconds=60.0):
        """The event ``end``, once neither the agent nor a process of the run is left on this node."""
        eventually(lambda: any(event["event"] == "end" for event in self.events()), seconds)
        message = self.state()
        eventually(lambda: not lives(message["pid"]) and not lives(message["guard"]))
        assert self.left() == []
        assert self.cgroups() == []
        assert self.log() == ""
        end = self.events()[-1]
        assert end["event"] == "end"
        assert self.state()["state"] == end["state"]
        return end

    def cgroups(self):
        """The cgroup of this node's part, where one could be made: it holds no process after the end, and goes."""
        names = [
            Path(root, f"clusterctl-{self.id}-n{self.rank}") for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
        ]
        return [path for path in names if path.exists()]

    def left(self):
        return sorted(set(alive(self.mark)) & set(alive(self.node_mark)))

    def until(self, event):
        """The next event of this kind of an agent in the foreground."""
        for line in self.agent.stdout:
            message = json.loads(line)
            if message["event"] == event:
                return message
        raise AssertionError(self.agent.stderr.read())

    def finish(self):
        """All other events; nothing of the run is left then."""
        events = [json.loads(line) for line in self.agent.stdout]
        assert events[-1]["event"] == "end"
        assert self.agent.wait() == (0 if events[-1]["state"] == "finished" else 1)
        assert alive(self.mark) == []
        assert self.cgroups() == []
        assert self.agent.stderr.read() == ""
        assert [event["event"] for event in events].count("exit") == 1
        return events

    def exit(self):
        """The event ``exit`` of an agent in the foreground."""
        return next(event for event in self.finish() if event["event"] == "exit")

    def lines(self):
        return [(event["rank"], event["line"]) for event in self.finish() if event["event"] == "log"]

    def wait_for(self, name):
        path = self.folder / name
        eventually(path.exists)
        return path.read_text()

    def rank_pid(self, rank):
        return int(self.wait_for(f"rank-{rank}"))

    def close(self):
        """End everything, whatever the test has done."""
        state = self.state()
        for key in ("guard", "pid"):
            if key in state and lives(state[key]) and AGENT.name.encode() in _command(state[key]):
                os.kill(state[key], signal.SIGKILL)
        if self.agent is not None:
            self.agent.kill()
            self.agent.wait()
            for stream in (self.agent.stdout, self.agent.stderr):
                if stream:
                    stream.close()
        for pid in alive(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for path in self.cgroups():
            eventually(lambda path=path: _removed(path))


def _removed(path):
    with contextlib.suppress(OSError):  # killed processes are still exiting
        path.rmdir()
    return not path.exists()


def _command(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def nodes(folder, count, **link):
    """The parts of one run on several nodes, and their link. Each has its own folder and disk."""
    link = {
        "host": "127.0.0.1",
        "port": free_port(),
        "token": secrets.token_hex(8),
        "nodes": [f"n{rank}" for rank in range(count)],
        "lost_after": 600.0,
    } | link
    run = f"test-{uuid.uuid4().hex}"
    parts = []
    for rank in range(count):
        (folder / f"node{rank}").mkdir()
        parts.append(Run(folder / f"node{rank}", rank, run))
    return parts, {"link": link, "nnodes": count}
