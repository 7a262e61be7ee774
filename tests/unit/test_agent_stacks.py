"""Stacks of ranks: real ones, recorded from torch 2.13 with gloo by py-spy and faulthandler; and living processes."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.agent import stacks
from trainer.agent.processes import stat_of

RECORDED = Path(__file__).parent / "recorded_runs" / "watch"


def recorded(name, state="S"):
    texts = {}
    for path in sorted(RECORDED.glob(f"{name}.rank*.txt")):
        rank = int(path.stem.partition(".rank")[2])
        texts[rank] = f"pid {1000 + rank}, state {state}\n{path.read_text()}"
    assert texts
    return texts


def in_python(*frames):
    """What py-spy writes, innermost first."""
    return 'pid 1, state S\nThread 1 (idle): "MainThread"\n' + "".join(f"    {frame}\n" for frame in frames)


REDUCING = in_python("all_reduce (torch/distributed/distributed_c10d.py:3252)", "wrapper (x.py:1)", "train (job.py:20)")
BACKWARD = in_python("_engine_run_backward (torch/autograd/graph.py:829)", "backward (torch/_tensor.py:5)")
LOADING = in_python("__getitem__ (job.py:8)", "fetch (torch/utils/data/_utils/fetch.py:54)")
READING = in_python("item_of (job.py:33)", "train (job.py:20)")  # waits for the GPU, which no stack shows


# --- the odd one ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ranks", "odd"),
    [
        ("loader-4", 4, [2]),  # waits for a worker of its DataLoader, the others in DistributedDataParallel
        ("loader0-4", 4, [2]),  # sleeps in its data set
        ("allreduce-4", 4, [2]),  # sleeps in the script's own code, the others in all_reduce
        ("allreduce-3", 3, [2]),
        ("barrier-2", 2, [1]),  # opens a file, the other waits in a barrier
        ("faulthandler-3", 3, [2]),
    ],
)
def test_recorded(name, ranks, odd):
    texts = recorded(name)
    assert sorted(texts) == list(range(ranks))
    assert stacks.outliers(texts) == odd


def test_recorded_without_the_odd_one():
    texts = recorded("loader-4")
    del texts[2]
    assert stacks.outliers(texts) == []


def test_a_stopped_rank_is_always_the_odd_one():
    texts = recorded("loader-4")
    texts[0] = texts[0].replace("state S", "state T", 1)
    assert stacks.outliers(texts) == [0]


@pytest.mark.parametrize(
    ("texts", "odd"),
    [
        ([REDUCING] * 7 + [LOADING], [7]),
        ([BACKWARD] * 3 + [LOADING], [3]),
        ([REDUCING] * 6 + [LOADING] * 2, [6, 7]),
        ([REDUCING, LOADING, LOADING, LOADING], [1, 2, 3]),  # one waits for three
        ([READING] * 6 + [REDUCING, LOADING], [7]),
        ([READING] * 3 + [LOADING], [3]),
        ([REDUCING] * 3 + [REDUCING.replace("job.py:20", "job.py:30")], [3]),  # another collective than the others
        ([REDUCING] * 3 + [BACKWARD], [3]),
        ([REDUCING, LOADING], [1]),
        ([LOADING, REDUCING], [0]),
        ([READING, LOADING], []),
        ([READING] * 2 + [LOADING] * 2, []),
        ([REDUCING] * 4, []),
        ([REDUCING], []),
        ([], []),
    ],
)
def test_odd_rank_is_found(texts, odd):
    assert stacks.outliers(dict(enumerate(texts))) == odd


def test_a_rank_without_a_stack_decides_nothing():
    assert stacks.outliers({0: REDUCING, 1: "pid 1, state S\n    /proc shows nothing"}) == []


def test_only_the_kernel_is_known():
    waits, reads = (f"pid 1, state S\n    in the kernel: {name}" for name in ("do_poll", "folio_wait_bit"))
    assert stacks.outliers({0: waits, 1: waits, 2: reads}) == [2]


def test_pids_and_addresses_do_not_make_a_difference():
    """The innermost frames were recorded in different processes."""
    frames = {rank: stacks.frames(text) for rank, text in recorded("loader-4").items()}
    assert frames[0] == frames[1] == frames[3] != frames[2]
    assert frames[0][0] == ("DistributedDataParallel._pre_forward", "torch/nn/parallel/distributed.py", "1775")
    assert frames[2][-1] == ("<module>", "ranks.py", "20")


def test_frames_of_faulthandler_are_those_of_the_main_thread():
    texts = recorded("faulthandler-3")
    assert stacks.frames(texts[0])[0] == ("_pre_forward", "torch/nn/parallel/distributed.py", "1775")
    assert stacks.frames(texts[2])[0] == ("select", "selectors.py", "415")


@pytest.mark.parametrize(
    ("frame", "waits"),
    [
        ("barrier (torch/distributed/distributed_c10d.py:5356)", True),
        ("wait (deepspeed/runtime/zero/partition_parameters.py:80)", True),
        ("all_reduce (deepspeed/comm/torch.py:30)", True),
        ("synchronize (torch/cuda/__init__.py:1085)", True),
        ("ncclDevKernel_AllReduce_Sum_bf16 (libnccl.so.2)", True),
        ("gloo::transport::tcp::Buffer::wait (libtorch_cpu.so)", True),
        ("save_file (safetensors/torch.py:286)", False),
        ("write (torch/distributed/checkpoint/filesystem.py:300)", False),
        ("wait (threading.py:327)", False),
        ("__next__ (torch/utils/data/dataloader.py:725)", False),
    ],
)
def test_collectives_are_recognised(frame, waits):
    assert stacks.waits(stacks.frames(in_python(frame))) is waits


def test_only_innermost_frames_are_compared():
    """A loader that is called from a wrapper of torch.distributed is no collective."""
    text = in_python("read (a.py:1)", "next (b.py:1)", "c (c.py:1)", "forward (torch/nn/parallel/distributed.py:1)")
    assert not stacks.waits(stacks.frames(text))


# --- living processes ----------------------------------------------------------------------------

SITS = "import sys\ndef sits():\n    print(1, flush=True)\n    sys.stdin.read()\nsits()\n"


@pytest.fixture
def ranks():
    """Two Python processes that are ranks 4 and 5."""
    children = []
    for rank in (4, 5):
        env = {"RANK": str(rank), "PYTHONFAULTHANDLER": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        child = subprocess.Popen([sys.executable, "-c", SITS], env=env, **pipes)
        children.append(child)
        child.stdout.readline()
    yield children
    for child in children:
        child.kill()
        child.communicate()


def members(children):
    return {child.pid: stat_of(child.pid) for child in children}


def script(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_py_spy_of_the_release_is_used(tmp_path, ranks):
    spy = script(tmp_path / "bin" / "py-spy", 'echo "Thread 1 (idle): \\"MainThread\\""; echo "    f (a.py:$3)"\n')
    assert stacks.program(str(tmp_path)) == str(spy)
    found = stacks.collect(members(ranks), 0, str(tmp_path))
    assert sorted(found) == [4, 5]
    assert found[4].startswith(f"pid {ranks[0].pid}, state ")
    assert stacks.frames(found[5]) == [("f", "a.py", str(ranks[1].pid))]


def test_py_spy_that_cannot_pause_runs_again_without_pausing(tmp_path, ranks):
    text = '[ "$2" = --nonblocking ] || exit 1\necho "Thread 1 (idle)"; echo "    f (a.py:1)"\n'
    script(tmp_path / "bin" / "py-spy", text)
    found = stacks.collect(members(ranks), 0, str(tmp_path))
    assert [stacks.frames(text) for text in found.values()] == [[("f", "a.py", "1")]] * 2


def test_a_py_spy_that_hangs_is_not_waited_for(tmp_path, ranks, monkeypatch):
    monkeypatch.setattr(stacks, "PATIENCE", 0.5)
    monkeypatch.setattr(stacks, "AGAIN", 0.5)
    script(tmp_path / "bin" / "py-spy", "exec sleep 600\n")
    began = time.monotonic()
    found = stacks.collect(members(ranks), 0, str(tmp_path))
    assert time.monotonic() - began < 100  # py-spy takes 600
    assert sorted(found) == [4, 5]
    assert not any(stacks.frames(text) for text in found.values())


def test_without_py_spy_stacks_come_from_proc(ranks, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    found = stacks.collect(members(ranks), 0, "")
    assert all(line.startswith("pid ") for line in (text.splitlines()[0] for text in found.values()))
    assert len(found[4].splitlines()) > 1


def test_a_stopped_rank_is_named(ranks, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    ranks[1].send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, ranks[1].pid, os.WSTOPPED | os.WNOWAIT)
    found = stacks.collect(members(ranks), 0, "")
    assert found[5].splitlines()[0] == f"pid {ranks[1].pid}, state T"
    assert stacks.outliers(found) == [5]


@pytest.mark.parametrize("stopped", [False, True])
def test_faulthandler_writes_into_the_log_of_the_rank(ranks, stopped):
    child = ranks[0]
    if stopped:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert stacks.ask_faulthandler(child.pid)
    text = child.communicate()[1].decode()
    assert child.returncode == -signal.SIGABRT
    assert stacks.frames(text)[-2:] == [("sits", "<string>", "4"), ("<module>", "<string>", "5")]
    assert not stacks.ask_faulthandler(child.pid)


@pytest.mark.skipif(not shutil.which("py-spy"), reason="needs py-spy on PATH")
def test_the_real_py_spy(ranks):
    found = stacks.collect(members(ranks), 0, "")
    assert stacks.frames(found[4])[-2:] == [("sits", "<string>", "4"), ("<module>", "<string>", "5")]
