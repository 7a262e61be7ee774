"""Agents of several nodes, joined by their link: a failure of one stops all, and all report the same end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import AGENT, PYTHON, RANK, SAVE, eventually, lives, nodes

COUNT = 3


class Runs:
    """All nodes of one run."""

    def __init__(self, folder, count=COUNT, **link):
        self.parts, self.shared = nodes(folder, count, **link)

    def launch(self, count=1, **plan):
        for part in self.parts:
            part.launch(count, first=part.rank * count, **self.shared, **plan)
        return self.begin()

    def plan(self, code, *arguments, **plan):
        for part in self.parts:
            part.plan(code, *arguments, first_rank=part.rank, processes=1, **self.shared, **plan)
        return self.begin()

    def begin(self):
        started = [subprocess.Popen(part.command("start"), stdout=subprocess.PIPE) for part in self.parts]
        assert all(json.loads(each.communicate(timeout=60)[0])["started"] for each in started)
        return self

    def wait_ready(self, count=1):
        for part in self.parts:
            for local in range(count):
                part.rank_pid(part.rank * count + local)
        for part in self.parts:
            eventually(lambda part=part: part.state().get("state") == "running")
        return self

    def wait_gone(self):
        """Until no process of the run is left on any node; the agents may still talk about it.

        Undisturbed, none of it would end for ten minutes, nor would an agent report a silent one (``lost_after``).
        """
        eventually(lambda: not any(part.left() for part in self.parts))

    def wait_end(self, seconds=60.0):
        """The end that all nodes report."""
        ends = [part.wait_end(seconds) for part in self.parts]
        for end in ends:
            del end["time"], end["step"]
            end.pop("spent", None)  # each node has its own
        assert all(end == ends[0] for end in ends), ends
        return ends[0]


@pytest.fixture(params=[None, 1], ids=["all to the hub", "through one"])
def runs(tmp_path, request):
    """All agents are connected to rank 0's, or one is, and passes on the frames of the others."""
    runs = Runs(tmp_path, most=request.param)
    yield runs
    for part in runs.parts:
        part.close()


def test_all_finish(runs):
    runs.plan("import os; print('port', os.environ['MASTER_PORT'])", port=23456)
    end = runs.wait_end()
    assert (end["state"], end["why"]) == ("finished", None)
    for part in runs.parts:
        assert [event["line"] for event in part.events() if event["event"] == "log"] == ["port 23456"]
        assert part.state()["world_size"] == COUNT


def test_finished_node_waits_for_the_others(runs):
    runs.plan(
        "import os, time\nif os.environ['CLUSTERCTL_NODE'] != 'n0':\n while not os.path.exists('go'): time.sleep(.01)"
    )
    eventually(lambda: any(event["event"] == "exit" for event in runs.parts[0].events()))
    assert runs.parts[0].events()[-1]["event"] != "end"
    for part in runs.parts:
        (part.folder / "go").touch()
    assert runs.wait_end()["state"] == "finished"


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_is_killed(runs, victim):
    runs.launch(2, lag=0.1).wait_ready(2)
    rank = victim * 2 + 1
    os.kill(runs.parts[victim].rank_pid(rank), signal.SIGKILL)
    runs.wait_gone()
    why = runs.wait_end()["why"]
    assert why["node"] == f"n{victim}"
    # In its first two seconds a rank is not yet known as one; then its launcher's output names it.
    assert (why["rank"], why["text"]) in [
        (rank, f"rank {rank} was killed by SIGKILL"),
        (None, "the command exited with code 1"),
    ]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_launcher_is_killed(runs, victim):
    runs.launch().wait_ready()
    os.kill(runs.parts[victim].state()["command"], signal.SIGKILL)
    runs.wait_gone()
    assert runs.wait_end()["why"] == {"node": f"n{victim}", "rank": None, "text": "the command was killed by SIGKILL"}


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("whom", ["pid", "guard"])
def test_an_agent_is_killed(runs, victim, whom):
    runs.launch().wait_ready()
    os.kill(runs.parts[victim].state()[whom], signal.SIGKILL)
    runs.wait_gone()
    ends = [part.wait_end() for part in runs.parts]
    assert {end["state"] for end in ends} == {"failed"}
    assert {end["why"]["node"] for end in ends} == {f"n{victim}"}


