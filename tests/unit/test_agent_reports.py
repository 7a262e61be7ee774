"""What agents report to others: samples for node_exporter's textfile collector, and the user's command for events."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import Run, eventually, plan_of

from trainer.agent import notify, textfile
from trainer.agent.run_files import Events, NodePlan

SLEEPS = "import time; print('ready', flush=True); time.sleep(600)"
SAVES = """
cat >new
env >"env-$CLUSTERCTL_EVENT"
mv new "event-$CLUSTERCTL_EVENT"
"""
END = {"event": "end", "state": "failed", "why": {"node": "n1", "rank": 3, "text": "rank 3 exited"}, "attempt": 1}


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    yield run
    run.close()


def node_plan(tmp_path, **fields):
    return NodePlan(plan_of(**fields), tmp_path, tmp_path / "plan-0.json")


# --- textfile ------------------------------------------------------------------------------------


def test_textfile_exists_while_the_run_is_going(run, tmp_path):
    folder = tmp_path / "collector"
    folder.mkdir()
    stale = folder / "clusterctl-killed-0.prom"
    stale.write_text("")
    os.utime(stale, (0, 0))
    run.plan(SLEEPS, textfile=str(folder)).begin()
    path = folder / f"clusterctl-{run.id}-0.prom"
    eventually(path.exists)
    assert path.stat().st_mode & 0o777 == 0o644
    assert f'clusterctl_run_active{{run="{run.id}",node="n0"}} 1\n' in path.read_text()
    assert list(folder.iterdir()) == [path]
    run.do("stop")
    run.wait_end()
    assert list(folder.iterdir()) == []


def test_missing_folder_is_reported_once_and_a_later_one_is_used(tmp_path):
    folder = tmp_path / "later"
    plan = node_plan(tmp_path, textfile=str(folder))
    file = textfile.Textfile(plan, Events(tmp_path))
    for _ in range(3):
        file.write({"step": 1})
    [notice] = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert notice["text"] == f"no samples for node_exporter in {folder}: No such file or directory"
    folder.mkdir()
    file.write({"step": 2})
    assert "clusterctl_step" in textfile.path_of(plan).read_text()


def test_file_of_another_program_is_not_followed_or_overwritten(tmp_path):
    plan = node_plan(tmp_path, textfile=str(tmp_path))
    path, victim = textfile.path_of(plan), tmp_path / "victim"
    victim.write_text("kept")
    path.with_name(f".{path.name}.{os.getpid()}").symlink_to(victim)
    textfile.Textfile(plan, Events(tmp_path)).write({"step": 1})
    assert victim.read_text() == "kept"
    assert not path.exists()
    assert "File exists" in (tmp_path / "events.jsonl").read_text()


def test_size_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(textfile, "LIMIT", 100)
    plan = node_plan(tmp_path, textfile=str(tmp_path))
    textfile.Textfile(plan, Events(tmp_path)).write({"step": 1, "loss": 2})
    assert not textfile.path_of(plan).exists()
    assert "more than the 100 allowed" in (tmp_path / "events.jsonl").read_text()


# --- notify --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"), [("pass", "end"), ("import sys; sys.exit(3)", "failure")], ids=["end", "failure"]
)
def test_command_gets_the_end_as_json_and_as_variables(run, tmp_path, code, kind):
    run.plan(code, notify=SAVES).begin()
    path = tmp_path / f"event-{kind}"
    eventually(path.exists)
    event = json.loads(path.read_text())
    assert (event["event"], event["run"], event["node"]) == (kind, run.id, "n0")
    env = dict(line.split("=", 1) for line in (tmp_path / f"env-{kind}").read_text().splitlines() if "=" in line)
    assert env["CLUSTERCTL_EVENT_RUN"] == run.id
    assert env["CLUSTERCTL_EVENT_TEXT"] == event["text"]
    assert "CLUSTERCTL_RUN" not in env
    run.wait_end()


def test_restart_is_reported_with_its_number(run, tmp_path):
    command = 'cat >"event-$CLUSTERCTL_EVENT-$CLUSTERCTL_EVENT_ATTEMPT"'
    run.plan("import sys; sys.exit(3)", notify=command, restarts=1, backoff=0.0).begin()
    eventually(lambda: {"event-restart-1", "event-failure-2"} <= set(os.listdir(tmp_path)))  # noqa: PTH208
    run.wait_end()


def test_command_that_hangs_delays_neither_the_end_nor_a_stop(run, tmp_path):
    run.plan(SLEEPS, notify="echo >began; sleep 600").begin()
    began = time.monotonic()
    run.do("stop")
    run.wait_end()
    assert time.monotonic() - began < notify.PATIENCE
    eventually((tmp_path / "began").exists)


def test_killed_agent_is_reported_by_its_guard(run, tmp_path):
    message = run.plan(SLEEPS, notify=SAVES).begin()
    os.kill(message["pid"], 9)
    eventually((tmp_path / "event-failure").exists)
    assert json.loads((tmp_path / "event-failure").read_text())["text"] == "the agent was killed by SIGKILL"


@pytest.mark.parametrize(
    ("rank", "record", "stands_in", "kind"),
    [
        (0, END, False, "failure"),
        (1, END, False, None),
        (1, END, True, "failure"),
        (0, END | {"state": "stopped", "why": None}, False, "end"),
        (0, {"event": "notice", "text": "x", "kind": "restart"}, False, "restart"),
        (1, {"event": "notice", "text": "x", "kind": "restart"}, False, None),
        (1, {"event": "notice", "text": "x", "kind": "disk_full"}, False, "disk_full"),
        (1, {"event": "notice", "text": "x", "kind": "slowdown"}, False, "slowdown"),
        (0, {"event": "straggler", "text": "x", "kind": "disk", "state": "slow"}, False, "slowdown"),
        (0, {"event": "straggler", "text": "x", "kind": "disk", "state": "over"}, False, None),
        (1, {"event": "hang", "kind": "silent", "rank": 2, "text": "x"}, False, "hang"),
        (0, {"event": "notice", "text": "x"}, False, None),
        (0, {"event": "notice", "text": "x", "kind": "other"}, False, None),
        (0, {"event": "phase", "phase": "training"}, False, None),
    ],
)
def test_which_node_reports_what(tmp_path, rank, record, stands_in, kind):
    event = notify.notification(node_plan(tmp_path, node_rank=rank), record, stands_in=stands_in)
    assert (event and event["event"]) == kind


def test_arguments_and_inherited_variables_have_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    command = ": token-1234; tr '\\0' ' ' </proc/$$/cmdline >arguments; env >variables"
    assert notify.run_command(command, {"event": "end"}, tmp_path) is None
    assert (tmp_path / "arguments").read_text().startswith("/bin/sh /dev/fd/")
    assert "token" not in (tmp_path / "arguments").read_text()
    assert "secret" not in (tmp_path / "variables").read_text()


def test_text_of_an_event_means_nothing_to_the_shell(tmp_path):
    text = '\'; touch "$HOME"/x $(touch y) `touch z`\n\0&'
    assert (
        notify.run_command('printf %s "$CLUSTERCTL_EVENT_TEXT" >text', {"event": "end", "text": text}, tmp_path) is None
    )
    assert (tmp_path / "text").read_text() == text.replace("\0", "")
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("echo no route >&2; exit 3", "exited with code 3: no route"),
        ("exit 0", None),
        ("yes >&2 & kill $!; head -c 1000000 /dev/zero | tr '\\0' x >&2; exit 1", "exited with code 1: xxx"),
        ("sleep 600", "took longer than 2 s"),
        ("sleep 600 & sleep 600 & wait", "took longer than 2 s"),
        ("if", "exited with code 2"),
    ],
)
def test_failures_are_described_in_bounded_time_and_text(tmp_path, command, problem):
    found = notify.run_command(command, {"event": "end"}, tmp_path, patience=2.0)
    assert found == problem or (found or "").startswith(problem or "none")
    assert len(found or "") < 2100


def test_failed_command_is_repeated_and_logged(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(notify, "PAUSE", 0.0)
    plan = node_plan(tmp_path, notify="echo >>tries; exit 1")
    assert notify.deliver(plan, b'{"event": "end"}') == 1
    assert (tmp_path / "tries").read_text().count("\n") == notify.TRIES
    assert "notify end, try 3 of 3: exited with code 1\n" in capfd.readouterr().err
    assert notify.deliver(plan, b"[]") == 2


def test_number_of_events_is_bounded_and_the_end_is_always_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(notify, "MOST", 2)
    plan = node_plan(tmp_path, notify="cat >>events")
    plan.path.write_text(plan.data.to_json())
    notifier = notify.Notifier(plan._replace(path=plan.path))
    for _ in range(5):
        notifier.take({"event": "hang", "text": "x"})
    notifier.take(END)
    found = eventually(
        lambda: (
            (tmp_path / "events").exists() and (lines := (tmp_path / "events").read_text().splitlines())[2:] and lines
        )
    )
    assert sorted(json.loads(line)["event"] for line in found) == ["failure", "hang", "hang"]
