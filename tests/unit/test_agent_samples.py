"""Samples of a run's resources, from recorded and from living sources."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.agent import metrics, sampling
from trainer.agent.contract import throttle
from trainer.agent.processes import Stat, stat_of

# nvidia-smi's own words: a healthy H100, one without a power sensor, one that has fallen off the bus.
ANSWER = """\
0, 98, 71542, 81559, 683.21, 61, 1980, 0x0000000000000004
1, 0, 4, 81559, [N/A], 33, 345, 0x0000000000000001
Unable to determine the device handle for GPU0000:B6:00.0: Unknown Error
"""
FIRST = {
    "index": 0, "use": 98, "memory": 71542 << 20, "memory_total": 81559 << 20, "power": 683.21, "temperature": 61,
    "clock": 1980, "clock_max": None, "throttle": ["sw_power_cap"],
}  # fmt: skip
SECOND = {**FIRST, "index": 1, "use": 0, "memory": 4 << 20, "power": None, "temperature": 33}
SECOND.update(clock=345, throttle=["gpu_idle"])


def eventually(test, seconds=60.0):
    limit = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < limit, "did not happen"
        time.sleep(0.01)


def pid_of(gpus):
    return next(iter(gpus.pids), None)


def speaking(code):
    return (sys.executable, "-c", code)


@pytest.fixture
def listen():
    """Makes a Gpus that listens to another program."""
    made = []

    def make(*argv, argvs=None, constants=("/nonexistent",)):
        made.append(sampling.Gpus(argvs or [argv], constants))
        return made[-1]

    yield make
    for each in made:
        pids = each.pids
        each.close()
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


# --- GPUs ----------------------------------------------------------------------------------------


def test_output_of_nvidia_smi(listen):
    known = listen(*speaking(f"print({ANSWER!r}, flush=True); import signal; signal.pause()"))
    found = []

    def heard():
        found[:] = known.look(5.0) or []
        return len(found) == 2

    eventually(heard)
    assert found[0] == FIRST
    assert found[1] == SECOND


def test_what_does_not_change_is_asked_once(listen, tmp_path):
    asked = tmp_path / "asked"
    answer = "echo 0, 1980, GPU-7e90cff1-3974; echo 1, [N/A], GPU-9f4e1c4d-470c; echo Unable to determine, x"
    constants = ("/bin/sh", "-c", f"echo >>{asked}; {answer}")
    known = listen(*speaking(f"print({ANSWER!r}, flush=True); import signal; signal.pause()"), constants=constants)
    eventually(lambda: (known.look(5.0) or [{}])[0].get("clock_max") and len(known.pids) == 1)
    assert [each["clock_max"] for each in known.look(20.0)] == [1980, None]
    assert known.indices == {"GPU-7e90cff1-3974": 0, "GPU-9f4e1c4d-470c": 1}
    known.look(5000.0)
    assert asked.read_text() == "\n"


def test_newest_line_is_used_and_an_old_one_expires(listen, tmp_path):
    message = tmp_path / "said"
    message.write_text("0, 1, 1, 1, 1, 1, 1, 0x0\n")
    known = listen("/bin/sh", "-c", f"cat {message}; exec sleep 600")
    eventually(lambda: known.look(5.0))
    assert known.look(35.0)[0]["use"] == 1
    assert known.look(35.1) is None
    assert pid_of(known) is None  # it hangs, and is not waited for


def test_a_line_comes_in_two_parts(listen, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    known = listen("/bin/sh", "-c", f"printf '0, 98, 71'; cat {gate}; exec sleep 600")
    known.look(1.0)
    with gate.open("w") as rest:
        assert known.look(1.5) is None
        rest.write("542, 81559, 683.21, 61, 1980, 0x0000000000000004\n")
    eventually(lambda: known.look(2.0))
    assert known.look(2.0) == [FIRST]


def test_hanging_nvidia_smi_delays_nothing(listen):
    known = listen("/bin/sh", "-c", "exec sleep 600")
    assert known.look(0.0) is None
    child = pid_of(known)
    assert known.look(30.0) is None
    assert pid_of(known) == child
    assert known.look(30.1) is None
    assert pid_of(known) is None
    assert os.waitpid(child, 0)[1] == 9  # it was killed: nothing waited for it


def test_exited_nvidia_smi_is_started_again_later(listen):
    known = listen("/bin/sh", "-c", "exit 9")
    known.look(0.0)
    first = pid_of(known)
    eventually(lambda: known.look(1.0) or pid_of(known) is None)
    known.look(299.0)
    assert pid_of(known) is None
    known.look(300.0)
    assert pid_of(known) not in (None, first)


def test_without_nvidia_smi(listen):
    known = listen("/nonexistent/nvidia-smi")
    assert known.look(0.0) is None
    assert known.look(1000.0) is None
    assert pid_of(known) is None


@pytest.mark.parametrize(
    "line",
    [
        "",
        "No devices were found",
        "NVIDIA-SMI has failed because, it, could, not, say, why, at, all",
        "0, 98, 71542, 81559, 683.21, 61",  # the middle of a longer line
        "-1, 1, 1, 1, 1, 1, 1, 0x0",
        "99999999, 1, 1, 1, 1, 1, 1, 0x0",
        "inf, 1, 1, 1, 1, 1, 1, 0x0",
    ],
)
def test_invalid_lines_are_ignored(line):
    assert sampling.gpu(line) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0x0000000000000000", []),
        ("0x0000000000000048", ["hw_slowdown", "hw_thermal_slowdown"]),  # recorded/gpu.throttle.yaml
        ("0x0000000000000088", ["hw_slowdown", "hw_power_brake_slowdown"]),
        ("0x0000000000000020", ["sw_thermal_slowdown"]),
        ("0x8000000000000001", ["gpu_idle", "other"]),
        ("[N/A]", None),
        ("[Not Supported]", None),
        ("-0x4", None),
        ("0x" + "f" * 100, None),
    ],
)
def test_throttle_reasons(text, found):
    line = f"0, inf, nan, 1e999, -1, [GPU requires reset], 1980, {text}"
    values = sampling.gpu(line)
    assert values["throttle"] == found
    assert (values["use"], values["memory"], values["memory_total"]) == (None,) * 3


def test_a_driver_that_knows_no_reason(listen):
    assert sampling.gpu("0, 98, 71542, 81559, 683.21, 61, 1410")["throttle"] is None
    refuses = ("/bin/sh", "-c", "echo 'Field \"clocks_event_reasons.active\" is not a valid field to query.'; exit 2")
    known = listen(argvs=[refuses, refuses, ("/bin/sh", "-c", "echo 0, 98, 1, 2, 3, 61, 1410; exec sleep 600")])
    eventually(lambda: known.look(1.0))
    assert known.look(1.0)[0]["clock"] == 1410


@pytest.mark.parametrize(
    ("found", "slow"),
    [
        (None, ()),
        ("hw_slowdown", ()),
        (["gpu_idle"], ()),
        (["sw_power_cap", "hw_slowdown", "hw_thermal_slowdown"], ("hw_thermal_slowdown", "sw_power_cap")),
        (["hw_slowdown", ["x"], "<b>"], ("hw_slowdown",)),
    ],
)
def test_reasons_that_slow_a_gpu_down(found, slow):
    assert throttle.slowing(found) == slow


# --- the rest ------------------------------------------------------------------------------------

NET = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier
    lo: {0} 1 0 0 0 0 0 0 {0} 1 0 0 0 0 0 0
  eth0: {1} 9 0 0 0 0 0 0 {2} 9 0 0 0 0 0 0
veth12: {1} 9 0 0 0 0 0 0 {2} 9 0 0 0 0 0 0
"""


