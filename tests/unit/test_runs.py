"""Runs as they are found on the nodes, chosen by a word, shown, stopped with a proof, and brought here."""

import base64
import io
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from provision.errors import ClusterctlError, NodesFailedError, PreflightError, UsageError
from provision.inventory import load
from provision.model import CommandLine, Inventory, Node, Result
from provision.render import render
from provision.run import record
from provision.run.checkpoint import Conversion, checkpoints, conversion, sources
from provision.run.follow import Entry, entry, merged, pattern
from provision.run.found import LOST, UNKNOWN, merge_runs, pace_of, parse_runs
from provision.session import Outcome, Session
from provision.summaries.runs import run_lines, run_output, stop_output
from provision.tasks import runs as runs_module
from provision.tasks.logs import tail_script
from provision.tasks.resume import refuse_resume
from provision.tasks.runs import Runs, RunStatus, Stopped, find, list_script, parse_proof, refuse_others, stop_result
from provision.tasks.samples import prometheus
from provision.transfer.fetch import RemoteFile, UnrequestedFile, fetch, lacking, list_files, parse_list

NODE = Node("node01", "10.0.0.1")
SESSION = Session(Inventory(Path("inventory.yaml"), PurePosixPath("/opt/llm/current"), (NODE,)))


class Shell:
    """A node that is this machine."""

    def __init__(self, node=NODE):
        self.node = node

    def run(self, script, *, stdin=None, on_line=None, deadline=None, root=False):
        done = subprocess.run(
            ["sh", "-c", script], input=b"".join(stdin or ()), capture_output=True, check=False, timeout=60
        )
        out = done.stdout.decode("utf-8", "surrogateescape")
        for line in out.splitlines() if on_line else ():
            on_line(line)
        return Result(done.returncode, "" if on_line else out, done.stderr.decode())


def printed(node="node01", rank=0, state="running", **more):
    return {
        "run": "r1",
        "node": node,
        "node_rank": rank,
        "nnodes": 2,
        "state": state,
        "pid": 7,
        "start": "99",
        "boot_id": "boot",
        "step": 40,
        "total": 120,
        "loss": 1.25,
        "began": 1000.0,
        "uid": 0,
        "phase": "training",
        **more,
    }


STAT = "7 (python (x)) S 1" + " 0" * 17 + " 99 0"


def answer(*states, stat=STAT, samples=(), run="r1"):
    lines = ["me 0", "boot boot"]
    for state in states:
        lines += [f"part {run}/logs/node{state['node_rank']} alice", f"state {json.dumps(state)}"]
        lines += [f"stat {stat}"] if stat else []
        lines += [f"sample {json.dumps(sample)}" for sample in samples]
    return "\n".join(lines)


def runs_of(*answers):
    """By pairs of a node's name and what it said."""
    return merge_runs(parse_runs(name, out, ["node01", "node02"]) for name, out in answers)


# --- found ---------------------------------------------------------------------------------------


def test_run_is_merged_from_the_answers_of_its_nodes():
    run = runs_of(("node01", answer(printed())), ("node02", answer(printed("node02", 1))))["r1"]
    assert (run.nodes, run.state, run.live, run.missing, run.owner) == (
        ("node01", "node02"),
        "running",
        True,
        0,
        "alice",
    )


@pytest.mark.parametrize(
    ("stat", "change"),
    [
        ("", {}),
        (STAT.replace(" 99 ", " 98 "), {}),
        (STAT.replace(") S", ") Z"), {}),
        (STAT, {"boot_id": "before the last start"}),
    ],
)
def test_an_agent_that_exits_without_an_end_is_lost(stat, change):
    run = runs_of(("node01", answer(printed(**change), stat=stat)))["r1"]
    assert (run.state, run.live) == (LOST, False)


def test_answer_of_a_node_overrides_the_shared_folder():
    both = answer(printed(), printed("node02", 1))
    run = runs_of(("node01", both), ("node02", both))["r1"]
    assert [part.alive for part in run.parts] == [True, True]
    assert run.parts[1].seen_on == ("node01", "node02")
    only = runs_of(("node01", both))["r1"]
    assert [part.state for part in only.parts] == ["running", UNKNOWN]


