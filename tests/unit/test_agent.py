"""The run agent on one node, in the foreground, against real processes: none of them is left in any case."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from case_table import every_case

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import AGENT, PYTHON, STUBBORN, Run, alive, eventually, lives, plan_of

SOURCES = sorted(AGENT.rglob("*.py"))


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    yield run
    run.close()


# --- how it ends ---------------------------------------------------------------------------------


def test_a_run_that_succeeds(run):
    events = run.start("print('hello')").finish()
    assert [event["event"] for event in events] == ["attempt", "started", "log", "exit", "end"]
    assert events[2]["rank"] is None
    assert events[2]["line"] == "hello"
    assert {key: value for key, value in events[-2].items() if key != "time"} == {
        "event": "exit",
        "attempt": 1,
        "rc": 0,
        "signal": None,
        "stopped": False,
    }
    assert (events[-1]["state"], events[-1]["why"]) == ("finished", None)
    assert run.events() == events
    assert run.state()["state"] == "finished"


def test_a_run_that_fails(run):
    *_, exit_, end = run.start("import sys; sys.exit(3)").finish()
    assert (exit_["rc"], exit_["signal"], exit_["stopped"]) == (3, None, False)
    assert end["state"] == "failed"
    assert end["why"] == {"node": "n0", "rank": None, "text": "the command exited with code 3"}
    assert run.state()["why"] == end["why"]


def test_a_run_that_dies_by_a_signal(run):
    *_, exit_, end = run.start("import os; os.kill(os.getpid(), 11)").finish()
    assert (exit_["rc"], exit_["signal"], exit_["stopped"]) == (None, "SIGSEGV", False)
    assert end["why"]["text"] == "the command was killed by SIGSEGV"


@pytest.mark.parametrize("program", ["/nowhere/python", "/"])
def test_a_command_that_cannot_be_started(run, program):
    *_, exit_, end = run.start("", argv=[program]).finish()
    assert exit_["rc"] is None
    assert program in exit_["error"]
    assert program in end["why"]["text"]


@pytest.mark.parametrize("text", ["{", "[]", '{"run": "x", "node": "n0", "argv": "ls", "env": {}}'])
@pytest.mark.parametrize("command", ["start", "run", "stop", "follow"])
def test_invalid_plan(tmp_path, text, command):
    (tmp_path / "plan.json").write_text(text)
    argv = [PYTHON, "-IB", AGENT, command, tmp_path / "plan.json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "plan.json" in done.stderr
    assert "Traceback" not in done.stderr


# --- nothing is left -----------------------------------------------------------------------------

LEAVES_ONE = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], "pid"], start_new_session=True, {})
while not os.path.exists("pid"):
    pass
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("rc", [0, 3])
def test_a_worker_that_outlives_its_launcher(run, rc):
    assert run.start(LEAVES_ONE.format(""), STUBBORN, rc).exit()["rc"] == rc
    assert not lives(run.wait_for("pid"))


def test_a_worker_that_wiped_its_environment(run):
    run.start(LEAVES_ONE.format("env={}"), STUBBORN, 0).finish()
    assert not lives(run.wait_for("pid"))


WAITS_WITH_WORKERS = """
import subprocess, sys, time
for name in ("a", "b"):
    subprocess.Popen([sys.executable, "-c", sys.argv[1], name], start_new_session=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "SIGHUP"])
@pytest.mark.parametrize("whom", ["guard", "pid"])
def test_stopping_by_a_signal(run, how, whom):
    run.start(WAITS_WITH_WORKERS, STUBBORN)
    for name in ("a", "b"):
        run.wait_for(name)
    assert len(alive(run.mark)) == 3
    os.kill(run.state()[whom], signal.Signals[how])
    *_, exit_, end = run.finish()
    assert (exit_["rc"], exit_["signal"], exit_["stopped"]) == (None, "SIGTERM", True)
    assert (end["state"], end["why"]) == ("stopped", None)


def test_stopping_leaves_time_to_save(run):
    code = """
import signal, sys, threading
asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.set())
print("ready")
while not asked.wait(0.05):
    pass
print("saved")
"""
    run.start(code, grace=20)
    run.until("log")
    run.agent.terminate()
    events = run.finish()
    assert [event["line"] for event in events if event["event"] == "log"] == ["saved"]
    assert (events[-2]["rc"], events[-2]["stopped"]) == (0, True)
    assert events[-1]["state"] == "stopped"


