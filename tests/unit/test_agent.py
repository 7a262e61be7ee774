"""The run agent against real processes: whatever they do, none of them is left."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

AGENT = Path(__file__).parents[2] / "trainer" / "agent"
PYTHON = os.environ.get("AGENT_PYTHON", sys.executable)  # to try the agent under an older Python
SOURCES = sorted((AGENT.parent).rglob("*.py"))

# A process that leaves its group and its session, says its pid in a file, and cannot be asked to end.
STUBBORN = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1] + ".new", "w").write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
while True:
    signal.pause()
"""


def alive(mark):
    """Pids of living processes whose environment holds ``mark``."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (path / "stat").read_bytes().rpartition(b")")[2].split()[0]
            if state not in b"ZX" and mark.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
    return found


def eventually(test, seconds=20.0):
    """Wait for what no descriptor tells."""
    limit = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < limit, "did not happen"
        time.sleep(0.01)


class Run:
    """An agent that carries out a plan."""

    def __init__(self, folder):
        self.folder = folder
        self.id = f"test-{uuid.uuid4().hex}"
        self.mark = f"CLUSTERCTL_RUN={self.id}"
        self.agent = None

    def start(self, code, *arguments, env=None, stdout=subprocess.PIPE, inherited=None, argv=None, **plan):
        plan = {
            "run": self.id,
            "node": "n0",
            "argv": argv or [sys.executable, "-c", code, *map(str, arguments)],
            "env": {"PYTHONUNBUFFERED": "1"} | (env or {}),
            "cwd": ".",
            "logs": "logs",
            "grace": 0.5,
        } | plan
        (self.folder / "plan-0.json").write_text(json.dumps(plan))
        self.agent = subprocess.Popen(
            [PYTHON, "-IB", AGENT, "run", self.folder / "plan-0.json"],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=inherited,
            text=True,
        )
        return self

    def until(self, event):
        """The next event of this kind."""
        for line in self.agent.stdout:
            said = json.loads(line)
            if said["event"] == event:
                return said
        raise AssertionError(self.agent.stderr.read())

    def finish(self):
        """All other events; nothing of the run is left then."""
        events = [json.loads(line) for line in self.agent.stdout]
        assert self.agent.wait() == (0 if events[-1].get("rc") == 0 else 1)
        assert alive(self.mark) == []
        assert self.agent.stderr.read() == ""
        assert [event["event"] for event in events].count("exit") == 1
        assert events[-1]["event"] == "exit"
        return events

    def lines(self):
        return [(event["rank"], event["line"]) for event in self.finish() if event["event"] == "log"]

    def wait_for(self, name):
        path = self.folder / name
        eventually(path.exists)
        return path.read_text()

    def close(self):
        if self.agent is None:
            return
        self.agent.kill()
        self.agent.wait()
        for stream in (self.agent.stdin, self.agent.stdout, self.agent.stderr):
            with contextlib.suppress(OSError):
                if stream:
                    stream.close()
        for pid in alive(self.mark):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    yield run
    run.close()


# --- how it ends ---------------------------------------------------------------------------------


def test_a_run_that_succeeds(run):
    events = run.start("print('hello')").finish()
    assert [event["event"] for event in events] == ["started", "log", "exit"]
    assert events[1]["rank"] is None
    assert events[1]["line"] == "hello"
    exit_ = {key: value for key, value in events[-1].items() if key != "time"}
    assert exit_ == {"event": "exit", "rc": 0, "signal": None, "stopped": False}


def test_a_run_that_fails(run):
    *_, exit_ = run.start("import sys; sys.exit(3)").finish()
    assert (exit_["rc"], exit_["signal"], exit_["stopped"]) == (3, None, False)


def test_a_run_that_dies_by_a_signal(run):
    *_, exit_ = run.start("import os; os.kill(os.getpid(), 11)").finish()
    assert (exit_["rc"], exit_["signal"], exit_["stopped"]) == (None, "SIGSEGV", False)


@pytest.mark.parametrize("program", ["/nowhere/python", "/"])
def test_a_command_that_cannot_be_started(run, program):
    *_, exit_ = run.start("", argv=[program]).finish()
    assert exit_["rc"] is None
    assert program in exit_["error"]


def test_a_plan_that_is_none(tmp_path):
    (tmp_path / "plan.json").write_text("{")
    argv = [PYTHON, "-IB", AGENT, "run", tmp_path / "plan.json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "plan.json" in done.stderr


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
    *_, exit_ = run.start(LEAVES_ONE.format(""), STUBBORN, rc).finish()
    assert exit_["rc"] == rc
    assert not Path(f"/proc/{run.wait_for('pid')}").exists()


def test_a_worker_that_wiped_its_environment(run):
    run.start(LEAVES_ONE.format("env={}"), STUBBORN, 0).finish()
    assert not Path(f"/proc/{run.wait_for('pid')}").exists()


WAITS_WITH_WORKERS = """
import subprocess, sys, time
for name in ("a", "b"):
    subprocess.Popen([sys.executable, "-c", sys.argv[1], name], start_new_session=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["stdin", "SIGTERM", "SIGINT", "SIGHUP"])
def test_stopping(run, how):
    run.start(WAITS_WITH_WORKERS, STUBBORN)
    for name in ("a", "b"):
        run.wait_for(name)
    assert len(alive(run.mark)) == 3
    if how == "stdin":
        run.agent.stdin.close()
    else:
        run.agent.send_signal(signal.Signals[how])
    *_, exit_ = run.finish()
    assert (exit_["rc"], exit_["signal"], exit_["stopped"]) == (None, "SIGTERM", True)


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
    assert events[0]["line"] == "saved"
    assert (events[-1]["rc"], events[-1]["stopped"]) == (0, True)


