"""``trainer/network`` on one machine: its launcher with ranks that need no torch."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

NETWORK = Path(__file__).resolve().parents[2] / "trainer" / "network"

# A rank that does the action in the key `do` of its work, instead of measuring.
RANK = """
import json, os, sys, threading, time

def main(events):
    work = json.loads(sys.stdin.readline())
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(3)), daemon=True).start()
    rank = int(os.environ["RANK"])
    def tell(**event):
        os.write(events, json.dumps(dict(event, rank=rank)).encode() + b"\\n")
    tell(event="met", pid=os.getpid(), env=dict(os.environ), timeout=work["timeout"])
    print("host:1:1 [0] NCCL INFO Using network Socket")
    print("rank", rank, "log", flush=True)
    do = work["do"].get(str(rank), "end")
    if do == "wait":
        time.sleep(60)
    if do == "error":
        tell(event="error", text="ValueError: it went wrong")
        return 1
    if do == "kill":
        os.kill(os.getpid(), 9)
    tell(event="alive")
    return 0
"""


@pytest.fixture
def start(tmp_path):
    """Starts the launcher with the given actions; it is stopped at the end of the test."""
    folder = tmp_path / "network"
    shutil.copytree(NETWORK, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "measure.py").write_text(RANK)
    started = []

    def start(do, ranks=(2, 3), timeout=30, **spec):
        work = {"do": {str(rank): what for rank, what in do.items()}}
        reported = {"ranks": ranks, "world": 4, "master": "10.0.0.1", "port": 29500, "env": {}, "timeout": timeout}
        process = subprocess.Popen(
            [sys.executable, "-I", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "CLUSTERCTL_RUN": "bench-1", "NCCL_SITE": "1", "SECRET": "x", "NCCL_OLD": "1"},
        )
        started.append(process)
        process.stdin.write(json.dumps({**reported, "work": work, **spec}).encode() + b"\n")
        process.stdin.flush()
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def events(process):
    return [json.loads(line) for line in process.stdout]


def of(kind, message):
    return [event for event in message if event["event"] == kind]


def wait_until_gone(pids, seconds=10):
    until = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until, "a rank is still there"
        time.sleep(0.02)


def test_every_rank_gets_its_place_and_a_clean_environment(start):
    process = start({}, env={"A": "b", "NCCL_IB_DISABLE": "1"}, unset=["NCCL_OLD"])
    message = events(process)
    assert process.wait() == 0
    assert message[-1] == {"event": "end", "ok": True}
    by_rank = {event["rank"]: event for event in of("met", message)}
    assert sorted(by_rank) == [2, 3]
    assert [event["text"] for event in of("network", message)] == ["host:1:1 [0] NCCL INFO Using network Socket"] * 2
    for local, rank in enumerate((2, 3)):
        env = by_rank[rank]["env"]
        wanted = {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}
        wanted |= {"MASTER_PORT": "29500", "A": "b", "NCCL_IB_DISABLE": "1", "NCCL_SITE": "1"}
        assert wanted.items() <= env.items()
        assert env["CLUSTERCTL_RUN"] == "bench-1"
        assert not {"SECRET", "NCCL_OLD"} & env.keys()


@pytest.mark.parametrize(
    ("do", "why"), [("error", "ValueError: it went wrong"), ("kill", "killed by SIGKILL")], ids=["error", "kill"]
)
def test_first_failure_stops_all_ranks(start, do, why):
    process = start({2: "wait", 3: do})
    message = events(process)
    assert process.wait() == 1
    (failed,) = of("failed", message)
    assert (failed["rank"], failed["why"]) == (3, why)
    assert failed["log"][-1] == "rank 3 log"
    assert message[-1] == {"event": "end", "ok": False}
    wait_until_gone([event["pid"] for event in of("met", message)])


def first_ranks(process, count):
    """The process ids of the ranks, once all are there."""
    found = []
    while len(found) < count:
        found += [event["pid"] for event in of("met", [json.loads(process.stdout.readline())])]
    return found


def test_end_of_stdin_stops_all_ranks(start):
    process = start({2: "wait", 3: "wait"})
    pids = first_ranks(process, 2)
    process.stdin.close()
    assert process.wait(10) == 1
    wait_until_gone(pids)


def test_ranks_do_not_outlive_a_killed_launcher(start):
    process = start({2: "wait", 3: "wait"})
    pids = first_ranks(process, 2)
    process.send_signal(signal.SIGKILL)
    wait_until_gone(pids)


def test_silent_rank_fails_after_the_timeout(start):
    process = start({2: "wait"}, timeout=-29)
    message = events(process)
    assert [event["rank"] for event in of("failed", message)] == [2]
    assert "no output" in of("failed", message)[0]["why"]


def test_program_reports_a_missing_torch(start, tmp_path):
    if importlib.util.find_spec("torch"):
        pytest.skip("torch is here")
    shutil.copy(NETWORK / "measure.py", tmp_path / "network")
    (failed,) = of("failed", events(start({}, ranks=(0,))))
    assert "No module named 'torch'" in failed["log"][-1]