def test_a_stop_that_saves_nothing_is_short(run):
    """Launchers take their time: DeepSpeed's 30 s for each rank, torchrun's Python some to end."""
    run.start(STUBBORN, "pid", grace=600)
    run.wait_for("pid")
    began = time.monotonic()
    run.agent.terminate()
    assert run.exit()["signal"] == "SIGKILL"
    assert time.monotonic() - began < 100  # 2 s of grace, not 600


def test_sampler_is_not_a_process_of_the_run(run, tmp_path):
    """Its nvidia-smi runs all the time, exits with the run, does not delay it, and is not reported as left over."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(
        f"#!{sys.executable}\nimport os, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(tmp_path / 'smi.new')!r}, 'w').write(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'smi.new')!r}, {str(tmp_path / 'smi')!r})\n"
        "while True: signal.pause()\n"
    )
    smi.chmod(0o755)
    code = "import os, time\nwhile not os.path.exists('smi'): time.sleep(0.01)"
    inherited = dict(os.environ, PATH=f"{smi.parent}:{os.environ['PATH']}")
    *_, exit_, end = run.start(code, inherited=inherited, grace=60).finish()
    assert (exit_["rc"], "left" in exit_, end["state"]) == (0, False, "finished")
    eventually(lambda: not lives(int((tmp_path / "smi").read_text())))


def test_stopped_process_exits_within_the_grace(run):
    run.start("import os, signal; print(1); os.kill(os.getpid(), signal.SIGSTOP)", grace=60)
    run.until("log")
    run.agent.terminate()
    assert run.exit()["signal"] == "SIGTERM"


def test_closed_reader_stops_nothing(run):
    run.start("import os, time; print(1)\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint(2)")
    run.until("log")
    run.agent.stdout.close()
    (run.folder / "go").touch()
    assert run.agent.wait(timeout=60) == 0
    assert [event["line"] for event in run.events() if event["event"] == "log"] == ["1", "2"]


def test_lines_without_end_fill_neither_the_memory_nor_the_events(run):
    run.start(
        "import itertools\nfor i in itertools.count(): print(i, 'x' * 1000, flush=True)", stdout=subprocess.DEVNULL
    )
    log = run.logs / "launcher.log"
    eventually(lambda: log.exists() and log.stat().st_size > 48 << 20)  # the run is not held up
    status = Path(f"/proc/{run.state()['pid']}/status").read_text()
    assert int(status.split("VmRSS:")[1].split()[0]) < 50_000  # kB
    run.agent.terminate()
    assert run.agent.wait(timeout=60) == 1
    assert alive(run.mark) == []
    events = run.events()
    assert (run.logs / "events.jsonl").stat().st_size < 16 << 20
    assert sum(event["lines"] for event in events if event["event"] == "dropped") > 1000


def test_another_node_of_the_run_on_this_machine_is_spared(run):
    env = {"CLUSTERCTL_RUN": run.id, "CLUSTERCTL_NODE": "n1"}
    with subprocess.Popen(["/bin/sleep", "600"], env=env) as other:
        run.start("pass")
        run.until("end")
        assert run.agent.wait(timeout=60) == 0
        spared = other.poll() is None
        other.kill()
    assert spared


# --- its events ----------------------------------------------------------------------------------


def test_a_progress_bar_is_one_line(run):
    code = r"""
import sys
for percent in range(0, 101, 5):
    sys.stderr.write(f"\r{percent}% done"); sys.stderr.flush()
sys.stderr.write("\ndone\n\n20%\r40%\r\nunfinished")
"""
    run.start(code)
    assert run.lines() == [(None, "100% done"), (None, "done"), (None, "40%"), (None, "unfinished")]
    assert b"\r50% done\r55% done" in (run.logs / "launcher.log").read_bytes()


def test_only_rank_0_follows_the_trainers_log(tmp_path):
    from trainer.agent.run_files import NodePlan

    plans = [NodePlan(plan_of(node_rank=rank, progress="log.jsonl"), tmp_path, tmp_path) for rank in range(2)]
    assert [plan.progress for plan in plans] == [tmp_path / "log.jsonl", None]


def test_growing_output_is_a_sign_of_life_even_without_a_complete_line(tmp_path):
    """A progress bar is no line until it ends, and yet a sign of life: of the launcher's, and of a rank's own log."""
    from trainer.agent.run_files import Events, NodePlan
    from trainer.agent.supervisor.output import Output

    heard = []
    plan = NodePlan(plan_of(first_rank=4), tmp_path, tmp_path / "plan-0.json")
    output = Output(plan, Events(tmp_path), *[lambda *_: None] * 3, lambda *message: heard.append(message))
    log = tmp_path / "ranks" / "x" / "attempt_0" / "1" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"10%\r20%\r")
    theirs, ours = os.pipe()
    os.write(ours, b"\r3%")
    output.look()
    output.take(theirs)
    output.report()
    assert [message for message in heard if message[1]] == [(None, 3), (5, 8)]
    os.close(ours)
    os.close(theirs)
    output.close()


def test_a_bar_without_end_and_a_line_without_end_stay_small(run):
    code = r"""
