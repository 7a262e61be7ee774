"""The agent as a daemon on one node: start, follow, stop, and what happens when one of its two processes is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import PYTHON, RANK, SAVE, STUBBORN, Run, alive, eventually, lives, suspend

from trainer.agent import run_files, start, stop

SLEEPS = "import time; print('ready'); time.sleep(600)"
LEAVES_THE_SESSION = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], "pid"], start_new_session=True)
time.sleep(600)
"""
WIPES = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], "pid"], start_new_session=True, env={})
time.sleep(600)
"""


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    yield run
    run.close()


def ready(run):
    eventually(lambda: any(event.get("line") == "ready" for event in run.events()))


# --- start ---------------------------------------------------------------------------------------


def test_daemon_survives_its_starter_and_its_session(run):
    run.plan(SLEEPS)
    with subprocess.Popen(run.command("start"), stdout=subprocess.PIPE, start_new_session=True) as starter:
        message = json.loads(starter.stdout.read())
    assert starter.returncode == 0
    ready(run)
    for pid in (message["pid"], message["guard"]):
        assert os.getsid(pid) == message["guard"] != starter.pid
        log = run.logs / "agent.log"
        assert [Path(f"/proc/{pid}/fd/{fd}").readlink() for fd in (0, 1, 2)] == [Path(os.devnull), log, log]
        assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
    assert Path(f"/proc/{message['guard']}/stat").read_text().split()[6] == "0"  # no terminal
    assert run.do("stop")["state"] == "stopped"
    run.wait_end()


def test_a_save_that_is_over_before_the_agent_looks_is_an_event(run):
    lines = "\\n".join(f"clusterctl: phase {phase}" for phase in ("training", "saving", "training"))
    run.plan(f"import time; print('{lines}', flush=True); time.sleep(600)").begin()
    eventually(lambda: [event for event in run.events() if event.get("phase") == "training"])
    assert [event["phase"] for event in run.events() if event["event"] == "phase"] == ["saving", "training"]
    run.do("stop")


def test_start_reports_the_process_that_owns_the_run(run):
    message = run.plan(SLEEPS).begin()
    state = run.state()
    assert (message["pid"], message["guard"]) == (state["pid"], state["guard"])
    assert state["start"] == Path(f"/proc/{state['pid']}/stat").read_text().rpartition(")")[2].split()[19]
    assert message["at"] == 0


def test_two_starts_of_one_plan(run):
    message = run.plan(SLEEPS).begin()
    again = run.do("start", check=False)
    assert again["rc"] == 1
    assert again["error"] == f"the run {run.id} is already running on n0 (process {message['pid']})"
    assert lives(message["pid"])


def test_two_starts_at_once(run):
    run.plan(SLEEPS)
    both = [subprocess.Popen(run.command("start"), stdout=subprocess.PIPE) for _ in range(2)]
    message = [json.loads(each.communicate(timeout=60)[0]) for each in both]
    assert sorted(each["started"] for each in message) == [False, True]
    eventually(lambda: run.state().get("state") == "running")
    assert len(alive(run.mark)) == 1


def test_a_start_that_cannot_write(run, tmp_path):
    (tmp_path / "logs").write_text("in the way")
    message = run.plan(SLEEPS).do("start", check=False)
    assert message["rc"] == 1
    assert "logs" in message["error"]


def test_a_run_may_be_started_again_after_its_end(run):
    run.plan("print('one')").begin()
    run.wait_end()
    before = (run.logs / "events.jsonl").stat().st_size
    assert run.plan("print('two')").begin()["at"] == before
    eventually(lambda: len([event for event in run.events() if event["event"] == "end"]) == 2)


# --- follow --------------------------------------------------------------------------------------


def follow(run, *arguments):
    return subprocess.Popen(run.command("follow", *arguments), stdout=subprocess.PIPE, text=True)


def test_following_to_the_end_and_from_an_offset(run):
    run.plan("for i in range(3): print(i)").begin()
    with follow(run) as follower:
        first = [json.loads(line) for line in follower.stdout]
    assert follower.returncode == 0
    assert [event["line"] for event in first if event["event"] == "log"] == ["0", "1", "2"]
    assert first[-1]["event"] == "end"
    assert first[-1]["at"] == (run.logs / "events.jsonl").stat().st_size
    with follow(run, "--from", str(first[2]["at"])) as follower:
        assert [json.loads(line) for line in follower.stdout] == first[3:]


def test_follow_prints_lines_immediately(run):
    waits = "while not os.path.exists({!r}): time.sleep(0.01)\n"
    run.plan(f"import os, time\n{waits.format('go')}print('went')\n{waits.format('end')}").begin()
    with follow(run) as follower:
        for line in follower.stdout:
            if json.loads(line)["event"] == "started":
                break
        (run.folder / "go").touch()
        for line in follower.stdout:
            if json.loads(line).get("line") == "went":
                break
        (run.folder / "end").touch()  # the run waits for this, so the line came while it was running
        assert json.loads(follower.stdout.read().splitlines()[-1])["event"] == "end"


def test_follow_exits_when_its_reader_closes(run):
    run.plan(SLEEPS).begin()
    follower = follow(run)
    follower.stdout.readline()
    follower.stdout.close()
    assert follower.wait(timeout=60) == 1


def test_following_an_agent_that_was_killed(run):
    run.plan(SLEEPS).begin()
    ready(run)
    with follow(run) as follower:
        for line in follower.stdout:
            if json.loads(line).get("line") == "ready":
                break
        kill_both(run)
        rest = [json.loads(line) for line in follower.stdout]
    assert rest[-1]["event"] == "gone"


def test_follow_of_a_run_whose_end_was_not_written(run):
    run.plan("print('ready')").begin()
    run.wait_end()
    path = run.logs / "events.jsonl"
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:-1]))
    with follow(run) as follower:
        last = [json.loads(line) for line in follower.stdout][-1]
    assert (last["event"], last["state"]) == ("end", "finished")


# --- the agent is killed -------------------------------------------------------------------------


def kill_both(run):
    """Kill both processes as if at one instant: the supervisor is stopped first and cannot report the guard's death."""
    state = run.state()
    suspend(state["pid"])
    os.kill(state["guard"], signal.SIGKILL)
    os.kill(state["pid"], signal.SIGKILL)
    eventually(lambda: not lives(state["guard"]) and not lives(state["pid"]))