class Machine:
    """A /proc and a /sys of our own, and a clock."""

    def __init__(self, folder):
        self.folder = folder
        self.now = 100.0
        self.proc, self.sys = folder / "proc", folder / "sys"
        (self.proc / "net").mkdir(parents=True)
        (self.proc / "meminfo").write_text("MemTotal:  1000 kB\nMemFree: 3 kB\nMemAvailable:   600 kB\n")
        self.counters = self.sys / "class/infiniband/mlx5_0/ports/1/counters"
        self.counters.mkdir(parents=True)
        self.traffic(0, 0)
        self.sampler = sampling.Sampler(
            0,
            str(folder),
            sampling.Gpus([("/nonexistent",)], ("/nonexistent",)),
            lambda: self.now,
            str(self.proc),
            str(self.sys),
        )

    def traffic(self, inward, outward):
        (self.proc / "net/dev").write_text(NET.format(7 * inward, inward, outward))
        (self.counters / "port_rcv_data").write_text(f"{inward}\n")
        (self.counters / "port_xmit_data").write_text(f"{outward}\n")

    def sample(self, members=None, after=10.0):
        self.now += after
        return self.sampler.sample(members or {})


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_the_first_sample_has_no_rates(machine):
    sample = machine.sample()
    assert sample["memory_total"] == 1000 << 10
    assert sample["memory_available"] == 600 << 10
    assert sample["disk_free"] > 0
    assert sample["load"] >= 0
    assert abs(sample["time"] - time.time()) < 10
    assert not {"cpu", "network", "infiniband", "gpus"} & sample.keys()


def test_rates(machine):
    machine.sample()
    machine.traffic(5000, 20000)
    sample = machine.sample()
    assert sample["network"] == {"eth0": {"in": 500, "out": 2000}}
    assert sample["infiniband"] == {"mlx5_0/1": {"in": 2000, "out": 8000}}
    assert machine.sample()["network"] == {"eth0": {"in": 0, "out": 0}}


