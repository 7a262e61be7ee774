"""Ranks that are stopped, dead or waiting, and which process is which rank; with a simulated clock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agent_life import EVALUATING, LAUNCHER, SAVING, Life, trained
from agents import plan_of

from trainer.agent import hangs, processes
from trainer.agent.processes import Stat

# --- stopped and dead ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "words"), [("T", "is stopped (SIGSTOP, state T)"), ("t", "is held by a debugger (state t)")]
)
def test_a_stopped_rank_is_found_and_named(state, words):
    life = trained()
    life.proc.set(103, state=state)
    life.wait(20)
    ((at, hang),) = life.found
    assert hang == hangs.Hang("stopped", 3, "rank 3 (pid 103) " + words)
    assert 5 <= at <= 7


def test_a_rank_that_is_stopped_for_a_moment():
    life = trained()

    def blink(second):
        life.proc.set(103, state="T" if second % 6 < 4 else "S")

    assert life.wait(60, blink).found == []


def test_a_stopped_rank_that_continues_and_is_stopped_again():
    life = trained()
    for _ in range(2):
        life.proc.set(103, state="T")
        life.wait(10)
        life.proc.set(103, state="R")
        life.wait(10)
    assert life.kinds == ["stopped", "stopped"]
    assert life.watch.notices() == ["rank 3 is running again"] * 2
    assert life.watch.notices() == []


def test_two_stopped_ranks_are_both_reported():
    life = trained()
    life.proc.set(101, state="T")
    life.proc.set(102, state="T")
    assert [hang.rank for _, hang in life.wait(20).found] == [1, 2]


def test_a_stopped_worker_of_a_dataloader():
    life = trained()
    life.proc.set(1002, state="T")
    ((_, hang),) = life.wait(20).found
    assert hang == hangs.Hang("stopped", 2, "process 1002 of rank 2 is stopped (SIGSTOP, state T)")


def test_the_state_is_read_again_when_members_are_old():
    life = trained()
    old = life.proc.members()
    life.proc.set(103, state="T")
    for second in range(10):
        found = life.watch.look(old, life.now + second)
        if found:
            break
    assert found.rank == 3


def test_a_stopped_script_without_ranks():
    life = Life(ranks=0, first_rank=0)
    life.proc.set(LAUNCHER, state="T")
    ((_, hang),) = life.wait(20).found
    assert (hang.kind, hang.rank) == ("stopped", 0)


def test_a_stopped_launcher_is_not_a_rank():
    life = trained()
    life.proc.set(LAUNCHER, state="T")
    assert life.wait(20).found == []


def test_a_zombie_that_its_launcher_does_not_collect():
    life = Life()
    life.wait(5)
    life.proc.set(102, state="Z", status=signal.SIGKILL)
    life.wait(20)
    ((at, hang),) = life.found
    assert hang == hangs.Hang("dead", 2, "rank 2 (pid 102) exited (SIGKILL), but other ranks are running")
    assert 10 <= at <= 12


def test_a_rank_that_exits_during_training():
    life = trained()
    del life.proc.table[102]
    life.wait(20)
    ((at, hang),) = life.found
    assert (hang.kind, hang.rank) == ("dead", 2)
    assert 5 <= at <= 7


def test_a_worker_that_outlives_its_rank_is_not_the_rank():
    life = trained()
    del life.proc.table[102]
    life.proc.set(1002, parent=1)
    assert life.wait(20).kinds == ["dead"]


@pytest.mark.parametrize(
    "last", [SAVING, EVALUATING, "Training completed. Do not forget", "clusterctl: phase finishing"]
)
def test_rank_that_exits_before_the_others(last):
    """After the last step, ranks that have nothing to save exit."""
    life = trained()
    life.wait(1).say(last)
    del life.proc.table[102]
    assert life.wait(900).found == []


def test_rank_that_exits_while_steps_continue():
    life = trained()
    del life.proc.table[102]
    assert life.train(10).found == []


def test_rank_that_exits_in_a_script_without_phases():
    life = Life().train(10)
    del life.proc.table[102]
    assert life.wait(100).found == []


def test_all_ranks_exited_and_restarted_by_the_launcher():
    life = trained()
    for rank in range(4):
        del life.proc.table[100 + rank], life.proc.table[1000 + rank]
    life.wait(60)
    for rank in range(4):
        life.proc.put(200 + rank, rank, LAUNCHER, start="9")
    assert life.train(10).found == []
    life.proc.set(203, state="T")
    assert life.wait(10).found[0][1].text.startswith("rank 3 (pid 203)")


def test_exited_launcher_is_left_to_the_supervisor():
    life = trained()
    del life.proc.table[102], life.proc.table[LAUNCHER]
    assert life.wait(20).found == []


def test_rank_that_waits_for_a_disk_gives_a_notice():
    life = trained()
    life.proc.set(101, state="D")
    life.train(19)
    assert life.watch.notices() == []
    life.train(40)
    assert life.watch.notices() == [
        "rank 1 (pid 101) has waited for a disk or a device for a minute (in the kernel: nfs_wait_bit_killable)"
    ]
    assert life.found == []


# --- which process is which rank -----------------------------------------------------------------


def test_ranks_of_environments():
    assert processes.rank_in({"RANK": "11", "LOCAL_RANK": "3"}, 8) == 11
    assert processes.rank_in({"LOCAL_RANK": "3"}, 8) == 11
    assert processes.rank_in({"RANK": "x"}, 8) is None
    assert processes.rank_in({"NODE_RANK": "1"}, 8) is None


def test_the_real_proc():
    code = "import subprocess, sys; subprocess.run(['/bin/sh', '-c', 'echo; read x; :']); open('/dev/null').read()"
    env = {"RANK": "3", "LOCAL_RANK": "1", "PATH": os.environ["PATH"]}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    proc = processes.Proc()
    with subprocess.Popen([sys.executable, "-c", code], env=env, **pipes) as child:
        child.stdout.readline()  # the shell runs
        below = list(children_of(child.pid, proc))
        members = {pid: proc.stat(pid) for pid in [child.pid, *below]}
        by_pid = processes.of_ranks(members, proc.rank)
        found = processes.main_processes(members, by_pid, 0, set())
        moved = proc.bytes_moved(child.pid)
        child.communicate(b"\n")
    assert set(by_pid.values()) == {3}
    assert len(by_pid) == 2
    assert found == {3: child.pid}
    assert moved > 1000
    assert proc.bytes_moved(child.pid) == 0


def children_of(parent, proc):
    for path in Path("/proc").glob("[0-9]*"):
        stat = proc.stat(int(path.name))
        if stat is not None and stat.parent == parent:
            yield int(path.name)


def test_a_process_that_becomes_a_rank_by_exec():
    proc = processes.Proc()
    stat = Stat("S", 1, "7")
    first = []
    environments = [{}, {"RANK": "2"}]

    def environment_of(pid):
        first.append(pid)
        return environments.pop(0)

    original, processes.environment_of = processes.environment_of, environment_of
    try:
        assert [proc.rank(5, stat) for _ in range(3)] == [None, 2, 2]
    finally:
        processes.environment_of = original
    assert first == [5, 5]


def test_a_living_rank_that_is_stopped():
    env = {"RANK": "3", "LOCAL_RANK": "1"}
    proc = processes.Proc()
    code = "print(1, flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], env=env, **pipes) as child:
        child.stdout.readline()
        members = {child.pid: proc.stat(child.pid)}
        watched = hangs.Watch(plan_of())
        assert [watched.look(members, float(second)) for second in range(10)] == [None] * 10
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        found = [hang for hang in (watched.look(members, 10.0 + second) for second in range(10)) if hang]
        child.kill()
    assert found == [hangs.Hang("stopped", 3, f"rank 3 (pid {child.pid}) is stopped (SIGSTOP, state T)")]