@pytest.mark.parametrize("code", [LEAVES_THE_SESSION, WIPES])
def test_the_supervisor_is_killed(run, code):
    run.plan(code, STUBBORN).begin()
    stubborn = int(run.wait_for("pid"))
    os.kill(run.state()["pid"], signal.SIGKILL)
    end = run.wait_end()
    assert not lives(stubborn)
    assert end["state"] == "failed"
    assert end["why"] == {"node": "n0", "rank": None, "text": "the agent was killed by SIGKILL"}
    assert [event["event"] for event in run.events()][-2:] == ["exit", "end"]


@pytest.mark.parametrize("code", [LEAVES_THE_SESSION, WIPES])
def test_the_guard_is_killed(run, code):
    run.plan(code, STUBBORN).begin()
    stubborn = int(run.wait_for("pid"))
    eventually(lambda: run.state().get("state") == "running")
    os.kill(run.state()["guard"], signal.SIGKILL)
    end = run.wait_end()
    assert not lives(stubborn)
    assert end["why"]["text"] == "the agent's guard was killed"


def test_both_are_killed_and_stop_cleans(run):
    run.plan(LEAVES_THE_SESSION, STUBBORN).begin()
    stubborn = int(run.wait_for("pid"))
    kill_both(run)
    assert lives(stubborn)
    message = run.do("stop")
    assert (message["left"], message["state"]) == ([], "stopped")
    assert not lives(stubborn)
    assert run.wait_end()["state"] == "stopped"