def test_a_counter_that_restarts(machine):
    machine.traffic(5000, 5000)
    machine.sample()
    machine.traffic(10, 10)
    sample = machine.sample()
    assert (sample["network"], sample["infiniband"]) == ({}, {})


def test_interface_and_port_that_appear_and_disappear(machine):
    machine.sample()
    (machine.proc / "net/dev").write_text("\n\n  ib0: 1 2 3 4 5 6 7 8 9 0\n")
    (machine.counters / "port_rcv_data").unlink()
    sample = machine.sample()
    assert (sample["network"], sample["infiniband"]) == ({}, {})


def test_machine_without_counters(tmp_path):
    nowhere = str(tmp_path / "none")
    sampler = sampling.Sampler(
        0, nowhere, sampling.Gpus([("/nonexistent",)], ("/nonexistent",)), proc=nowhere, sys=nowhere
    )
    assert set(sampler.sample({})) - {"load"} == {"time", "rss"}
    json.dumps(sampler.sample({1 << 22: Stat("S", 1, "5")}))


def test_processor_time_of_ranks(machine, monkeypatch):
    ranks = {100: 0, 101: 0, 200: 1}
    monkeypatch.setattr(sampling.Proc, "rank", lambda _self, pid, _: ranks.get(pid))

    def members(*ticks):
        return {pid: Stat("R", 1, "5", used) for pid, used in zip((100, 101, 200, 300), ticks, strict=True)}

    hertz = os.sysconf("SC_CLK_TCK")
    machine.sample(members(0, 0, 50, 0))
    assert machine.sample(members(10 * hertz, 5 * hertz, 50, 99))["cpu"] == {"0": 1.5, "1": 0.0}
    new = {100: Stat("R", 1, "77", 10**6)}  # another process with an old pid: its earlier time is not the run's
    assert machine.sample(new)["cpu"] == {"0": 0.0}


def test_memory_of_living_processes(machine):
    with subprocess.Popen(
        [sys.executable, "-c", "x = bytearray(50 << 20); print(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        child.stdout.readline()
        rss = machine.sample({child.pid: stat_of(child.pid)})["rss"]
        child.communicate(b"\n")
    assert 50 << 20 < rss < 100 << 20
    assert machine.sample()["rss"] == 0


def test_child_of_the_sampler_is_not_a_process_of_the_run(listen, tmp_path):
    known = listen(*speaking(f"print({ANSWER!r}, flush=True); import signal; signal.pause()"))
    sampler = sampling.Sampler(0, str(tmp_path), known)
    eventually(lambda: "gpus" in sampler.sample({}))
    child = pid_of(known)
    assert sampler.own() == {child}
    assert sampler.sample({child: stat_of(child)})["rss"] == 0
    sampler.close()
    assert sampler.own() == set()
    with contextlib.suppress(ChildProcessError):  # close has reaped it, if it died at once
        assert os.waitpid(child, 0)[1] == 9
    assert stat_of(child) is None


def test_a_sample_is_cheap(tmp_path):
    """0.2 % of a core at one sample in ten seconds are 20 ms."""
    sampler = sampling.Sampler(0, str(tmp_path), sampling.Gpus([("/nonexistent",)], ("/nonexistent",)))
    mine = stat_of(os.getpid())
    many = {int(path.name): mine for path in list(Path("/proc").glob("[0-9]*"))[:72]}
    sampler.sample(many)
    began = time.process_time()
    for _ in range(10):
        sampler.sample(many)
    assert (time.process_time() - began) / 10 < 0.02


# --- the file ------------------------------------------------------------------------------------


def test_appending(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert metrics.append(str(path), {"a": 1})
    assert metrics.append(str(path), {"a": 2})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 1}, {"a": 2}]


def test_the_file_is_bounded_and_keeps_the_latest(tmp_path):
    path, before = tmp_path / "metrics.jsonl", tmp_path / "metrics.jsonl.1"
    for number in range(1000):
        assert metrics.append(str(path), {"number": number}, limit=1000)
        assert path.stat().st_size <= 500
    assert path.stat().st_size + before.stat().st_size <= 1000
    kept = [json.loads(line)["number"] for line in (before.read_text() + path.read_text()).splitlines()]
    assert kept == list(range(1000 - len(kept), 1000))
    assert len(kept) > 30


def test_a_full_disk(tmp_path):
    assert not metrics.append("/dev/full", {"a": 1})
    assert not metrics.append(str(tmp_path / "none" / "metrics.jsonl"), {"a": 1})


def test_partly_written_line_is_removed(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    assert metrics.append(str(path), {"a": 1})
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:4]))
    assert not metrics.append(str(path), {"a": 2})
    monkeypatch.undo()
    assert metrics.append(str(path), {"a": 3})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 1}, {"a": 3}]