import sys
for i in range(20000):
    sys.stdout.write(f"\r{i}" + "#" * 500)
sys.stdout.write("\r" + "y" * 5_000_000 + "\n")
"""
    ((_, line),) = run.start(code).lines()
    assert line == "y" * 4096 + " … (4995904 more bytes)"


def test_garbage_does_not_reach_the_terminal(run):
    code = r"""
import os
os.write(1, b"\x1b[31mred\x1b[0m \x1b]0;title\x07\xff\xfe\x00\x9b bell\x07\ttab \xc3\xa9\n" + bytes(range(256)) + b"\n")
"""
    first, *rest = run.start(code).lines()
    assert first == (None, "red \ufffd\ufffd\ufffd bell\ttab é")
    assert all(char.isprintable() or char == "\t" for _, line in rest for char in line)


def test_the_logs_of_ranks(run):
    code = r"""
import os, sys, pathlib
folder = pathlib.Path(sys.argv[1]) / "none_x1y2" / "attempt_0"
for local in (0, 1):
    (folder / str(local)).mkdir(parents=True)
    (folder / str(local) / "stdout.log").write_text(f"out {local}\n")
    (folder / str(local) / "stderr.log").write_text(f"1/9\r2/9\rlast words {local}")
    (folder / str(local) / "error.json").write_text("{}")
"""
    run.start(code, "logs/node0/ranks", rank_logs="logs/node0/ranks", first_rank=8)
    assert sorted(run.lines()) == [(8, "last words 0"), (8, "out 0"), (9, "last words 1"), (9, "out 1")]
    kept = (run.logs / "run.log").read_text().splitlines()
    assert any(line.endswith("Z [9] out 1") for line in kept)
    assert len(kept) == 4


def test_progress(run):
    log = run.folder / "trainer_log.jsonl"
    log.write_text('{"current_steps": 99, "total_steps": 99}\n')
    code = r"""
import sys
with open("trainer_log.jsonl", "a") as log:
    log.write('{"current_steps": 1, "total_steps": 2, "loss": 6.2, "lr": 0.1, "remaining_time": "0:00:01"}\n')
    log.write('broken\n[1]\n{"current_steps": 2, "total_steps": 2, "loss": NaN}\n')
print("written")
sys.stdin.read()
"""
    run.start(code, progress="trainer_log.jsonl")
    received = [event for event in run.finish() if event["event"] == "progress"]
    for event in received:
        del event["time"], event["attempt"]
    assert received == [
        {"event": "progress", "step": 1, "total": 2, "loss": 6.2, "lr": 0.1},
        {"event": "progress", "step": 2, "total": 2, "loss": None},
    ]


HAND_WRITTEN = r"""
for step in range(1, 17):
    epoch, place = divmod(step - 1, 8)
    print("Epoch [%d/2] Step [%d/16] Loss: %.4f LR: 1.60e-03" % (epoch + 1, step, 6 - step / 16), flush=True)
"""


def test_progress_of_a_hand_written_loop_without_a_log(run):
    from trainer.agent.run_files import read_state

    run.start(HAND_WRITTEN)
    received = [event for event in run.finish() if event["event"] == "progress"]
    assert [(event["step"], event["loss"]) for event in received] == [
        (step, round(6 - step / 16, 4)) for step in range(1, 17)
    ]
    assert received[-1]["lr"] == 1.6e-3
    state = read_state(run.logs)
    assert (state["state"], state["step"], state["loss"]) == ("finished", 16, 5.0)


def test_progress_in_the_output_counts_only_without_the_trainers_log(run):
    (run.folder / "trainer_log.jsonl").write_text("")
    run.start(HAND_WRITTEN, progress="trainer_log.jsonl")
    assert [event for event in run.finish() if event["event"] == "progress"] == []


def test_progress_in_the_output_has_a_bounded_rate_and_keeps_the_first_and_the_last_loss(monkeypatch):
    from trainer.agent.supervisor import numbers

    monkeypatch.setattr(numbers.time, "monotonic", lambda: 1000.0)
    readings = []
    found = numbers.Numbers(lambda rank, reading: readings.append((rank, reading.step)))
    found.feed("file", 0, b"".join(b"step %d loss %d.5\n" % (step, step) for step in range(1, 1001)))
    events = found.take()
    assert len(events) <= numbers.BURST
    assert [each["loss"] for each in (events[0], events[-1])] == [1.5, 1000.5]
    assert readings == [(0, step) for step in range(1, 1001)]  # the watch has all of them
    found.feed("file", 0, b"step 1001 loss 2.5\n")
    assert found.take() == []
    assert found.take(last=True) == [{"step": 1001, "loss": 2.5}]


def test_progress_is_of_the_lowest_rank_with_a_loss_and_no_torn_line():
    from trainer.agent.supervisor import numbers

    found = numbers.Numbers(lambda *_: None)
    found.feed("b", 5, b"step 1 loss 2.5\nstep 2 lo")
    found.feed("a", 4, b"step 1 loss 2.0\n")
    found.feed("b", 5, b"ss 2.5\n")
    assert found.take() == [{"step": 1, "loss": 2.0}]
    found.feed("a", 4, b"17 loss 9.0\nstep 3 loss nan\n", skipped=99)
    assert found.take() == [{"step": 3, "loss": None}]


def test_progress_of_a_log_that_appears_late_and_is_replaced(run):
    code = r"""