def test_the_next_agent_ends_what_a_killed_one_has_left(run):
    run.plan("import time; time.sleep(600)").begin()
    (pid,) = eventually(run.left)
    suspend(pid)
    kill_both(run)
    run.plan("pass").begin()
    assert run.wait_end()["state"] == "finished"
    assert not lives(pid)
    notices = [event["text"] for event in run.events() if event["event"] == "notice"]
    assert notices == ["ended processes that an earlier agent of the run had left: 1"]


def test_a_crash_of_the_agent(run):
    run.plan(SLEEPS, resume={"output": "no\0path"}, resuming=True).begin()
    eventually(lambda: run.state().get("state") == "failed")
    assert "agent.log" in run.state()["why"]["text"]
    assert "null" in run.log()


# --- stop ----------------------------------------------------------------------------------------


def test_stop_and_proof(run):
    run.plan(LEAVES_THE_SESSION, STUBBORN).begin()
    run.wait_for("pid")
    message = run.do("stop", "--who", "alice at example")
    assert {key: message[key] for key in ("event", "left", "gpu", "port_free", "state", "saved")} == {
        "event": "stopped",
        "left": [],
        "gpu": [],
        "port_free": True,
        "state": "stopped",
        "saved": False,
    }
    assert run.wait_end()["state"] == "stopped"
    assert any(event.get("text") == "alice at example requested a stop" for event in run.events())


def test_stop_of_a_finished_run(run):
    run.plan("pass").begin()
    run.wait_end()
    assert run.do("stop")["state"] == "finished"
    assert run.events()[-1]["state"] == "finished"


@pytest.mark.parametrize("whom", ["guard", "pid", "both"])
def test_stop_of_a_stopped_agent(run, whom):
    run.plan(SLEEPS).begin()
    ready(run)
    for key in ("guard", "pid") if whom == "both" else (whom,):
        os.kill(run.state()[key], signal.SIGSTOP)
    assert run.do("stop", "--patience", 3)["left"] == []
    assert run.left() == []
    assert run.state()["state"] == "stopped"


def test_stop_waits_for_the_port(run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        run.plan(SLEEPS, port=server.getsockname()[1]).begin()
        ready(run)
        message = run.do("stop", check=False)
    assert (message["rc"], message["port_free"], message["left"]) == (1, False, [])


def test_stop_reports_processes_on_a_gpu(run, tmp_path):
    """A driver may hold memory for a process that no longer exists; nvidia-smi shows it."""
    (tmp_path / "bin").mkdir()
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.write_text(
        f"#!/bin/sh\nread calls <{tmp_path}/calls; echo $((calls - 1)) >{tmp_path}/calls\n"
        f"[ $calls -gt 0 ] && cat {tmp_path}/holders\nexit 0\n"
    )
    smi.chmod(0o755)
    (tmp_path / "calls").write_text("0\n")
    run.plan(SLEEPS).begin()
    ready(run)
    holder = run.left()[0]
    with subprocess.Popen(["/bin/sleep", "600"], env={"CLUSTERCTL_RUN": run.id, "CLUSTERCTL_NODE": "n0"}) as child:
        # A zombie of the run: exited, and not collected by its parent, which is this test.
        eventually(lambda: child.pid in run.left())
        (tmp_path / "holders").write_text(f"{child.pid}\n{holder}\n1\n")
        (tmp_path / "calls").write_text("3\n")
        message = run.do("stop", env=dict(os.environ, PATH=f"{tmp_path}/bin:{os.environ['PATH']}"))
    assert message["gpu"] == []
    assert int((tmp_path / "calls").read_text()) < 0  # it was asked until no process held one


def test_stop_of_another_users_run(run, monkeypatch):
    run.plan(SLEEPS).begin()
    ready(run)
    loaded = run_files.load_plan(str(run.path))
    owner = start.owner_name(os.getuid())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1000)
    with pytest.raises(stop.RefusedError, match=f"belongs to {owner}: only {owner} or root may stop it"):
        stop.stop(loaded, save=False, who="mallory", patience=1)
    assert run.state()["state"] == "running"