@pytest.mark.parametrize("victim", [0, 1])
def test_both_processes_of_an_agent_are_killed(runs, victim):
    runs.launch().wait_ready()
    state = runs.parts[victim].state()
    os.kill(state["guard"], signal.SIGKILL)
    os.kill(state["pid"], signal.SIGKILL)
    others = [part for part in runs.parts if part.rank != victim]
    eventually(lambda: not any(part.left() for part in others))
    assert {part.wait_end()["why"]["node"] for part in others} == {f"n{victim}"}
    assert runs.parts[victim].do("stop")["left"] == []


@pytest.mark.parametrize("asked", [0, 2])
def test_stop_on_one_node_stops_all(runs, asked):
    runs.launch().wait_ready()
    assert runs.parts[asked].do("stop", "--who", "alice")["state"] == "stopped"
    end = runs.wait_end()
    assert (end["state"], end["why"]) == ("stopped", None)
    for part in runs.parts:
        assert any(event.get("text") == "alice requested a stop" for event in part.events())


def test_stop_on_all_nodes_at_once(runs):
    runs.launch().wait_ready()
    stops = [subprocess.Popen(part.command("stop"), stdout=subprocess.PIPE) for part in runs.parts]
    for each in stops:
        message = json.loads(each.communicate(timeout=60)[0])
        assert (each.returncode, message["state"], message["left"]) == (0, "stopped", [])
    runs.wait_end()


def test_a_stop_that_saves_waits_for_all_nodes(runs):
    """A checkpoint is usable if all nodes together have every file of it."""
    code = """
import signal, threading, time
asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.set())
print("ready")
while not asked.wait(0.05):
    pass
rank = int(os.environ["CLUSTERCTL_NODE"][1:])
time.sleep(rank / 2)
save(4, rank=rank, weights=rank == 0)
"""
    runs.plan(SAVE + code, resume={"output": "out", "argv": []}, grace=0.1)
    for part in runs.parts:
        eventually(lambda part=part: any(event.get("line") == "ready" for event in part.events()))
    message = runs.parts[2].do("stop", "--save")
    assert (message["state"], message["saved"], message["step"]) == ("stopped", True, 4)
    for part in runs.parts:
        end = part.wait_end()
        assert (end["state"], end["saved"], end["step"]) == ("stopped", True, 4)


def test_missing_node(runs):
    *here, missing = runs.parts
    for part in here:
        part.launch(first=part.rank, **runs.shared).begin()
    eventually(lambda: all(part.state().get("state") == "meeting" for part in here))
    assert here[1].do("stop")["state"] == "stopped"
    for part in here:
        assert part.wait_end()["state"] == "stopped"
    missing.path.write_text("{}")


def test_link_port_in_use(runs):
    import socket

    with socket.create_server(("127.0.0.1", runs.shared["link"]["port"])):
        runs.parts[0].launch(**runs.shared).begin()
        assert "cannot listen" in runs.parts[0].wait_end()["why"]["text"]


# An agent whose link raises an exception once the file "break" exists.
BREAKS = """
import os, sys
sys.path.insert(0, sys.argv[1])
from trainer.agent import start
from trainer.agent.link.spoke import Spoke
from trainer.agent.run_files import load_plan
tick = Spoke.tick
Spoke.tick = lambda *given: 1 / 0 if os.path.exists("break") else tick(*given)
sys.exit(start.run(load_plan(sys.argv[2])))
"""