def test_a_run_with_an_end_on_every_node_has_the_worst_of_them():
    ended = [
        ("node01", answer(printed(state="finished"), stat="")),
        ("node02", answer(printed("node02", 1, "failed"), stat="")),
    ]
    run = runs_of(*ended)["r1"]
    assert (run.state, run.ended, run.live) == ("failed", True, False)


def test_invalid_answers_are_skipped():
    out = "welcome\nme x\npart r1/logs/node0 a\nstate {broken\nstate\nsample 1\nstat\n"
    assert parse_runs("node01", out, ["node01"]).parts == ()
    assert merge_runs([parse_runs("node01", "", [])]) == {}


def test_pace_uses_the_last_samples_of_this_attempt():
    assert pace_of([{"time": 0, "step": 90}, {"time": 10, "step": 40}, {"time": 30, "step": 50}]) == 2
    assert pace_of([{"time": 0, "step": 4}]) is None
    samples = [{"time": 0, "step": 20}, {"time": 40, "step": 40}]
    assert runs_of(("node01", answer(printed(), samples=samples)))["r1"].left() == 160


def test_the_script_finds_a_living_agent_and_its_last_samples(tmp_path):
    pid = os.getpid()
    start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    for number, state in enumerate((printed(pid=pid, start=start, boot_id=boot), printed(state="finished", pid=1))):
        logs = tmp_path / "runs" / f"2026-{number}" / "logs" / "node0"
        logs.mkdir(parents=True)
        (logs / "state.json").write_text(json.dumps(state, indent=1) + " " * 100)
        (logs / "metrics.jsonl").write_text('{"time": 1, "step": 3}\n' * 40)
        (logs / "nccl-1.log").write_text("h:1:2 [0] NCCL INFO Using network Socket\n")
    (tmp_path / "runs" / "2026-9").mkdir()
    (tmp_path / "inventory.yaml").write_text(f"prefix: {tmp_path}/current\nnodes: {{node01: 10.0.0.1}}\n")
    inventory = load(tmp_path / "inventory.yaml")
    runs = runs_of(("node01", Shell().run(list_script(inventory)).out))
    assert {name: run.live for name, run in runs.items()} == {"2026-0": True, "2026-1": False}
    assert len(runs["2026-0"].head.samples) == 30
    assert runs["2026-0"].networks == ()
    assert list(runs_of(("node01", Shell().run(list_script(inventory, "-1")).out))) == ["2026-1"]
    assert runs_of(("node01", Shell().run(list_script(inventory, "2026-0")).out))["2026-0"].networks == ("TCP",)


# --- chosen --------------------------------------------------------------------------------------

IDS = ["20261121-071500-sft-3f2a", "20261121-081500-sft-aa11", "20261122-071500-dpo-0b0b"]


@pytest.mark.parametrize(("word", "run"), [(None, 2), ("20261122", 2), ("3f2a", 0), (IDS[1], 1), ("dpo", 2)])
def test_prefix_of_an_id_selects_one_run(word, run):
    assert record.choose(word, IDS) == IDS[run]


@pytest.mark.parametrize(
    ("word", "known", "message", "listed"),
    [
        ("2026112", IDS, "matches 3 runs", IDS[1]),
        ("nope", IDS, "no run matches nope", IDS[0]),
        ("nope", [], "no run nope", "clusterctl train"),
        (None, [], "the nodes have no runs", "clusterctl train"),
    ],
)
def test_unknown_or_ambiguous_run_lists_the_existing_ones(word, known, message, listed):
    with pytest.raises(UsageError, match=message) as caught:
        record.choose(word, known)
    assert listed in caught.value.hint


def test_record_is_private_and_replaced_atomically(tmp_path):
    folder = record.folder_of(tmp_path / "inventory.yaml", "r1")
    record.write(folder, {"run": "r1", "state": "running"})
    record.change(folder, state="stopped")
    assert (folder / "run.json").stat().st_mode & 0o777 == 0o600
    assert record.kept(tmp_path / "inventory.yaml") == {"r1": {"run": "r1", "state": "stopped"}}
    (folder / "run.json").write_text("{")
    assert record.read(folder) is None


