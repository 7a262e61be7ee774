"""Ranks that the agent starts itself, without a launcher: their environment and their end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import RANK, SAVE, Run, eventually, nodes

SAYS = """
import json, os, sys
names = "RANK LOCAL_RANK WORLD_SIZE MASTER_PORT".split()
print(json.dumps({name: os.environ[name] for name in names}))
print("to stderr", os.environ["RANK"], file=sys.stderr)
"""
# Rank 1 exits as its argument defines, after all ranks have started; the others wait.
ENDS = (
    RANK.replace("time.sleep(600)", "")
    + """
import sys
if os.environ["RANK"] != "1":
    time.sleep(600)
while not os.path.exists("go"):
    time.sleep(0.01)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), 9)
sys.exit(int(sys.argv[1]))
"""
)


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    yield run
    run.close()


def ranks(processes=2, **plan):
    return {"each_rank": True, "processes": processes, **plan}


def wait(run, count):
    """Until so many ranks run."""
    for rank in range(count):
        run.wait_for(f"rank-{rank}")


def logs(run, name="stdout"):
    """By local rank, what the newest attempt's ranks wrote."""
    attempt = max((run.logs / "ranks").iterdir(), key=lambda path: int(path.name))
    return {int(path.parent.name): path.read_text() for path in attempt.glob(f"attempt_0/*/{name}.log")}


def test_each_rank_gets_its_numbers_and_its_logs(run):
    events = run.start(SAYS, **ranks(first_rank=2, port=23456)).finish()
    assert {local: json.loads(text) for local, text in logs(run).items()} == {
        local: {"RANK": str(2 + local), "LOCAL_RANK": str(local), "WORLD_SIZE": "2", "MASTER_PORT": "23456"}
        for local in range(2)
    }
    assert logs(run, "stderr") == {0: "to stderr 2\n", 1: "to stderr 3\n"}
    message = {(event["rank"], event["line"]) for event in events if event["event"] == "log"}
    assert {(2, "to stderr 2"), (3, "to stderr 3")} < message
    exit_, end = events[-2:]
    assert (exit_["rc"], exit_["signal"], end["state"]) == (0, None, "finished")


@pytest.mark.parametrize(
    ("how", "rc", "number", "text"),
    [("3", 3, None, "rank 1 exited with code 3"), ("kill", None, "SIGKILL", "rank 1 was killed by SIGKILL")],
)
def test_failed_rank_stops_the_others(run, how, rc, number, text):
    run.start(ENDS, how, **ranks(processes=3))
    wait(run, 3)
    (run.folder / "go").touch()
    *_, exit_, end = run.finish()
    assert (exit_["rc"], exit_["signal"]) == (rc, number)
    assert (end["state"], end["why"]) == ("failed", {"node": "n0", "rank": 1, "text": text})
    assert run.left() == []


def test_finished_rank_does_not_stop_the_others(run):
    run.start(ENDS, "0", **ranks())
    wait(run, 2)
    (run.folder / "go").touch()
    eventually(lambda: len(run.left()) == 1)
    assert run.state()["state"] == "running"
    message = run.do("stop")
    assert (message["left"], message["state"]) == ([], "stopped")


def test_stop_ends_every_rank(run):
    run.start(RANK, **ranks(processes=3))
    wait(run, 3)
    message = run.do("stop")
    assert (message["left"], message["port_free"], message["state"]) == ([], True, "stopped")
    assert run.left() == []


def test_ranks_do_not_outlive_an_agent_that_is_killed(run):
    run.start(RANK, **ranks())
    wait(run, 2)
    os.kill(run.state()["pid"], signal.SIGKILL)
    eventually(lambda: run.state().get("state") == "failed")
    eventually(lambda: run.left() == [])


def test_a_stop_that_saves_asks_the_ranks(run):
    code = SAVE + (
        "import signal\n"
        "rank = int(os.environ['RANK'])\n"
        "def stop(*_):\n"
        "    save(7, rank, rank == 0) if rank == 0 else None\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "open('rank-%d' % rank, 'w').close()\n"
        "signal.pause()\n"
    )
    run.start("import os\n" + code, **ranks(processes=1, resume={"output": "out", "argv": []}))
    wait(run, 1)
    message = run.do("stop", "--save")
    assert (message["saved"], message["step"], message["left"]) == (True, 7, [])


def test_a_failed_attempt_is_repeated_with_new_logs(run):
    code = "import os, sys; open('tries-' + os.environ['RANK'], 'a').write('x'); sys.exit(3)"
    run.plan(code, **ranks(restarts=1, backoff=0.05, resume={"output": "out", "argv": []}, none_ok=True)).begin()
    assert run.wait_end()["state"] == "failed"
    assert len(list((run.logs / "ranks").iterdir())) == 2


def test_a_command_that_cannot_be_started(run):
    run.start("", **ranks(argv=["/nowhere/python"]))
    *_, exit_, end = run.finish()
    assert "/nowhere/python" in exit_["error"]
    assert (end["state"], run.left()) == ("failed", [])


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_fails_the_run_on_all_nodes(tmp_path, rank):
    parts, shared = nodes(tmp_path, 2)
    try:
        for part in parts:
            part.plan(RANK, **ranks(first_rank=2 * part.rank, **shared))
        started = [subprocess.Popen(part.command("start"), stdout=subprocess.PIPE) for part in parts]
        assert all(json.loads(each.communicate(timeout=60)[0])["started"] for each in started)
        for part in parts:
            for local in range(2):
                part.rank_pid(2 * part.rank + local)
        os.kill(parts[rank].rank_pid(2 * rank), signal.SIGKILL)
        why = {"node": f"n{rank}", "rank": 2 * rank, "text": f"rank {2 * rank} was killed by SIGKILL"}
        for part in parts:
            assert part.wait_end()["why"] == why
    finally:
        for part in parts:
            part.close()
