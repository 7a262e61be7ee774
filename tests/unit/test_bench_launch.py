"""Figures of `scripts/bench launch`, how it distinguishes the processes of a run, and the command of its peer."""

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

import launch
import pytest
from bench_measure import BenchError
from bench_table import Figure, Measured, Missing, met, row
from launch_cluster import Lines
from launch_proc import Process, classified, cost, gone, only, strike
from launch_start import bare
from launch_stops import WAYS

ROOT = Path(__file__).resolve().parents[2]
RUN = "20260101-120000-tiny-abcd"
NAMES = ("node01", "node02")

# The documented figures: name -> (must, aim, what is judged).
PROMISED = {
    "start": (1.5, 0.5, "more"),
    "gate": (5, 2, "ours"),
    "kill": (5, 2, "ours"),
    "kill-alone": (15, 5, "ours"),
    "restart": (5, 2, "more"),
    "stops": (0, None, "ours"),
    "recover": (1, None, "most"),
    "hang": (30, 10, "ours"),
    "cpu": (1, None, "ours"),
    "rss": (40e6, None, "ours"),
}


def test_every_documented_figure_exists_with_its_limits():
    assert {name: (each.must, each.aim, each.judged) for name, each in launch.FIGURES.items()} == PROMISED


def test_every_figure_is_measured_by_exactly_one_part():
    assert sorted(name for names, _ in launch.PARTS.values() for name in names) == sorted(PROMISED)


def test_every_figure_is_explained_in_the_docs():
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    section = page.partition("## Launch and supervision")[2]
    assert [name for name in PROMISED if f"| `{name}` |" not in section] == []


def test_every_killed_process_kind_is_measured():
    message = " ".join(WAYS)
    for what in ("the command", "the guard", "the supervisor", "both", "torchrun", "a rank"):
        assert f"kill -9 of {what}" in message
    assert len(WAYS) == 10  # every way as often as every other one, of 100


def test_parts_are_chosen_by_their_names():
    assert launch.parse([]).only == list(launch.PARTS)
    assert launch.parse(["--only", "kill,stops"]).only == ["kill", "stops"]
    with pytest.raises(SystemExit):
        launch.parse(["--only", "kil"])


def test_failed_part_stops_no_other_and_an_interrupt_keeps_the_results(monkeypatch, tmp_path):
    def fails(given, cluster):
        raise BenchError("no rank\non node01")

    class Cluster:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(launch, "Cluster", Cluster)
    parts = {"kill": (("kill", "kill-alone"), fails), "hang": (("hang",), lambda *_: {"hang": Measured(3.0)})}
    monkeypatch.setattr(launch, "PARTS", parts)
    given = argparse.Namespace(only=["kill", "hang"], nodes=2, clusterctl=tmp_path)
    missing = Missing("no rank on node01")
    found = {"kill": missing, "kill-alone": missing, "hang": Measured(3.0)}
    assert launch.measured(given, tmp_path, tmp_path) == (found, True)

    def interrupted(given, cluster):
        raise KeyboardInterrupt

    monkeypatch.setitem(parts, "stops", (("stops",), interrupted))
    given.only = ["hang", "stops", "kill"]
    assert launch.measured(given, tmp_path, tmp_path) == ({"hang": Measured(3.0)}, False)


@pytest.mark.parametrize(
    ("judged", "ours", "peer", "verdict"),
    [
        ("more", 10.4, 10.0, "aim"),
        ("more", 11.4, 10.0, "yes"),
        ("more", 11.6, 10.0, "no"),
        ("more", 11.6, None, "?"),
        ("most", 1.5, None, "yes"),
        ("most", 1.4, None, "no"),
    ],
)
def test_a_difference_and_a_share_are_judged(judged, ours, peer, verdict):
    figure = Figure("x", "x", judged=judged, must=1.5, aim=0.5 if judged == "more" else None)
    assert met(figure, Measured(ours, peer)) == verdict


def test_limits_are_shown_with_their_units():
    assert row(launch.FIGURES["start"], Measured(11.0, 10.0), {"nodes": 16})[4:] == (
        "<= 1.5 s more",
        "<= 0.5 s more",
        "yes",
    )
    assert row(launch.FIGURES["recover"], Measured(1.0), {"restarts": 20})[4:] == (">= 1", "", "yes")
    assert row(launch.FIGURES["rss"], Measured(41e6), {})[4:] == ("<= 40 MB", "", "no")


def _environ(**variables):
    return b"".join(f"{name}={value}".encode() + b"\0" for name, value in variables.items())