def test_a_process_that_sleeps_under_sigstop_is_ended_in_the_grace(run):
    run.start("import os, signal; print(1); os.kill(os.getpid(), signal.SIGSTOP)", grace=60)
    run.until("log")
    run.agent.stdin.close()
    *_, exit_ = run.finish()
    assert exit_["signal"] == "SIGTERM"


def test_a_controller_that_is_gone(run):
    """Its end of both pipes closes at once, while the run goes on writing."""
    run.start("import itertools\nfor i in itertools.count(): print(i)")
    run.until("log")
    run.agent.stdout.close()
    assert run.agent.wait(timeout=30) == 1
    assert alive(run.mark) == []
    assert run.agent.stderr.read() == ""


def test_a_controller_that_no_longer_reads(run):
    reading, writing = os.pipe()
    try:
        run.start("import itertools\nfor i in itertools.count(): print(i, 'x' * 1000, flush=True)", stdout=writing)
        log = run.folder / "logs" / "launcher.log"
        eventually(lambda: log.exists() and log.stat().st_size > 48 << 20)  # the run is not held up
        status = Path(f"/proc/{run.agent.pid}/status").read_text()
        assert int(status.split("VmRSS:")[1].split()[0]) < 50_000  # kB
        run.agent.terminate()
        eventually(lambda: alive(run.mark) == [])
    finally:
        os.close(writing)
        os.close(reading)
    assert run.agent.wait() == 1


def test_the_command_is_told_when_the_agent_is_killed(run):
    run.start("import time; print(1); time.sleep(600)")
    run.until("log")
    run.agent.kill()
    eventually(lambda: alive(run.mark) == [])


def test_another_node_of_the_run_on_this_machine_is_spared(run):
    env = {"CLUSTERCTL_RUN": run.id, "CLUSTERCTL_NODE": "n1"}
    with subprocess.Popen(["/bin/sleep", "600"], env=env) as other:
        run.start("pass")
        run.agent.wait()
        assert other.poll() is None
        other.kill()
    run.finish()


# --- what it tells -------------------------------------------------------------------------------


def test_a_progress_bar_is_one_line(run):
    code = r"""
import sys
for percent in range(0, 101, 5):
    sys.stderr.write(f"\r{percent}% done"); sys.stderr.flush()
sys.stderr.write("\ndone\n\n20%\r40%\r\nunfinished")
"""
    run.start(code)
    assert run.lines() == [(None, "100% done"), (None, "done"), (None, "40%"), (None, "unfinished")]
    assert b"\r50% done\r55% done" in (run.folder / "logs" / "launcher.log").read_bytes()


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
    run.start(code, "logs/ranks", rank_logs="logs/ranks", first_rank=8)
    assert sorted(run.lines()) == [(8, "last words 0"), (8, "out 0"), (9, "last words 1"), (9, "out 1")]
    kept = (run.folder / "logs" / "run.log").read_text().splitlines()
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
    told = [event for event in run.finish() if event["event"] == "progress"]
    for event in told:
        del event["time"]
    assert told == [
        {"event": "progress", "step": 1, "total": 2, "loss": 6.2, "lr": 0.1},
        {"event": "progress", "step": 2, "total": 2, "loss": None},
    ]


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
    (run.folder / "logs").mkdir()
    (run.folder / "logs" / "launcher.log").symlink_to("/dev/full")
    events = run.start("print('still here')").finish()
    assert "launcher.log" in next(event["text"] for event in events if event["event"] == "notice")
    assert events[-1]["rc"] == 0
    assert any(event.get("line") == "still here" for event in events)


# --- what the processes get ----------------------------------------------------------------------


def test_the_environment_is_clean(run):
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
    }


def test_private_folders(run):
    mine = run.folder / "cache"
    run.start("import os; print(oct(os.stat('cache/x').st_mode))", private=[str(mine), str(mine / "x")])
    assert run.lines() == [(None, "0o40700")]


@pytest.mark.parametrize("kind", ["open to others", "a link"])
def test_a_private_folder_that_somebody_else_could_have_made(run, kind):
    mine = run.folder / "cache"
    (run.folder / "elsewhere").mkdir(mode=0o700)
    if kind == "a link":
        mine.symlink_to(run.folder / "elsewhere")
    else:
        mine.mkdir()
        mine.chmod(0o777)
    *_, exit_ = run.start("pass", private=[str(mine)]).finish()
    assert str(mine) in exit_["error"]


# --- probe ---------------------------------------------------------------------------------------


def probe(*arguments, env=None):
    argv = [PYTHON, "-IB", AGENT, "probe", *map(str, arguments)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=env)
    return json.loads(done.stdout)


@pytest.fixture
def probing():
    spec = importlib.util.spec_from_file_location("agent_probe", AGENT / "probe.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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


def test_probe_of_a_name_that_means_nothing():
    facts = probe("--master", "no-such-name.invalid", "--rank", 1)
    assert facts["error"] == "the name no-such-name.invalid of rank 0 means nothing here"


def test_probe_of_a_rank_0_that_is_another_machine():
    facts = probe("--master", "192.0.2.77", "--rank", 0)
    assert "no address of this node" in facts["error"] or "no route" in facts["error"]


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
    assert probing.infiniband(str(tmp_path)) == [
        {"device": "mlx5_0", "port": 1, "state": "ACTIVE", "link_layer": "InfiniBand"},
        {"device": "mlx5_1", "port": 1, "state": "INIT", "link_layer": "Ethernet"},
    ]


# --- the source ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_python_3_8_reads_it_and_needs_nothing_else(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    ours = {each.stem for each in SOURCES}
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[0] for name in names} <= ours | sys.stdlib_module_names