def test_next_command_makes_readable_records_private(tmp_path, monkeypatch):
    """``status``, ``logs``, ``collect``: whatever asks the nodes for runs."""
    inventory = Inventory(tmp_path / "inventory.yaml", PurePosixPath("/opt/env"), (NODE,))
    for name in ("r1", "r2", "no run"):
        record.folder_of(inventory.path, name).mkdir(parents=True, mode=0o755)
    for name in ("r1", "r2"):
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    (tmp_path / "elsewhere/run.json").write_text("{}")
    (tmp_path / "runs/link").symlink_to(tmp_path / "elsewhere")
    runs_module.find_all(Session(inventory, [NODE], connections={NODE: Shell()}))
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "runs").iterdir()}
    assert modes == {"r1": 0o700, "r2": 0o700, "no run": 0o755, "link": 0o755}


# --- shown ---------------------------------------------------------------------------------------

SAMPLE = {
    "time": 2,
    "step": 40,
    "rss": 8_000_000_000,
    "gpus": [
        {"index": 0, "use": 97, "memory": 60, "memory_total": 80},
        {"index": 1, "use": 55, "memory": 72, "memory_total": 80},
    ],
    "network": {"eth0": {"in": 1, "out": 2_000_000}},
    "infiniband": {"mlx5_0/1": {"in": 1, "out": 21_000_000_000}},
}


def test_newest_samples_of_a_run_as_prometheus_text(monkeypatch, tmp_path):
    samples = [SAMPLE | {"step": 39}, SAMPLE | {"network": {}, "infiniband": {}}]
    answers = {
        "node01": answer(printed(loss=0.5), samples=samples),
        "node02": answer(printed("node02", 1, "finished", loss=None)),
    }
    inventory = Inventory(tmp_path / "inventory.yaml", PurePosixPath("/opt/env"), (NODE, replace(NODE, name="node02")))
    session = Session(inventory, inventory.nodes)
    monkeypatch.setattr(Session, "run", lambda _, node, *_args, **_kwargs: Result(0, answers[node.name]))
    text = prometheus(session, "r1")
    assert [line for line in text.splitlines() if "_step{" in line or "_active{" in line or "_loss{" in line] == [
        'clusterctl_run_active{run="r1",node="node01"} 1',
        'clusterctl_run_active{run="r1",node="node02"} 0',
        'clusterctl_step{run="r1",node="node01"} 40',
        'clusterctl_step{run="r1",node="node02"} 40',
        'clusterctl_last_step{run="r1",node="node01"} 120',
        'clusterctl_last_step{run="r1",node="node02"} 120',
        'clusterctl_loss{run="r1",node="node01"} 0.5',
    ]
    assert 'clusterctl_gpu_utilization_ratio{run="r1",node="node01",gpu="1"} 0.55' in text


def test_a_table_of_runs_omits_unknown_columns():
    live = ("node01", answer(printed(), samples=[{"time": 1, "step": 39}, SAMPLE]))
    lines = run_lines(runs_of(live, ("node02", answer(printed("node02", 1)))), 1065.0)
    assert lines == [
        "RUN  STATE    NODES        STEP    LOSS  LEFT   AGE",
        "r1   running  node[01-02]  40/120  1.25  1 min  1 min",
    ]
    assert run_lines({}, 0) == []
    (_, row) = run_lines(runs_of(("node01", answer(printed(step=None, loss=None)))), 1065.0)
    assert "node01 +1 ?" in row


def test_table_of_runs_names_owners_if_other_users_have_runs():
    found = runs_of(("node01", answer(printed(uid=1001))))
    assert "alice" not in run_lines(found, 1065.0, {"node01": 1001})[1]
    assert "alice" in run_lines(found, 1065.0, {"node01": 0})[1]


def test_a_table_of_runs_fits_into_80_columns():
    name = "20261121-071500-" + "x" * 16
    states = printed(step=12000, total=120000, began=1000.0, uid=5), printed("node02", 1, step=12000, uid=5)
    samples = [{"time": 0, "step": 11999}, {"time": 9, "step": 12000}]
    told_by = [(state["node"], answer(state, samples=samples, run=name)) for state in states]
    lines = run_lines(runs_of(*told_by), 9000.0, {"node01": 0})
    assert max(map(len, lines)) <= 80
    assert name in lines[1]
    assert "12000/120000" in lines[1]


def test_all_nodes_of_a_run_show_its_total_steps():
    run = runs_of(("node01", answer(printed())), ("node02", answer(printed("node02", 1, total=None))))["r1"]
    rows = run_output(RunStatus(run, {}), 1065.0)[1].splitlines()
    assert ["40/120" in row for row in rows if row.startswith("node0")] == [True, True]