@pytest.mark.parametrize(
    ("environ", "cmdline", "kind", "node"),
    [
        ({"CLUSTERCTL_RUN": RUN, "CLUSTERCTL_NODE": "node02", "LOCAL_RANK": "0"}, "python tiny.py", "rank", "node02"),
        (
            {"CLUSTERCTL_RUN": RUN, "CLUSTERCTL_NODE": "node01"},
            "python -m torch.distributed.run tiny.py",
            "launcher",
            "node01",
        ),
        ({"CLUSTERCTL_RUN": RUN, "CLUSTERCTL_NODE": "node01"}, "sleep 5", "other", "node01"),
        ({}, f"python -I /r/{RUN}/agent daemon /r/{RUN}/plan-1.json", "agent", "node02"),
        ({}, f"python -I /r/{RUN}/agent follow /r/{RUN}/plan-0.json --from 0", "other", "node01"),
    ],
)
def test_processes_of_a_run_are_distinguished(environ, cmdline, kind, node):
    cmdline = cmdline.replace(" ", "\0").encode()
    found = classified(7, _environ(PATH="/bin", **environ), cmdline, RUN, NAMES)
    assert (found.pid, found.kind, found.node) == (7, kind, node)


def test_other_runs_and_programs_do_not_belong_to_the_run():
    assert classified(7, _environ(CLUSTERCTL_RUN=RUN + "e", LOCAL_RANK="0"), b"python\0tiny.py", RUN, NAMES) is None
    assert classified(7, b"", b"sshd: root", RUN, NAMES) is None


def test_only_processes_of_the_given_kind_and_node_are_killed():
    found = [Process(pid, node, kind, "") for pid, node, kind in ((5, "node01", "rank"), (3, "node02", "rank"))]
    assert only(found, "rank", "node02") == found[1:]
    with pytest.raises(BenchError, match="no process to kill"):
        strike(only(found, "agent", "node02"))


def test_processes_that_do_not_exit_are_returned_after_the_timeout():
    stays = [Process(1, "node01", "rank", "init")]
    took, left = gone(lambda: stays, 0.1)
    assert (left, took > 0.1) == (stays, True)
    looks = iter([stays, stays, []])
    _, left = gone(lambda: next(looks), 600)
    assert (list(left), list(looks)) == ([], [])  # it looked three times, and did not wait for its patience


def test_cost_counts_processor_time_and_memory():
    script = (
        "x = b'x' * (50 << 20); print(flush=True); [sum(range(10**6)) for _ in range(40)]; print(flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        before = cost(process.pid)
        process.stdout.readline()
        after = cost(process.pid)
        process.communicate(b"\n")
    assert after.cpu - before.cpu > 0.1
    assert before.rss >= before.pss > 50 << 20


def test_the_peer_gets_the_same_command_and_environment_by_hand():
    plan = {
        "cwd": "/r/a b/job",
        "argv": ["/e/python", "-m", "run", "--master-port", "{port}", "--log-dir", "/l", "--redirects", "3", "t.py"],
        "env": {"MASTER_PORT": "1", "OMP_NUM_THREADS": "1", "X": "a b"},
        "unset": ["PYTHONPATH", "SLURM_*"],
    }
    assert bare(plan, 29000, "--resume", "out/checkpoint-5") == (
        "cd '/r/a b/job' && exec env -uPYTHONPATH MASTER_PORT=29000 OMP_NUM_THREADS=1 'X=a b' "
        "/e/python -m run --master-port 29000 t.py --resume out/checkpoint-5"
    )


def test_lines_are_read_as_they_arrive(tmp_path):
    began = time.time()
    script = "import time; print('one', flush=True); time.sleep(0.3); print('two 2', flush=True); raise SystemExit(3)"
    lines = Lines([sys.executable, "-c", script], cwd=tmp_path)
    came, found = lines.until(r"two (\d)")
    assert found[1] == "2"
    assert began + 0.3 <= came <= time.time()
    assert lines.until("one")[0] <= came - 0.2
    with pytest.raises(BenchError, match="nothing like 'three': one; two 2"):
        lines.until("three")
    assert lines.finish() == 3
    assert lines.text == "one\ntwo 2"


def test_lines_are_not_waited_for_forever(tmp_path):
    lines = Lines(["sleep", "60"], cwd=tmp_path)
    with pytest.raises(BenchError, match="nothing like"):
        lines.until("x", patience=0.1)
    with pytest.raises(BenchError, match=r"is still running after 0\.1 s: sleep 60"):
        lines.finish(0.1)
    lines.end()
    assert lines.process.returncode == -9


def test_trainer_prints_its_start_first():
    began = time.time()
    argv = [sys.executable, ROOT / "scripts/benchmarks/launch_trainer.py", "2"]
    done = subprocess.run(argv, env={"RANK": "1", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True)
    first, *steps = done.stdout.splitlines()
    assert began <= float(re.fullmatch(r"first line at (\S+)", first)[1]) <= time.time()
    assert steps == ["step 1 on rank 1", "step 2 on rank 1"]