def test_stop_of_a_run_whose_plan_may_not_be_read(run, monkeypatch, capsys):
    from trainer.agent import __main__ as module

    run.plan(SLEEPS)
    monkeypatch.setattr(Path, "open", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "denied")))
    assert module.main(["stop", str(run.path)]) == 1
    assert "or root may stop it" in json.loads(capsys.readouterr().out)["error"]


SAVES_WHEN_ASKED = (
    SAVE
    + """
import signal, threading, time
asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.set())
print("ready")
while not asked.wait(0.05):
    pass
time.sleep(1)
save(7, rank=None)
sys.exit(1)
"""
)


def test_stop_and_save(run):
    run.plan(SAVES_WHEN_ASKED, resume={"output": "out", "argv": []}, grace=0.2).begin()
    ready(run)
    message = run.do("stop", "--save")
    assert (message["step"], message["saved"], message["state"]) == (7, True, "stopped")
    end = run.wait_end()
    assert (end["step"], end["saved"]) == (7, True)


def test_stop_and_save_of_a_trainer_that_saves_nothing(run):
    run.plan(SLEEPS, resume={"output": "out", "argv": []}).begin()
    ready(run)
    message = run.do("stop", "--save")
    assert (message["saved"], message["state"]) == (False, "stopped")


WAITS_AND_SAVES = """
import signal, sys, threading
asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.set())
sys.stdout.write("ready\\n")  # in one piece: the ranks share a pipe
while not asked.wait(0.05):
    pass
time.sleep(1)
sys.stdout.write("saved\\n")
"""


def test_only_ranks_are_asked_to_save(run):
    """A launcher would pass the signal on and kill its ranks soon after."""
    code = RANK.replace("time.sleep(600)", WAITS_AND_SAVES)
    run.launch(2, code=code, resume={"output": "out", "argv": []}, grace=0.2).begin()
    for rank in (0, 1):
        run.rank_pid(rank)
    eventually(lambda: len([event for event in run.events() if event.get("line") == "ready"]) == 2)
    message = run.do("stop", "--save")
    assert message["state"] == "stopped"
    assert len([event for event in run.events() if event.get("line") == "saved"]) == 2
    assert next(event for event in run.events() if event["event"] == "exit")["rc"] == 0


def test_stop_without_saving_overrides_a_stop_that_saves(run):
    run.plan(STUBBORN, "pid", resume={"output": "out", "argv": []}).begin()
    run.wait_for("pid")
    with subprocess.Popen(run.command("stop", "--save"), stdout=subprocess.PIPE) as saving:
        eventually(lambda: run.state().get("state") == "ending")
        assert run.do("stop")["state"] == "stopped"
        assert json.loads(saving.stdout.read())["saved"] is False


# --- ranks ---------------------------------------------------------------------------------------


def test_killed_rank_is_detected_before_its_launcher_exits(run):
    if subprocess.run([PYTHON, "-c", "import os; os.pidfd_open"], capture_output=True, check=False).returncode:
        pytest.skip("without pidfds the launcher tells")
    run.launch(2, first=4, lag=600).begin()  # its launcher would notice after ten minutes
    victim = run.rank_pid(5)
    run.rank_pid(4)
    eventually(lambda: pidfds(run.state()["pid"]) >= 2)  # the agent has seen both ranks
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: run.left() == [])
    assert run.wait_end()["why"] == {"node": "n0", "rank": 5, "text": "rank 5 was killed by SIGKILL"}


def pidfds(pid):
    """How many processes a process holds on to."""
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found += "pidfd" in str(link.readlink())
    return found


def test_the_launcher_is_killed(run):
    run.launch(2).begin()
    ranks = [run.rank_pid(rank) for rank in (0, 1)]
    launcher = next(event["pid"] for event in run.events() if event["event"] == "started")
    os.kill(launcher, signal.SIGKILL)
    assert run.wait_end()["why"]["text"] == "the command was killed by SIGKILL"
    assert not any(map(lives, ranks))