def test_resume_is_suggested_only_if_it_can_work(tmp_path):
    run = runs_of(("node01", answer(printed(state="failed", resumable=False), stat="")))["r1"]
    assert "resume" not in run_output(RunStatus(run, {}), 1065.0)[1]
    nothing = Stopped("r1", ("node01",), asked_to_save=True, resumable=False)
    assert "--output" in stop_output(nothing)[1]
    for done in (nothing, replace(nothing, saved=3)):
        assert "clusterctl resume" not in stop_output(done)[1]
        assert "clusterctl resume r1" in stop_output(replace(done, resumable=True))[1]


def test_without_any_answer_exclude_is_not_suggested():
    cluster = Inventory(Path("inventory.yaml"), PurePosixPath("/opt/llm/current"), ())
    session = Session(cluster, typed=CommandLine("status"))
    assert session.without(["node02"], 2) == "to continue without: clusterctl status --exclude node02"
    assert "--exclude" not in session.without(["node01", "node02"], 2)


def test_one_run_is_shown_with_each_of_its_nodes():
    why = {"node": "node02", "rank": 1, "text": "CUDA out of memory\nmore"}
    run = runs_of(
        ("node01", answer(printed(attempts=4, attempt=2, checkpoint="checkpoint-40", why=why), samples=[SAMPLE]))
    )
    data, text = run_output(RunStatus(run["r1"], {"node02": "no route"}), 1065.0)
    lines = text.splitlines()
    assert lines[:5] == [
        "run r1: running, training",
        "  step 40/120, loss 1.25, attempt 2 of 4, from checkpoint-40",
        "  started 1 min 05 s ago by alice",
        "  effective training time unknown: the agent of an older version started this run",
        "  why: node02, rank 1: CUDA out of memory",
    ]
    assert lines[6].split() == [
        *("node01", "0", "running", "training", "40/120", "2", "55-97", "%", "90", "%", "8.0", "GB", "21.0", "GB/s")
    ]
    assert lines[7:] == ["node02: no answer: no route", "clusterctl logs -f r1, clusterctl stop r1"]
    assert data["parts"]["node01"]["sample"]["rss"] == 8_000_000_000


def test_a_run_shows_where_its_time_went_and_when_to_save():
    spent = {"version": 1, "training": 900.0, "repeating": 80.0, "saving": 20.0, "saves": 10, "restarts": 2}
    run = runs_of(("node01", answer(printed(spent=spent | {"failures": 2, "top": 90}, save_every=240.0))))["r1"]
    data, text = run_output(RunStatus(run, {}), 1065.0)
    assert "  effective training time 90.0 % of 16 min 40 s: repeating 8.0 %, saving 2.0 %" in text.splitlines()
    assert "  saves every 4 min 00 s (--save-every)" in text.splitlines()
    assert "best saved every" in text
    assert data["effective"]["ratio"] == 0.9
    assert "clusterctl diagnose r1" in data["effective"]["advice"] or "a save every" in data["effective"]["advice"]
    hostile = runs_of(("node01", answer(printed(spent=spent | {"training": 1e300}))))["r1"]
    assert "effective training time unknown" in run_output(RunStatus(hostile, {}), 1065.0)[1]


# --- stopped -------------------------------------------------------------------------------------


def stop_script(tmp_path, **values):
    """The script of a stop, with an agent that says that all is well."""
    python = tmp_path / "release" / "bin" / "python"
    if not python.exists():
        python.parent.mkdir(parents=True)
        python.write_text('#!/bin/sh\necho \'{"event": "stopped", "left": [], "step": 12, "saved": true}\'\n')
        python.chmod(0o755)
        (tmp_path / "release.txt").write_text("")
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "release").write_text(f"{tmp_path}/release\n")
    given = {
        "plan": "plan-0.json",
        "options": [],
        "mark": "CLUSTERCTL_RUN=none",
        "name": "CLUSTERCTL_NODE=n",
        "ports": [],
    }
    return render("run/stop.sh.j2", run=str(tmp_path / "run"), **{**given, **values})