def test_exception_in_the_link_fails_the_run(runs):
    """The node reports it at once and waits for no other; the others see its agent exit."""
    first, other, broken = runs.parts
    for part in runs.parts:
        part.launch(1, first=part.rank, **runs.shared)
    for part in (first, other):
        part.begin()
    argv = [PYTHON, "-IBc", BREAKS, AGENT.parents[1], broken.path]
    with subprocess.Popen(argv, cwd=broken.folder, stdout=subprocess.DEVNULL) as agent:
        runs.wait_ready()
        (broken.folder / "break").touch()
        assert agent.wait(60) == 1
    why = broken.events()[-1]["why"]
    assert why["node"] == "n2"
    assert "the link between the agents failed: ZeroDivisionError" in why["text"]
    for part in (first, other):
        assert part.wait_end()["why"]["node"] == "n2"


def test_two_nodes_fail_at_once(runs):
    """All report the same reason, independent of what each sees first."""
    runs.plan("import os, sys, time\nwhile not os.path.exists('../go'): time.sleep(.002)\nsys.exit(5)")
    eventually(lambda: all(part.state().get("state") == "running" for part in runs.parts))
    (runs.parts[0].folder.parent / "go").touch()
    assert runs.wait_end()["why"]["text"] == "the command exited with code 5"


def test_all_nodes_restart_from_a_checkpoint_that_some_lack(runs):
    """Rank 0's node has the weights; missing files of the checkpoint are copied to the others first."""
    code = """
node = os.environ["CLUSTERCTL_NODE"]
if "resume" in sys.argv[-1]:
    print("files", *sorted(path.name for path in pathlib.Path(sys.argv[-1].partition("=")[2]).iterdir()))
    sys.exit(0)
save(3, rank=int(node[1:]), weights=node == "n0")
pathlib.Path("../saved-" + node).touch()
while len(list(pathlib.Path("..").glob("saved-n?"))) < 3:
    pass
sys.exit(1 if node == "n1" else __import__("time").sleep(600))
"""
    runs.plan(
        SAVE + code, restarts=1, backoff=0.1, resume={"output": "out", "argv": ["resume={checkpoint}"]}, port=23456
    )
    end = runs.wait_end()
    assert (end["state"], end["attempt"]) == ("finished", 2), [part.events() for part in runs.parts]
    for part in runs.parts:
        last = [event["line"] for event in part.events() if event["event"] == "log"][-1]
        assert "model.safetensors" in last
        assert f"rng_state_{part.rank}.pth" in last
    ports = {event["port"] for part in runs.parts for event in part.events() if event["event"] == "attempt"}
    assert len(ports) == 2


def test_no_restart_without_a_node(runs):
    runs.launch(restarts=5, backoff=0.1).wait_ready()
    victim = runs.parts[1]
    for key in ("guard", "pid"):
        os.kill(victim.state()[key], signal.SIGKILL)
    for part in (runs.parts[0], runs.parts[2]):
        end = part.wait_end()
        assert (end["state"], end["why"]["node"]) == ("failed", "n1")
    victim.do("stop")


def test_a_node_that_is_silent_while_the_run_makes_progress(tmp_path):
    """An agent under SIGSTOP is silent. Progress is waited for; without it the silence is a failure."""
    runs = Runs(tmp_path, 2, lost_after=2.0)
    progress = RANK.replace(
        "time.sleep(600)",
        "while not os.path.exists('quiet'):\n"
        "    open('log.jsonl', 'a').write('{\"current_steps\": %d, \"total_steps\": 9}\\n' % (time.time() * 10))\n"
        "    time.sleep(0.3)\ntime.sleep(600)",
    )
    try:
        runs.launch(code=progress, progress="log.jsonl").wait_ready()
        os.kill(runs.parts[1].state()["pid"], signal.SIGSTOP)
        first = runs.parts[0]
        eventually(lambda: any("continues" in event.get("text", "") for event in first.events()))
        time.sleep(2)
        assert first.state()["state"] == "running"
        (first.folder / "quiet").touch()
        end = first.wait_end()
        assert end["why"]["node"] == "n1"
        assert "no progress" in end["why"]["text"]
    finally:
        os.kill(runs.parts[1].state()["pid"], signal.SIGCONT)
        for part in runs.parts:
            part.close()