def test_restarts_with_backoff_from_the_newest_checkpoint(run):
    code = """
done = int(sys.argv[-1].rpartition("-")[2]) if "resume" in sys.argv[-1] else 0
print("from", sys.argv[-1], "on port", os.environ["MASTER_PORT"], sys.argv[1])
if done < 2:
    save(done + 1, rank=None)
    sys.exit(9)
"""
    run.plan(
        SAVE + code,
        "{port}",
        port=23456,
        restarts=3,
        backoff=0.2,
        resume={"output": "out", "argv": ["resume={checkpoint}"], "env": {"FROM": "{checkpoint}"}},
    ).begin()
    end = run.wait_end()
    assert end["state"] == "finished", run.events()
    attempts = [event for event in run.events() if event["event"] == "attempt"]
    assert [event["checkpoint"] for event in attempts] == [None, "checkpoint-1", "checkpoint-2"]
    assert attempts[0]["port"] == 23456 != attempts[1]["port"]
    words = [event["line"].split() for event in run.events() if event["event"] == "log"]
    assert [each[1] for each in words[1:]] == [f"resume={run.folder}/out/checkpoint-{step}" for step in (1, 2)]
    assert [each[4] for each in words] == [each[5] for each in words] == [str(each["port"]) for each in attempts]
    assert run.state()["attempt"] == 3
    assert run.state()["step"] == 2  # its checkpoint's: the last attempt had nothing left to do


def test_a_restart_from_a_checkpoint_without_a_step_keeps_the_last_known_step(run):
    code = """
import pathlib, sys, zipfile
if "resume" not in sys.argv[-1]:
    print("step 7 loss 0.5")
    pathlib.Path("out").mkdir()
    with zipfile.ZipFile("out/latest.pt", "w") as file:
        file.writestr("data", "x")
    sys.exit(9)
"""
    run.plan(code, restarts=1, backoff=0.05, resume={"output": "out", "argv": ["resume={checkpoint}"]}).begin()
    assert run.wait_end()["state"] == "finished", run.events()
    assert [event["checkpoint"] for event in run.events() if event["event"] == "attempt"] == [None, "latest.pt"]
    assert (run.state()["attempt"], run.state()["step"], run.state()["loss"]) == (2, 7, 0.5)


def test_restarts_end(run):
    run.plan("import sys; sys.exit(4)", restarts=2, backoff=0.05).begin()
    end = run.wait_end()
    assert (end["state"], end["attempt"]) == ("failed", 3)
    assert [event["rc"] for event in run.events() if event["event"] == "exit"] == [4, 4, 4]


def test_stop_interrupts_the_wait_before_a_restart(run):
    run.plan("import sys; sys.exit(4)", restarts=1, backoff=600).begin()
    eventually(lambda: any(event["event"] == "exit" for event in run.events()))
    assert run.do("stop")["state"] == "stopped"  # it would have to wait for ten minutes
    assert len([event for event in run.events() if event["event"] == "exit"]) == 1


def test_resuming_without_a_checkpoint(run):
    plan = {"resume": {"output": "out", "argv": []}, "resuming": True}
    run.plan("pass", **plan).begin()
    assert "no complete checkpoint" in run.wait_end()["why"]["text"]
    run.plan("pass", none_ok=True, **plan).begin()
    eventually(lambda: [event["state"] for event in run.events() if event["event"] == "end"] == ["failed", "finished"])


def test_a_checkpoint_that_a_restart_does_not_use_is_named(run):
    half = "import os, sys; os.makedirs('out/checkpoint-7'); open('out/checkpoint-7/model.safetensors', 'w').close()"
    again = "import os, sys; sys.exit(0 if os.path.isdir('out/kept-1/checkpoint-7') else 4)"
    program = f"import os\nif os.path.isdir('out'): {again}\nelse:\n    {half}; sys.exit(4)"
    resume = {"output": "out", "argv": []}
    run.plan(program, resume=resume, none_ok=True, restarts=1, backoff=0.05).begin()
    assert run.wait_end()["state"] == "finished"
    reported = [event["text"] for event in run.events() if event["event"] == "notice"]
    assert [text for text in reported if "checkpoint-7" in text and "skipped" in text], reported