def test_stop_looks_for_processes_of_that_node(tmp_path):
    mark, name = f"CLUSTERCTL_RUN=proof-{os.getpid()}", "CLUSTERCTL_NODE=node01"
    env = dict(item.split("=", 1) for item in (mark, name))
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], env=env, stdin=subprocess.PIPE)
    try:
        shell = Shell()
        there = parse_proof(shell.run(stop_script(tmp_path, mark=mark, name=name)).out)
        assert there.problem.startswith(f"process {sleeper.pid} is still running: {sys.executable}")
        assert parse_proof(shell.run(stop_script(tmp_path, mark=mark, name="CLUSTERCTL_NODE=other")).out).problem == ""
    finally:
        sleeper.communicate(b"\n")
    gone = parse_proof(shell.run(stop_script(tmp_path, mark=mark, name=name)).out)
    assert (gone.problem, gone.answer["step"]) == ("", 12)


def test_a_port_with_a_listener_is_no_proof(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert (
            parse_proof(Shell().run(stop_script(tmp_path, ports=[port])).out).problem == f"port {port} is still in use"
        )
    assert parse_proof(Shell().run(stop_script(tmp_path, ports=[port])).out).problem == ""


@pytest.mark.parametrize(
    ("out", "problem"),
    [
        ("agent 127\nproved processes\nproved ports\nproved gpus\n", "the agent did not answer: not found"),
        (
            '{"left": [], "error": "the run belongs to bob"}\nproved processes\nproved ports\nproved gpus',
            "belongs to bob",
        ),
        ('{"left": []}\nproved processes\nproved ports\nunproved Driver mismatch', "cannot list .*Driver mismatch"),
        (
            '{"left": []}\nproved processes\nproved ports\ngpu 77 512 MiB\nproved gpus',
            "still holds 512 MiB of process 77",
        ),
        ('{"left": []}\nproved processes\n', "could not inspect its ports, gpus"),
        ('{"left": [5, 6]}\nproved processes\nproved ports\nproved gpus', "could not be killed: 5, 6"),
    ],
)
def test_unproved_facts_are_reported(out, problem):
    import re

    assert re.search(problem, parse_proof(out, "not found").problem)


PROVED = parse_proof('{"left": [], "step": 12, "saved": true}\nproved processes\nproved ports\nproved gpus')


def test_stop_reports_what_it_verified_on_each_node(tmp_path):
    (tmp_path / "inventory.yaml").write_text("prefix: /x/current\nnodes: {\"node[01-02]\": '10.0.0.[1-2]'}\n")
    inventory = load(tmp_path / "inventory.yaml")
    session = Session(inventory)
    both = {node.name: PROVED for node in inventory.nodes}
    done = stop_result(session, "r1", Outcome(session, both), port=23456)
    done.raise_failed()
    assert stop_output(done)[1].splitlines() == [
        "run r1 stopped on node[01-02]: no process left, no GPU memory held, port 23456 free",
        "saved a checkpoint at step 12; to continue: clusterctl resume r1",
    ]
    again = stop_result(session, "r1", Outcome(session, both), port=None, already="stopped")
    assert "had already ended (stopped) on node[01-02]: no process left" in stop_output(again)[1]
    half = stop_result(session, "r1", Outcome(session, {**both, "node02": parse_proof("", "no python")}), port=None)
    with pytest.raises(NodesFailedError, match="may still be running on 1 of 2 nodes") as caught:
        half.raise_failed()
    assert list(caught.value.reasons) == ["node02"]


def test_run_of_another_user_is_refused_with_its_owner():
    run = runs_of(("node01", answer(printed(uid=1001))))["r1"]
    with pytest.raises(PreflightError, match="not yours") as caught:
        refuse_others(SESSION, run, Runs({}, {}, {"node01": 1000}), others_too=True)
    assert caught.value.reasons == {"node01": "it belongs to alice"}
    with pytest.raises(PreflightError) as caught:
        refuse_others(SESSION, run, Runs({}, {}, {"node01": 0}), others_too=False)
    assert "--yes" in caught.value.hint
    refuse_others(SESSION, run, Runs({}, {}, {"node01": 0}), others_too=True)
    refuse_others(SESSION, run, Runs({}, {}, {"node01": 1001}), others_too=False)


def test_runs_that_cannot_resume_are_refused():
    both = [("node01", answer(printed())), ("node02", answer(printed("node02", 1)))]
    with pytest.raises(UsageError, match=r"run r1 is running on node\[01-02\]") as live:
        refuse_resume(SESSION, runs_of(*both)["r1"], {})
    assert live.value.hint.endswith("clusterctl stop r1; then: clusterctl resume r1")
    done = [(name, answer(printed(name, rank, "finished"), stat="")) for rank, name in enumerate(("node01", "node02"))]
    with pytest.raises(UsageError, match="has finished"):
        refuse_resume(SESSION, runs_of(*done)["r1"], {})
    with pytest.raises(NodesFailedError, match="without all of its nodes") as caught:
        refuse_resume(
            SESSION, runs_of(("node01", answer(printed(state="failed"), stat="")))["r1"], {"node02": "no route"}
        )
    assert caught.value.reasons == {"node02": "no route"}
    failed = [(name, answer(printed(name, rank, "failed"), stat="")) for rank, name in enumerate(("node01", "node02"))]
    refuse_resume(SESSION, runs_of(*failed)["r1"], {})


# --- logs ----------------------------------------------------------------------------------------


def test_lines_of_many_nodes_are_merged_by_time():
    one = [entry("a", "2026-01-01T00:00:01.000Z [0] x"), entry("a", "a line without a time")]
    two = [entry("b", "2026-01-01T00:00:00.500Z [launcher] y"), entry("b", "2026-01-01T00:00:02.000Z [1] z [0] z")]
    lines = merged([one, two])
    assert [line.text for line in lines] == ["y", "x", "a line without a time", "z [0] z"]
    assert [line.rank for line in lines] == [None, 0, None, 1]
    assert lines[1].shown == "2026-01-01T00:00:01.000Z a/0 | x"
    assert merged([one, two], 1) == [lines[-1]]
    assert merged([one, two], 0) == []


def test_last_lines_of_a_rank_come_with_the_offset_to_continue_from(tmp_path):
    text = "".join(f"2026-01-01T00:00:0{number}.000Z [{number % 2}] step {number}\n" for number in range(8))
    (tmp_path / "run.log").write_text(text)
    script = render("run/logs.sh.j2", logs=str(tmp_path), pattern=pattern(1), lines=2)
    assert Shell().run(script).out.splitlines() == [f"at {len(text)}", *text.splitlines()[5::2]]
    every = render("run/logs.sh.j2", logs=str(tmp_path), pattern=pattern(None), lines=None)
    assert Shell().run(every).out == f"at {len(text)}\n{text}"
    assert Shell().run(every.replace(str(tmp_path), "/nowhere")).out == "at 0\n"
    tail = tail_script(str(tmp_path), 2**22 + 1, len(text) - 10)
    assert Shell().run(tail).out == text[-11:]


def test_unparsable_line_is_unchanged():
    assert entry("a", "x") == Entry("", "a", None, "x")


# --- collected -----------------------------------------------------------------------------------


def test_files_are_fetched_once_and_again_after_a_change(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "sub dir").mkdir(parents=True)
    (there / "sub dir" / "-ünï\nfile").write_bytes(os.urandom(200_000))
    (there / "link").symlink_to("/etc/passwd")
    (there / "big").write_bytes(bytes(300_000))
    os.link(there / "big", there / "twin")
    found = list_files(Shell(), str(there))
    assert sorted(found) == ["big", "sub dir/-ünï\nfile", "twin"]
    assert fetch(Shell(), str(there), found, here) >= 500_000
    for name in found:
        assert (here / name).read_bytes() == (there / name).read_bytes()
    assert lacking(found, here) == {}
    (there / "big").write_bytes(b"changed")
    assert set(lacking(list_files(Shell(), str(there)), here)) == {"big", "twin"}
    assert fetch(Shell(), str(there), {}, here) == 0


def hostile(*members):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, kind, target in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, target, 4 if kind == tarfile.REGTYPE else 0
            archive.addfile(info, io.BytesIO(b"evil") if info.size else None)

    class Hostile(Shell):
        def run(self, script, *, stdin=None, on_line=None, deadline=None, root=False):
            assert list(stdin)
            on_line(base64.b64encode(stream.getvalue()).decode())
            return Result(0, "")

    return Hostile()


@pytest.mark.parametrize(
    "member",
    [
        ("../evil", tarfile.REGTYPE, ""),
        ("/tmp/evil", tarfile.REGTYPE, ""),
        ("other", tarfile.REGTYPE, ""),
        ("wanted", tarfile.SYMTYPE, "/etc/passwd"),
        ("wanted", tarfile.LNKTYPE, "/etc/passwd"),
        ("wanted", tarfile.DIRTYPE, ""),
        ("wanted", tarfile.CHRTYPE, ""),
    ],
)
def test_an_archive_that_tries_to_escape_is_refused(tmp_path, member):
    with pytest.raises(UnrequestedFile, match="node01: it sent"):
        fetch(hostile(member), "/there", {"wanted": RemoteFile(4, 0)}, tmp_path / "here")
    assert [path for path in tmp_path.rglob("*") if path.name in {"evil", "wanted", "other"}] == []


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x"])
def test_a_list_that_leads_out_of_the_folder_is_refused(name):
    with pytest.raises(UnrequestedFile, match="outside the folder"):
        parse_list(f"4 0.5 ok\0004 0 {name}\0", "node01")


def test_missing_files_are_an_error(tmp_path):
    remote = hostile(("wanted", tarfile.REGTYPE, ""))
    with pytest.raises(ClusterctlError, match="1 of 2 files did not arrive, such as more"):
        fetch(remote, "/there", {"wanted": RemoteFile(4, 0), "more": RemoteFile(1, 0)}, tmp_path)
    assert (tmp_path / "wanted").read_bytes() == b"evil"


def test_newest_complete_files_of_a_checkpoint_are_used_and_old_checkpoints_stay():
    def offer(**files):
        found = {name.replace("__", "."): [4, mtime, "m", torn] for name, (mtime, torn) in files.items()}
        return {"checkpoints": [{"name": "checkpoint-20", "single": False, "files": found}]}

    a = offer(rng_state_0__pth=(5, None), model__safetensors=(9, "cut short"), x_optim_states__pt=(1, None))
    b = offer(rng_state_1__pth=(5, None), model__safetensors=(3, None))
    names = {
        "a": frozenset(
            {"checkpoint-20/rng_state_0.pth", "checkpoint-20/x_optim_states.pt", "log", "checkpoint-10/old"}
        ),
        "b": frozenset(
            {"checkpoint-20/rng_state_1.pth", "checkpoint-20/model.safetensors", "log", "tag/mp_model_states.pt"}
        ),
    }
    chosen = sources(names, {"a": a, "b": b}, "checkpoint-20")
    assert chosen.files == {
        "a": {"checkpoint-20/rng_state_0.pth", "checkpoint-20/x_optim_states.pt", "log"},
        "b": {"checkpoint-20/rng_state_1.pth", "checkpoint-20/model.safetensors"},
    }
    assert checkpoints(names["a"] | names["b"]) == {
        "checkpoint-10": "trainer", "checkpoint-20": "trainer", "tag": "deepspeed"
    }  # fmt: skip


def test_the_newest_single_file_is_collected_without_older_steps_and_without_what_was_moved_aside():
    names = ["logs/a.txt", "step_10.pt", "step_20.pt", "best.pt", "kept-1/step_30.pt", "final/model.safetensors"]
    names += [".clusterctl-copies/final@1/model.safetensors", ".clusterctl-copies/final@1.jsonl"]
    file = {"step_20.pt": [4, 9, "m", None]}
    offer = {"checkpoints": [{"name": "step_20.pt", "single": True, "files": file}]}
    chosen = sources({"a": frozenset(names)}, {"a": offer}, "step_20.pt")
    assert chosen.files == {"a": {"logs/a.txt", "step_20.pt", "best.pt", "final/model.safetensors"}}
    assert chosen.inside("step_20.pt") == {"step_20.pt"}


ZERO_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")


@pytest.mark.parametrize(
    ("name", "files", "expected"),
    [
        ("iter_10", ZERO_FILES, Conversion("zero", tag=True)),
        ("checkpoint-3", ("trainer_state.json", *(f"global_step3/{each}" for each in ZERO_FILES)), Conversion("zero")),
        ("step-10", (".metadata", "__0_0.distcp"), Conversion("dcp")),
        (
            "checkpoints/checkpoint_0",
            ("random_states_0.pkl", "pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"),
            Conversion("dcp", folder="pytorch_model_fsdp_0"),
        ),
        ("best", (ZERO_FILES[0],), Conversion("none")),
        ("ckpt.pt", ("ckpt.pt",), Conversion("none")),
        ("checkpoint-3", ("trainer_state.json", "model.safetensors", "optimizer.pt"), Conversion("none")),
    ],
)
def test_how_a_checkpoint_becomes_one_set_of_weights(name, files, expected):
    assert conversion(name, files) == expected


@pytest.mark.parametrize("files", [("complete.json",), ("random_states_0.pkl", "pytorch_model_fsdp_rank0.bin")])
def test_weights_that_no_tool_joins_have_a_reason(files):
    found = conversion("iter_10", files)
    assert (found.how, bool(found.why)) == ("impossible", True)


def test_a_listed_name_may_end_in_a_newline():
    assert set(parse_list("1 0.0 log\n\x002 0.0 a b\x00", "node01")) == {"log\n", "a b"}


# --- which run a stop means -----------------------------------------------------------------------


def going(*ids):
    """A cluster whose one node has these runs; those with a star are running."""
    inventory = Inventory(Path("inventory.yaml"), PurePosixPath("/opt/llm/current"), (NODE,))
    runs = {}
    for name in ids:
        live = name.endswith("*")
        about = {**printed(state="running" if live else "failed"), "run": name.rstrip("*")}
        found = runs_of(("node01", answer(about, **({} if live else {"stat": ""}))))
        runs |= {name.rstrip("*"): replace(run, id=name.rstrip("*")) for run in found.values()}
    return inventory, Runs(runs, {}, {"node01": 0})


@pytest.mark.parametrize(
    ("ids", "word", "meant"),
    [
        (["1-sft", "2-sft*", "3-sft"], "sft", "2-sft"),  # several fit, one is running
        (["1-sft", "2-sft*"], "1-sft", "1-sft"),  # an id is that run
        (["1-sft", "2-sft*", "3-dpo*"], "sft", "2-sft"),
        (["1-sft*", "2-dpo"], None, "1-sft"),
        (["1-sft", "2-dpo"], None, "2-dpo"),
        (["1-sft", "2-dpo"], "sft", "1-sft"),
    ],
)
def test_stop_without_a_name_selects_the_running_run(monkeypatch, ids, word, meant):
    inventory, found = going(*ids)
    monkeypatch.setattr(runs_module, "find_all", lambda *_, **__: found)
    assert find(Session(inventory, [NODE]), word, live_first=True)[0].id == meant


def test_several_running_runs_are_named_with_the_command_for_each(monkeypatch):
    inventory, found = going("1-sft*", "2-sft*", "3-dpo")
    monkeypatch.setattr(runs_module, "find_all", lambda *_, **__: found)
    with pytest.raises(UsageError, match="2 runs are running: 1-sft on node01, 2-sft on node01") as refused:
        find(Session(inventory, [NODE]), None, live_first=True)
    assert refused.value.hint == "name one: clusterctl stop 1-sft; clusterctl stop 2-sft"
    with pytest.raises(UsageError, match="sft matches 2 runs"):
        find(Session(inventory, [NODE]), "sft", live_first=True)
    asked = []
    assert find(Session(inventory, [NODE]), None, live_first=True, ask=lambda runs: asked.append(runs) or runs[1])[
        0
    ].id == ("2-sft")
    assert [run.id for run in asked[0]] == ["1-sft", "2-sft"]


@pytest.mark.parametrize(
    ("ids", "typed", "meant"),
    [(["1-a*"], "y", "1-a"), (["1-a*"], "", None), (["1-a*", "2-b*"], "2", "2-b"), (["1-a*", "2-b*"], "9", None)],
)
def test_stop_on_a_terminal_names_the_run_and_asks(monkeypatch, capsys, ids, typed, meant):
    import io

    from provision.cli.runs import ask_which_run
    from provision.errors import InterruptedByUser
    from provision.output import Reporter

    assert ask_which_run(Reporter()) is None  # no terminal: no question
    inventory, found = going(*ids)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{typed}\n"))
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(runs_module, "find_all", lambda *_, **__: found)
    ask = ask_which_run(Reporter(out=io.StringIO(), err=io.StringIO()))
    if meant:
        assert find(Session(inventory, [NODE]), None, live_first=True, ask=ask)[0].id == meant
    else:
        with pytest.raises(InterruptedByUser, match="nothing was stopped"):
            find(Session(inventory, [NODE]), None, live_first=True, ask=ask)
    shown = capsys.readouterr()
    assert "1-a  on node01, of alice" in shown.err + shown.out