def test_a_rank_that_is_stopped_is_named_on_all_nodes(runs):
    runs.launch(hang={"after": None, "policy": "stop"}).wait_ready()
    os.kill(runs.parts[2].rank_pid(2), signal.SIGSTOP)
    why = runs.wait_end()["why"]
    assert (why["node"], why["rank"]) == ("n2", 2)
    assert "SIGSTOP" in why["text"]
    hang = next(event for event in runs.parts[2].events() if event["event"] == "hang")
    assert set(hang["stacks"]) == {"0", "1", "2"}


def test_a_hang_that_is_only_warned_of(runs):
    runs.launch(hang={"after": None, "policy": "warn"}).wait_ready()
    rank = runs.parts[1].rank_pid(1)
    os.kill(rank, signal.SIGSTOP)
    eventually(lambda: any(event["event"] == "hang" for event in runs.parts[1].events()))
    assert lives(rank)
    os.kill(rank, signal.SIGCONT)
    eventually(lambda: any("is running again" in event.get("text", "") for event in runs.parts[1].events()))
    runs.parts[0].do("stop")
    assert runs.wait_end()["state"] == "stopped"


@pytest.mark.parametrize("shared", [False, True])
def test_a_restart_moves_all_checkpoints_aside_if_none_can_be_used(tmp_path, shared):
    """The program writes the same name again, on each node's disk or on a shared one."""
    runs = Runs(tmp_path, 2)
    folder = str(tmp_path / "shared") if shared else "out"
    code = f"""
import os, pathlib, sys, time
out = pathlib.Path({folder!r})
node = os.environ["CLUSTERCTL_NODE"]
path = out / "checkpoint-3" / ("weights-" + node + ".pt")
attempt = len(list(pathlib.Path("..").glob("began-" + node + "-*")))
(pathlib.Path("..") / ("began-%s-%d" % (node, attempt))).touch()
print("sees", path.exists(), (out / "checkpoint-3").exists())
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text("attempt %d" % attempt)
while len(list(pathlib.Path("..").glob("began-*-%d" % attempt))) < 2:
    time.sleep(0.01)
time.sleep(0.2)
sys.exit(1 if attempt == 0 else 0)
"""
    runs.plan(code, restarts=1, backoff=0.1, resume={"output": folder}, port=23456)
    end = runs.wait_end()
    assert end["state"] == "finished", [part.events() for part in runs.parts]
    for part in runs.parts:
        out = part.folder / folder
        name = f"weights-n{part.rank}.pt"
        assert (out / "kept-1/checkpoint-3" / name).read_text() == "attempt 0"
        assert (out / "checkpoint-3" / name).read_text() == "attempt 1"
        assert part.state()["kept"].endswith("kept-1")
    assert any(
        "so that nothing writes over it: checkpoint-3" in event.get("text", "") for event in runs.parts[0].events()
    )


def test_a_program_that_may_not_resume_is_not_started_over_its_checkpoints(tmp_path):
    runs = Runs(tmp_path, 2)
    code = """
import pathlib, time
rank = int(os.environ["CLUSTERCTL_NODE"][1:])
save(3, rank=rank)
pathlib.Path("../saved-%d" % rank).touch()
while len(list(pathlib.Path("..").glob("saved-*"))) < 2:  # else the first to fail stops the other
    time.sleep(0.01)
sys.exit(1)
"""
    runs.plan(SAVE + code, restarts=2, backoff=0.1, resume={"output": "out", "known": False}, port=23456)
    end = runs.wait_end()
    assert (end["state"], end["attempt"]) == ("failed", 2)
    assert "has checkpoints, and how the program resumes from one is not known" in end["why"]["text"]
    assert re.search(r"clusterctl resume \S+ --resume-arg ", end["why"]["text"])
    assert (runs.parts[0].folder / "out/checkpoint-3/model.safetensors").exists()