# --- logging out ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logind", "scope", "reported"),
    [
        (start.Logind(), False, False),
        (start.Logind(in_session=True), False, False),
        (start.Logind(in_session=True, kills=True), True, True),
        (start.Logind(in_session=True, kills=True, lingers=True), True, False),
        (start.Logind(in_session=True, kills=True, spared=("root", "alice")), False, False),
        (start.Logind(in_session=True, kills=True, only=("bob",)), False, False),
        (start.Logind(in_session=True, kills=True, only=("alice",), lingers=True), True, False),
        (start.Logind(kills=True), False, False),
    ],
)
def test_settings_of_logind_that_kill_a_run(logind, scope, reported):
    before, notice = start.way(logind, "alice")
    assert bool(before) == scope
    assert bool(notice) == reported
    if notice:
        assert "loginctl enable-linger alice" in notice


def test_costs_of_the_agent(run):
    run.launch(4, link=None).begin()
    for rank in range(4):
        run.rank_pid(rank)
    state = run.state()
    time.sleep(2)

    def used():
        fields = [Path(f"/proc/{state[key]}/stat").read_text().rpartition(")")[2].split() for key in ("pid", "guard")]
        return sum(int(field[11]) + int(field[12]) for field in fields) / os.sysconf("SC_CLK_TCK")

    def wakes():
        """How often their threads have waited for something and gone on; a busy machine makes that no more."""
        tasks = [task for key in ("pid", "guard") for task in Path(f"/proc/{state[key]}/task").iterdir()]
        return sum(
            int((task / "status").read_text().split("\nvoluntary_ctxt_switches:")[1].split()[0]) for task in tasks
        )

    before, woken, began = used(), wakes(), time.monotonic()
    time.sleep(4)
    seconds = time.monotonic() - began
    woken, share = (wakes() - woken) / seconds, (used() - before) / seconds
    memory = sum(
        int(Path(f"/proc/{state[key]}/status").read_text().split("VmRSS:")[1].split()[0]) for key in ("pid", "guard")
    )
    assert woken < 13  # a second; four looks at the files that grow, five at what the ranks wait for (signals.FASTEST)
    assert share < 0.02  # of CPU time; it is an eighth of that
    assert memory < 40 << 10  # kB


# --- under Slurm -----------------------------------------------------------------------------------


def test_await_waits_for_an_agent_that_another_program_starts(run):
    run.plan(SLEEPS)
    nothing = run.do("await", "--patience", "0.3", check=False)
    assert (nothing["rc"], nothing["started"]) == (1, False)
    assert "no agent started within 0.3 s" in nothing["error"]
    with subprocess.Popen(run.command("await", "--patience", "60"), stdout=subprocess.PIPE) as waiting:
        begun = run.begin()
        answer = json.loads(waiting.stdout.read())
    assert answer["started"] is True
    assert answer["pid"] == begun["pid"]
    run.do("stop")
    assert run.do("await", "--patience", "0.3")["started"] is True  # it has left events
    size = (run.logs / "events.jsonl").stat().st_size
    assert run.do("await", "--after", size, "--patience", "0.3", check=False)["started"] is False


def test_a_rank_that_dies_by_the_signal_that_stops_its_agent_has_not_failed(run, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    message = run.launch().begin()
    ranks = [run.folder / f"rank-{number}" for number in range(2)]
    eventually(lambda: all(path.exists() for path in ranks))
    os.kill(int(ranks[0].read_text()), signal.SIGTERM)
    time.sleep(0.4)  # longer than the agent needs to see it
    os.kill(message["pid"], signal.SIGTERM)
    assert run.wait_end()["state"] == "stopped"
    assert any(event.get("text") == "signal SIGTERM of Slurm job 12 requested a stop" for event in run.events())