import os, sys, time
def write(step, name="new"):
    os.makedirs("out", exist_ok=True)
    with open("out/" + name, "w") as log:
        log.write('{"current_steps": %d, "total_steps": 9}\n' % step)
    os.replace("out/" + name, "out/log")
for step in (1, 2):
    write(step)
    while not os.path.exists(f"seen-{step}"):
        time.sleep(0.01)
"""
    run.start(code, progress="out/log")
    for step in (1, 2):
        assert run.until("progress")["step"] == step
        (run.folder / f"seen-{step}").touch()
    run.finish()


def test_a_log_that_cannot_be_written_does_not_end_the_run(run):
    run.logs.mkdir(parents=True)
    (run.logs / "launcher.log").symlink_to("/dev/full")
    events = run.start("print('still here')").finish()
    assert "launcher.log" in next(event["text"] for event in events if event["event"] == "notice")
    assert events[-2]["rc"] == 0
    assert any(event.get("line") == "still here" for event in events)


@pytest.fixture
def eventing(tmp_path):
    """The module ``run_files`` with a disk of our own: ``room`` bytes are left on it."""
    from trainer.agent import run_files

    class Disk:
        room = 1 << 30

        def write(self, fd, data):
            if not self.room:
                raise OSError(28, "No space left on device")
            taken = data[: self.room]
            self.room -= len(taken)
            return os.write(fd, taken)

        def __getattr__(self, name):
            return getattr(os, name)

    disk = Disk()
    kept, run_files.os = run_files.os, disk
    yield run_files.Events(tmp_path), disk, tmp_path / run_files.EVENTS
    run_files.os = kept


def received(path):
    found = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def test_events_on_a_full_disk(eventing):
    events, disk, path = eventing
    events.emit("started", pid=1)
    disk.room = 20  # half a line
    events.emit("log", rank=0, line="lost")
    events.emit("notice", text="kept")
    for _ in range(5):
        events.emit("log", rank=0, line="lost")
    disk.room = 1 << 30
    events.emit("end", state="failed")
    events.close()
    found = received(path)
    assert [event["event"] for event in found] == ["started", "notice", "dropped", "end"]
    assert found[2]["lines"] == 6


def test_full_disk_keeps_only_the_newest_events(eventing):
    events, disk, path = eventing
    disk.room = 0
    for index in range(10_000):
        events.emit("notice", text=str(index))
    disk.room = 1 << 30
    events.close()
    assert [event["text"] for event in received(path)] == [str(index) for index in range(9_900, 10_000)]


def test_the_state_on_a_full_disk(tmp_path, monkeypatch):
    from trainer.agent import run_files

    kept = run_files.State(tmp_path, pid=1)
    kept.set(state="running")
    monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    kept.set(state="failed", why={"node": "n0", "rank": 3, "text": "x" * 100})
    assert run_files.read_state(tmp_path)["why"]["rank"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


# --- what the processes get ----------------------------------------------------------------------


def test_environment_of_the_run_is_clean(run):
    inherited = {"HOME": "/home/u", "PYTHONPATH": "/leak", "LD_PRELOAD": "", "FOO": "1", "NCCL_IB_HCA": "mlx5_0"}
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    run.start(code, inherited=inherited, env={"A": "b c"}, unset=["HOME"])
    ((_, line),) = run.lines()
    env = json.loads(line)
    env.pop("LC_CTYPE", None)  # Python's own
    assert env == {
        "A": "b c",
        "NCCL_IB_HCA": "mlx5_0",
        "PYTHONUNBUFFERED": "1",
        "CLUSTERCTL_RUN": run.id,
        "CLUSTERCTL_NODE": "n0",
        "NNODES": "1",
        "NODE_RANK": "0",
    }


def test_private_folders(run):
    mine = run.folder / "cache"
    run.start("import os; print(oct(os.stat('cache/x').st_mode))", private=[str(mine), str(mine / "x")])
    assert run.lines() == [(None, "0o40700")]


@pytest.mark.parametrize("kind", ["open to others", "a link"])
def test_a_private_folder_that_another_user_could_have_made(run, kind):
    mine = run.folder / "cache"
    (run.folder / "elsewhere").mkdir(mode=0o700)
    if kind == "a link":
        mine.symlink_to(run.folder / "elsewhere")
    else:
        mine.mkdir()
        mine.chmod(0o777)
    assert str(mine) in run.start("pass", private=[str(mine)]).exit()["error"]


# --- probe ---------------------------------------------------------------------------------------


def probe(*arguments, env=None):
    argv = [PYTHON, "-IB", AGENT, "probe", *map(str, arguments)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=env)
    return json.loads(done.stdout)


@pytest.fixture
def probing():
    from trainer.agent import probe as module

    return module


def test_probe_of_rank_0(tmp_path):
    facts = probe("--master", "127.0.0.1", "--rank", 0, "--folder", tmp_path, env={"PYTHONPATH": "/leak"})
    assert facts["error"] is None
    assert (facts["ip"], facts["interface"], facts["master_loopback"]) == ("127.0.0.1", "lo", True)
    assert 20000 <= facts["port"] < 30000
    assert facts["port_free"] is None
    assert facts["leaks"] == {"PYTHONPATH": "/leak"}
    assert facts["uid"] == os.getuid()
    assert facts["disk_free"] > 0
    assert facts["memory_available"] > 0
    assert abs(facts["clock"] - time.time()) < 30
    assert facts["hostname_resolves"] in {"address", "loopback", "no"}


def test_probe_of_another_rank_asks_for_no_port():
    facts = probe("--master", "127.0.0.1", "--rank", 1, "--port", 1)
    assert (facts["port"], facts["port_free"], facts["error"]) == (None, None, None)


def test_probe_of_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        facts = probe("--master", "127.0.0.1", "--rank", 0, "--port", port)
    assert facts["port_free"] is False
    assert facts["error"] == f"port {port} is in use"


def test_probe_of_a_free_port(probing):
    port = probing.free_port("127.0.0.1")
    assert probe("--master", "127.0.0.1", "--rank", 0, "--port", port)["port_free"] is True


def test_probe_of_a_name_without_an_address():
    facts = probe("--master", "no-such-name.invalid", "--rank", 1)
    assert facts["error"] == "cannot resolve no-such-name.invalid, the name of rank 0"


def test_probe_of_a_rank_0_that_is_another_machine():
    facts = probe("--master", "192.0.2.77", "--rank", 0)
    assert "not an address of this node" in facts["error"] or "no route" in facts["error"]


def test_interfaces_are_found_by_address(probing):
    found = probing.interfaces()
    assert found["127.0.0.1"] == "lo"
    assert set(found.values()) <= {path.name for path in Path("/sys/class/net").iterdir()}


def test_infiniband_ports(probing, tmp_path):
    for device, state, layer in [("mlx5_0", "4: ACTIVE", "InfiniBand"), ("mlx5_1", "2: INIT", "Ethernet")]:
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "link_layer").write_text(layer + "\n")
    shared = {"port": 1, "rate": None, "gid_index": None}
    assert probing.infiniband(str(tmp_path)) == [
        {"device": "mlx5_0", "state": "ACTIVE", "link_layer": "InfiniBand", **shared},
        {"device": "mlx5_1", "state": "INIT", "link_layer": "Ethernet", **shared},
    ]


# --- the source ----------------------------------------------------------------------------------


@every_case("path", SOURCES, ids=lambda path: path.name)
def test_python_3_8_reads_it_and_needs_nothing_else(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    ours = {each.relative_to(AGENT).parts[0].removesuffix(".py") for each in SOURCES}
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    assert {name.split(".")[0] for name in names} <= ours | sys.stdlib_module_names


def test_it_starts_as_a_folder_without_a_warning(tmp_path):
    """Python 3.13 shows a wrong ``__package__`` as a DeprecationWarning, 3.15 ignores it."""
    folder = tmp_path / "named"
    shutil.copytree(AGENT, folder, ignore=shutil.ignore_patterns("__pycache__"))
    argv = [sys.executable, "-IS", "-W", "error", folder, "digest", folder / "__init__.py"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
