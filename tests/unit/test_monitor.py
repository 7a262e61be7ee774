"""The monitor: the script on a node's files, the view of a run, its lines, and the screen in several sizes."""

import asyncio
import json
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest

from provision import model
from provision.cli.monitor import refuse_without_screen
from provision.cli.monitor_app import Actions, Monitor
from provision.cli.monitor_panes import Pane
from provision.errors import UsageError
from provision.model import Inventory, Result
from provision.output_text import Line
from provision.run.found import merge_runs, parse_runs
from provision.run.view import POINTS, Offsets, Watched, folded
from provision.session import Session
from provision.ssh.local import LocalRemote
from provision.ssh.wire import NodeUnreachable
from provision.summaries.monitor import (
    event_lines,
    gpu_lines,
    head_lines,
    log_lines,
    network_lines,
    node_lines,
    ranks_of,
)
from provision.summaries.monitor_plots import loss_plot, speed_plot, speed_title
from provision.summaries.runs import run_output
from provision.tasks import watch
from provision.tasks.runs import RunStatus
from provision.tasks.save import Saved, save_run
from provision.tasks.watch import Watch
from trainer.agent.watch import Place, Watcher

RECORDED = Path(__file__).parent / "recorded_runs"
RUN = "20261123-010653-sft-1a2b"
START = Offsets()
FILES = ("events.jsonl", "run.log")


class Node:
    """A node's folder of a run, read by the real script on this machine."""

    def __init__(self, root, name, rank, nnodes, source=None):
        self.root, self.name = root, name
        self.logs = f"{RUN}/logs/node{rank}"
        self.folder = root / "runs" / self.logs
        self.folder.mkdir(parents=True)
        if source:
            shutil.copytree(source, self.folder, dirs_exist_ok=True)
        pid = os.getpid()
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        self.state = {
            "run": RUN, "node": name, "node_rank": rank, "nnodes": nnodes, "state": "running", "phase": "training",
            "step": 40, "total": 400, "loss": 0.25, "attempt": 1, "attempts": 1, "began": 1795396000.0,
            "pid": pid, "start": stat[19], "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        }  # fmt: skip
        (self.folder / "state.json").write_text(json.dumps(self.state))

    def add(self, file, *lines):
        with (self.folder / file).open("a") as opened:
            opened.writelines(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)

    def answer(self, offsets=START):
        """The lines of one look from these bytes on, by the program that runs on nodes."""
        place = Place(str(self.root / "runs"), self.logs, offsets.events, offsets.log)
        return Watcher(place).look().decode("utf-8", "surrogateescape").removesuffix("\n").split("\n")


def begin(nodes):
    names = [node.name for node in nodes]
    runs = merge_runs(parse_runs(node.name, "\n".join(node.answer()), names) for node in nodes)
    return Watched(runs[RUN], names)


def refresh(watched, *nodes):
    for node in nodes:
        watched.take(node.name, node.answer(watched.offsets(node.name)))


@pytest.fixture
def recorded(tmp_path):
    return [
        Node(tmp_path / f"root{rank}", name, rank, 2, RECORDED / "healthy_gpu_zero2" / name)
        for rank, name in enumerate(["gpunode0", "gpunode1"])
    ]


@pytest.fixture
def view(recorded):
    watched = begin(recorded)
    refresh(watched, *recorded)
    return watched.view(1795396100.0)


def test_the_answers_of_nodes_become_a_view(view):
    assert (view.run, view.state, view.phase, view.step, view.total) == (RUN, "running", "training", 40, 400)
    assert [node.name for node in view.nodes] == ["gpunode0", "gpunode1"]
    assert [len(node.gpus) for node in view.nodes] == [2, 2]
    assert view.nodes[0].gpus[0].temperature
    assert view.nodes[0].gpus[0].power
    assert view.nodes[0].gpus[0].memory_total
    assert [point.step for point in view.points[:3]] == [1, 2, 3]
    assert view.points[0].loss == 5.7501606941223145
    assert view.lr == 0.0003
    assert view.ranks
    assert [event.kind for event in view.events][:1] == ["start"]


def test_a_refresh_reads_only_what_is_new(recorded):
    watched = begin(recorded)
    refresh(watched, *recorded)
    before = watched.view(1795396100.0)
    refresh(watched, *recorded)
    assert watched.view(1795396100.0) == before
    head = recorded[0]
    head.add("run.log", "2026-11-23T02:00:00.000Z [0] a new line")
    head.add("events.jsonl", {"event": "progress", "time": 1795396200.0, "step": 41, "loss": None, "lr": 1e-4})
    refresh(watched, *recorded)
    after = watched.view(1795396200.0)
    assert [line.text for line in after.lines if line not in before.lines] == ["a new line"]
    assert len(after.points) == len(before.points) + 1
    assert math.isnan(after.points[-1].loss)
    assert after.lr == 1e-4


def test_a_look_has_only_what_has_changed(recorded):
    head = recorded[0]
    watcher = Watcher(Place(str(head.root / "runs"), head.logs))
    words = [line.partition(b" ")[0] for line in watcher.look().splitlines()]
    assert {b"boot", b"part", b"state", b"stat", b"sample", b"event", b"log", b"tick"} == set(words)
    (last,) = watcher.look().splitlines()
    assert last.split() == [b"tick", *(str((head.folder / name).stat().st_size).encode() for name in FILES)]
    head.add("events.jsonl", {"event": "log", "line": "x"}, {"event": "phase", "phase": "saving"})
    event, tick = watcher.look().splitlines()
    assert b'"saving"' in event
    assert tick != last
    (head.folder / "state.json").write_text(json.dumps({**head.state, "phase": "saving"}))
    assert [line.partition(b" ")[0] for line in watcher.look().splitlines()] == [
        b"boot", b"part", b"state", b"stat", b"tick"
    ]  # fmt: skip
    for name in (*FILES, "state.json", "metrics.jsonl"):
        (head.folder / name).unlink()
    assert watcher.look() == b"tick 0 0\n"


def test_an_agent_that_dies_without_writing_is_noticed(recorded):
    head = recorded[0]
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as agent:
        start = Path(f"/proc/{agent.pid}/stat").read_text().rpartition(")")[2].split()[19]
        (head.folder / "state.json").write_text(json.dumps({**head.state, "pid": agent.pid, "start": start}))
        watched = begin(recorded)
        watcher = Watcher(Place(str(head.root / "runs"), head.logs))
        watched.take(head.name, watcher.look().decode().splitlines())
        assert watched.view(0).nodes[0].state == "running"
    watched.take(head.name, watcher.look().decode().splitlines())
    assert watched.view(0).nodes[0].state == "lost"


def test_a_log_that_was_replaced_is_read_from_its_start(recorded):
    watched, head = begin(recorded), recorded[0]
    refresh(watched, head)
    (head.folder / "run.log").write_text("2026-11-23T03:00:00.000Z [0] a new file\n")
    refresh(watched, head)
    assert watched.view(0).lines[-1].text == "a new file"


def test_half_a_log_line_waits_for_its_end(recorded):
    watched, head = begin(recorded), recorded[0]
    refresh(watched, head)
    with (head.folder / "run.log").open("a") as log:
        log.write("2026-11-23T02:00:00.000Z [0] half")
    refresh(watched, head)
    assert "half" not in watched.view(0).lines[-1].text
    head.add("run.log", " and half")
    refresh(watched, head)
    assert watched.view(0).lines[-1].text == "half and half"


def test_a_long_log_is_read_from_near_its_end(recorded):
    head = recorded[0]
    head.add("run.log", *(f"2026-11-23T02:00:00.000Z [0] line {number} {'.' * 200}" for number in range(5000)))
    watched = begin(recorded)
    lines = head.answer()
    assert sum(map(len, lines)) < 2_000_000
    watched.take(head.name, lines)
    assert watched.view(0).lines[-1].text.startswith("line 4999 ")
    assert all(line.text.startswith("line ") for line in watched.view(0).lines)


def test_a_node_without_an_answer_is_shown_and_others_continue(recorded):
    watched = begin(recorded)
    refresh(watched, recorded[0])
    watched.silence("gpunode1", "timed out\nmore")
    view = watched.view(1795396100.0)
    assert [(node.state, node.silent) for node in view.nodes] == [("running", ""), ("no answer", "timed out")]
    assert any("no answer: timed out" in line.text and line.style == "red" for line in node_lines(view, 120, 20))
    assert "1 without an answer" in head_lines(view, 120)[0].text
    refresh(watched, recorded[1])
    assert watched.view(1795396100.0).nodes[1].silent == ""


def test_texts_from_nodes_are_escaped_and_bounded(recorded):
    watched, head = begin(recorded), recorded[0]
    head.add("run.log", "2026-11-23T02:00:00.000Z [0] \x1b[31m[red]evil[/red]\x1b]0;title\x07" + "a" * 100_000)
    head.add("events.jsonl", {"event": "notice", "time": 1.0, "text": "\x1b[2J[link=x]" + "b" * 10_000})
    head.add("events.jsonl", {"event": "hang", "time": "soon", "text": 7}, "{", "[]", '{"event": 3}')
    refresh(watched, head)
    view = watched.view(0)
    texts = [line.text for line in (*log_lines(view), *event_lines(view))]
    assert any("[red]evil[/red]aaa" in text for text in texts)
    assert not any(character in text for text in texts for character in "\x1b\x07\n")
    assert max(map(len, texts)) < 500


@pytest.mark.parametrize(
    "out", ["", "\n", "log", "tick 1", "tick x y\nlog", "part x y\nstate {}\nsample {", "part x/logs/node0 -\nstate {}"]
)
def test_an_unexpected_answer_changes_nothing(recorded, out):
    watched = begin(recorded)
    refresh(watched, *recorded)
    before = watched.view(0)
    watched.take("gpunode0", out.split("\n"))
    assert watched.view(0).nodes == before.nodes


def test_a_resume_replaces_the_steps_that_it_repeats(recorded):
    watched, head = begin(recorded), recorded[0]
    refresh(watched, head)
    head.add("events.jsonl", {"event": "attempt", "time": 1795396300.0, "attempt": 2, "checkpoint": "checkpoint-5"})
    head.add("events.jsonl", {"event": "progress", "time": 1795396301.0, "step": 6, "loss": 9.0})
    refresh(watched, head)
    view = watched.view(1795396301.0)
    assert [point.step for point in view.points] == [1, 2, 3, 4, 5, 6]
    assert view.points[-1].loss == 9.0
    assert (view.events[-1].kind, view.events[-1].text) == ("restart", "attempt 2 from checkpoint-5")


def test_a_long_curve_keeps_its_first_and_last_step_in_bounded_memory(recorded):
    watched, head = begin(recorded), recorded[0]
    head.add(
        "events.jsonl", *({"event": "progress", "time": 1.0, "step": step, "loss": 1.0} for step in range(41, 9000))
    )
    for _ in range(3):
        refresh(watched, head)
    points = watched.view(0).points
    assert len(points) <= POINTS
    assert points[-1].step == 8999


def test_repeats_are_folded_with_their_number(recorded):
    watched, head = begin(recorded), recorded[0]
    refresh(watched, head)
    head.add("run.log", *(f"2026-11-23T02:00:0{number}.000Z [1] warning {number}" for number in range(5)))
    refresh(watched, head)
    lines = folded(watched.view(0).lines)
    assert (lines[-1][0].text, lines[-1][1]) == ("warning 4", 5)
    assert log_lines(watched.view(0))[-1].text == "02:00:04 gpunode0/1 (x 5) warning 4"
    assert [line.text for line in log_lines(watched.view(0), 1, "WARNING 3")] == ["02:00:03 warning 3"]


def test_a_curve_with_nan_and_infinity_is_drawn(recorded):
    watched, head = begin(recorded), recorded[0]
    refresh(watched, head)
    head.add("events.jsonl", *({"event": "progress", "step": step, "loss": None} for step in range(41, 81)))
    refresh(watched, head)
    lines = [line.text for line in loss_plot(watched.view(0), 60, 8)]
    assert len(lines) == 8
    assert lines[-2].rstrip().endswith("xxx")
    assert any("⠁" <= sign <= "⣿" for sign in lines[0])
    assert all(len(text) <= 60 for text in lines)


def test_events_are_marked_on_the_axis_of_a_curve(recorded):
    watched, head = begin(recorded), recorded[0]
    refresh(watched, head)
    middle = watched.view(0).points[20]
    head.add("events.jsonl", {"event": "hang", "time": middle.time, "text": "no step"})
    refresh(watched, head)
    marks, axis = (line.text for line in loss_plot(watched.view(0), 89, 8)[-2:])
    assert axis.strip().startswith("1 ")
    assert axis.endswith("step 40")
    assert marks.index("H") == 9 + (middle.step - 1) * 80 // 39


def test_a_save_is_one_event(recorded):
    watched, head = begin(recorded), recorded[0]
    refresh(watched, head)
    before = len(watched.view(0).events)
    phases = ["evaluating", "training", "saving", "training", "saving", "training"]
    head.add("events.jsonl", *({"event": "phase", "time": 1795396300.0, "phase": phase} for phase in phases))
    refresh(watched, head)
    kinds = [(event.kind, event.text) for event in watched.view(0).events[before:]]
    assert kinds == [("phase", "evaluating"), ("phase", "training"), *[("checkpoint", "saving")] * 2]


def test_a_node_whose_ranks_print_no_step_has_the_phase_and_step_of_the_run(recorded):
    quiet = recorded[1]
    quiet.state |= {"phase": "starting", "step": 12}

    def shown(**changes):
        (quiet.folder / "state.json").write_text(json.dumps({**quiet.state, **changes}))
        watched = begin(recorded)
        refresh(watched, *recorded)
        node = watched.view(0).nodes[1]
        row = run_output(RunStatus(watched.run, {}), 0.0)[1].split("gpunode1")[-1].split()
        assert row[:3] == ["1", node.state, node.phase]
        return node.phase, node.step

    assert shown() == ("training", 40)
    assert shown(phase="loading", step=None) == ("training", 40)
    assert shown(phase="saving") == ("saving", 12)
    assert shown(attempt=2) == ("starting", 12)  # rank 0's steps are those of the attempt before
    recorded[0].state["phase"] = "loading"
    (recorded[0].folder / "state.json").write_text(json.dumps(recorded[0].state))
    assert shown() == ("starting", 12)


def test_a_run_without_samples_or_steps_is_shown(tmp_path):
    node = Node(tmp_path, "gpu01", 0, 1)
    watched = begin([node])
    refresh(watched, node)
    view = watched.view(1795396100.0)
    assert view.points == ()
    assert view.lines == ()
    assert view.nodes[0].gpus == ()
    assert "no sample of a GPU" in gpu_lines(view, 80)[0].text
    assert loss_plot(view, 40, 6)[0].text == "no number yet"


def test_the_expected_band_is_behind_the_curve_and_in_words(recorded):
    head = recorded[0]
    slow = "the run as a whole is slow: 2 s a step, expected 0.4 to 0.5 s (given)"
    band = {"version": 1, "basis": "given", "step_seconds": [0.4, 0.5]}
    head.state |= {"slow": slow, "expected": band}
    (head.folder / "state.json").write_text(json.dumps(head.state))
    head.add("events.jsonl", *({"event": "progress", "step": step, "time": 2.0 * step} for step in range(41, 200)))
    watched = begin(recorded)
    refresh(watched, *recorded)
    view = replace(watched.view(0), points=tuple(point for point in watched.view(0).points if point.step > 40))
    assert speed_title(view) == "steps/s, ░ expected 2 to 2.5"
    rows = [line.text for line in speed_plot(view, 60, 9)]
    assert [row[9:].strip("\u2800")[:1] == "░" for row in rows] == [True, True, *[False] * 7]
    assert rows[0].split()[0] == "2.5"
    assert rows[7].split()[0] == "0.5"
    assert slow in [line.text for line in head_lines(view, 120)]
    tokens = replace(view, points=(replace(view.points[0], tokens=5.0),))
    assert speed_title(tokens) == "tokens/s"
    head.state |= {"slow": ["x"], "expected": {"version": 9}}
    (head.folder / "state.json").write_text(json.dumps(head.state))
    refresh(watched, head)
    assert (watched.view(0).slow, watched.view(0).expected) == ("", None)


def many(tmp_path, nodes=64, gpus=8):
    """A view of many nodes: the answers of one node under other names."""
    samples = [
        {"index": gpu, "use": 90 + gpu, "memory": 60 << 30, "memory_total": 80 << 30, "power": 650.5, "temperature": 61}
        for gpu in range(gpus)
    ]
    source = Node(tmp_path, "gpu001", 0, nodes, RECORDED / "healthy_gpu_zero2" / "gpunode0")
    source.add("metrics.jsonl", {"time": 1795396099.0, "gpus": samples, "rss": 1 << 34, "step": 40})
    out = "\n".join(source.answer())
    names = [f"gpu{number:03}" for number in range(1, nodes + 1)]
    outs = {
        name: out.replace('"gpu001"', f'"{name}"')
        .replace(f"{RUN}/logs/node0", f"{RUN}/logs/node{rank}")
        .replace('"node_rank": 0', f'"node_rank": {rank}')
        for rank, name in enumerate(names)
    }
    runs = merge_runs(parse_runs(name, each, names) for name, each in outs.items())
    watched = Watched(runs[RUN], names)
    for name, each in outs.items():
        watched.take(name, each.split("\n"))
    return watched, outs


def test_all_gpus_of_64_nodes_are_on_one_screen(tmp_path):
    watched, _ = many(tmp_path)
    view = watched.view(1795396100.0)
    lines = node_lines(view, 200, 40)
    assert len(lines) <= 22
    text = "\n".join(line.text for line in lines)
    assert all(f"gpu{number:03} " in text for number in range(1, 65))
    assert sum(text.count(sign) for sign in "▇█") == 64 * 8
    assert "64 nodes  512 GPUs" in head_lines(view, 200)[0].text
    assert sum(line.text.count("%") for line in gpu_lines(view, 200)) == 2 * 512


def test_clocks_throttling_and_interfaces_are_shown(recorded):
    old = begin(recorded).view(0)
    assert "CLOCK" not in node_lines(old, 200, 40)[0].text  # samples of an older agent
    assert "MHz" not in gpu_lines(old, 200)[0].text
    reasons = [["sw_power_cap"], ["hw_slowdown", "hw_thermal_slowdown"], None, "x"]
    gpus = [{"index": at, "clock": 1980 - 700 * (at == 1), "throttle": each} for at, each in enumerate(reasons)]
    rates = {
        "network": {"eth0": {"in": 1 << 20, "out": None}},
        "infiniband": {"mlx5_0/1": {"in": 0, "out": 5 << 30}},
    }
    recorded[0].add("metrics.jsonl", {"time": 1795396099.0, "gpus": gpus, **rates})
    watched = begin(recorded)
    refresh(watched, *recorded)
    view = watched.view(1795396100.0)
    header, first = node_lines(view, 200, 40)[:2]
    assert "CLOCK          THROTTLE        " in header.text
    assert "1280-1980 MHz  hw thermal (1)" in first.text
    assert first.style == "red"
    lines = gpu_lines(view, 40)
    assert [line.text.split()[-2:] for line in lines[:4]] == [
        ["1980MHz", "p"],
        ["1280MHz", "T"],
        ["-W", "1980MHz"],
        ["-W", "1980MHz"],
    ]
    assert [line.style for line in lines[:2]] == ["", "red"]
    text = "\n".join(line.text for line in network_lines(view, 60))
    assert "eth0     out            - in     1.0 MB/s" in text
    assert "mlx5_0/1 out     5.4 GB/s in        0 B/s" in text
    assert "rates need two samples" in network_lines(replace(view, nodes=()), 60)[0].text


class Answers:
    """Connections to nodes that are this machine; those in ``away`` do not answer. ``heard`` gets lines and results."""

    def __init__(self, nodes, away=()):
        self.names, self.away, self.started = [node.name for node in nodes], away, 0
        self.heard, self.remotes = queue.SimpleQueue(), {}

    def __getitem__(self, node):
        if node.name in self.away:
            raise NodeUnreachable(node, "no route to host")
        if not (remote := self.remotes.get(node.name)) or not remote.alive:
            remote = self.remotes[node.name] = LocalRemote(node)

        def run(script, on_line=None, **given):
            self.started += 1
            take = on_line and (lambda line: on_line(line) or self.heard.put(line))
            result = remote.run(script, on_line=take, **given)
            self.heard.put(result)
            return result

        return SimpleNamespace(node=node, run=run)

    def until(self, seen):
        while not seen(self.heard.get(timeout=20)):
            pass


def test_nodes_send_what_is_new_over_one_connection_and_continue_after_a_lost_one(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "AGAIN", 0.01)
    nodes = [Node(tmp_path, name, rank, 2, RECORDED / "healthy_gpu_zero2" / name)
             for rank, name in enumerate(["gpunode0", "gpunode1"])]  # fmt: skip
    answers = Answers(nodes, away={"gpunode1"})
    inventory = Inventory(
        tmp_path / "inventory.yaml", PurePosixPath(tmp_path / "current"),
        tuple(model.Node(name, f"10.0.0.{rank}") for rank, name in enumerate(answers.names)),
    )  # fmt: skip
    assert inventory.root == PurePosixPath(tmp_path)

    def last(text):
        return [line.text for line in watching.view().lines][-1:] == [text]

    with Watch(Session(inventory, connections=answers), begin(nodes).run, every=0.01) as watching:
        assert watching.answered.wait(20)
        view = watching.view()
        assert [(node.state, node.silent) for node in view.nodes] == [
            ("running", ""), ("no answer", "no route to host")
        ]  # fmt: skip
        assert view.points
        nodes[0].add("run.log", "2026-11-23T02:00:00.000Z [0] second")
        answers.until(lambda _: last("second"))
        assert answers.started == 1
        answers.remotes["gpunode0"].close()
        nodes[0].add("run.log", "2026-11-23T02:00:01.000Z [0] third")
        answers.until(lambda _: last("third"))
        assert [line.text for line in watching.view().lines][-2:] == ["second", "third"]
        assert len(watching.view().lines) == len(view.lines) + 2
        assert answers.started == 2
    answers.until(lambda heard: isinstance(heard, Result) and heard.rc == 0)  # nothing is left on the node


def test_a_node_that_sends_too_much_or_nothing_is_silent(tmp_path, monkeypatch):
    node = Node(tmp_path, "gpunode0", 0, 1)
    inventory = Inventory(
        tmp_path / "inventory.yaml", PurePosixPath(tmp_path / "current"), (model.Node(node.name, "10.0.0.1"),)
    )

    def floods(_script, on_line, **_):
        for _ in range(100):
            on_line("log " + "x" * 100_000)
        return Result(0, "")

    for answer, says in [
        (floods, "more than 4 MiB at once"),
        (lambda *_, **__: Result(4, "", "no Python"), "no Python"),
    ]:
        pool = {inventory.nodes[0]: SimpleNamespace(run=answer)}
        with Watch(Session(inventory, connections=pool), begin([node]).run) as watching:
            assert watching.answered.wait(20)
            assert says in watching.view().nodes[0].silent
    monkeypatch.setattr(watch, "LATE", -3.0)
    waits = threading.Event()
    pool = {inventory.nodes[0]: SimpleNamespace(run=lambda *_, **__: waits.wait(20) and Result(0, ""))}
    with Watch(Session(inventory, connections=pool), begin([node]).run) as watching:
        assert "no answer for" in watching.view().nodes[0].silent
        waits.set()


CATCHES = (
    "import signal; signal.signal(signal.SIGUSR2, lambda *_: print('saves', flush=True)); print('ready', flush=True)"
)
IGNORES = "print('ready', flush=True)"


@pytest.fixture
def rank():
    """Start a process that looks like a rank of trainer.lm, or of another program."""
    started = []

    def start(code, module="trainer.lm"):
        waits = f"{code}; import sys; sys.stdin.read()"
        marks = {**os.environ, "CLUSTERCTL_RUN": RUN, "CLUSTERCTL_NODE": "gpunode0"}
        argv = [sys.executable, "-c", waits, "-m", module, "--data", "x"]
        process = subprocess.Popen(argv, env=marks, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.communicate("", timeout=20)


def test_save_signals_the_trainer_alone_and_only_if_it_catches_the_signal(tmp_path, rank):
    node = Node(tmp_path, "gpunode0", 0, 1)
    inventory = Inventory(
        tmp_path / "inventory.yaml", PurePosixPath(tmp_path / "current"), (model.Node(node.name, "10.0.0.1"),)
    )
    session = Session(inventory, connections=Answers([node]))
    others = [rank(IGNORES), rank(CATCHES, "llamafactory.cli")]
    with pytest.raises(UsageError, match=r"only trainer\.lm and trainer\.vlm can") as error:
        save_run(session, RUN)
    assert error.value.hint == f"to save and stop: clusterctl stop --save {RUN}"
    trainer = rank(CATCHES)
    assert save_run(session, RUN) == Saved(RUN, "gpunode0", 1, 40)
    assert trainer.stdout.readline() == "saves\n"
    assert [process.poll() for process in others] == [None, None]
    assert others[1].communicate("", timeout=20)[0] == ""
    node.state["state"] = "finished"
    (node.folder / "state.json").write_text(json.dumps(node.state))
    with pytest.raises(UsageError, match="is finished: it saves nothing more"):
        save_run(session, RUN)


def test_status_watch_shows_the_status_again_until_ctrl_c(tmp_path):
    command = [sys.executable, "-c", "from provision.cli import main; main()", "status", "--watch", "0.1"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          text=True) as program:  # fmt: skip
        seen = 0
        for line in program.stdout:
            seen += "up " in line
            if seen == 3:
                break
        program.send_signal(signal.SIGINT)
        program.stdout.read()
        assert program.wait(20) in {0, 130}
    assert seen == 3


# --- the screen ----------------------------------------------------------------------------------


def texts(app):
    return {pane.id: pane.text for pane in app.screen.query(Pane)}


def actions(**given):
    """What the keys do, without a run."""
    usual = {"stop": lambda _save: "stopped", "save": lambda: "saves", "diagnose": lambda: "all is well",
             "runs": lambda: [(RUN, Line(f"* {RUN}")), ("another", Line("  another"))]}  # fmt: skip
    return Actions(**{**usual, **given})


def looks(app, size, *groups):
    """The texts of the panes after each group of keys, and which panes are visible."""

    async def pilot():
        found = []
        async with app.run_test(size=size) as hands:
            for keys in groups:
                await hands.press(*keys)
                await app.workers.wait_for_complete()
                await hands.pause()
                panes = [pane for pane in app.screen.query(Pane) if pane.display and pane.size.height]
                found.append((texts(app), {pane.id for pane in panes if pane.size.width}))
        return found

    return asyncio.run(pilot())


def screen(view, size, *keys, **given):
    """The panes' texts after the keys, and which of them are visible."""
    return looks(Monitor(lambda: view, actions(**given), 60.0), size, keys)[-1]


def test_the_screen_shows_the_run(view):
    shown, visible = screen(view, (80, 24))
    assert visible >= {"head", "nodes", "loss", "speed", "log", "hint"}
    assert RUN in shown["head"]
    assert "step 40/400" in shown["head"]
    assert "gpunode0" in shown["nodes"]
    assert "gpunode1" in shown["nodes"]
    assert any("⠁" <= sign <= "⣿" for sign in shown["loss"])
    assert "gpunode0" in shown["log"]


@pytest.mark.parametrize("size", [(20, 5), (1, 1)])
def test_a_tiny_terminal_does_not_crash(view, size):
    screen(view, size, "g", "e", "r", "question_mark", "escape", "s", "n")


def test_a_terminal_that_shrinks_is_drawn_again(view):
    app = Monitor(lambda: view, actions(), 60.0)

    async def pilot():
        async with app.run_test(size=(120, 40)) as pilot:
            for size in [(80, 24), (20, 10), (3, 2), (120, 40)]:
                await pilot.resize_terminal(*size)
                await pilot.pause()
            return texts(app)

    assert RUN in asyncio.run(pilot())["head"]


def test_stop_asks_first(view):
    stopped = []

    def stop(save):
        stopped.append(save)
        return "stopped on 2 nodes"

    app = Monitor(lambda: view, actions(stop=stop), 60.0)
    *_, (shown, _) = looks(app, (80, 24), "sn", "sy")
    assert stopped == [False]
    assert shown["text"] == "stopped on 2 nodes"
    looks(Monitor(lambda: view, actions(stop=stop), 60.0), (80, 24), "Sy")
    assert stopped == [False, True]


def test_w_saves_without_stopping_or_says_what_is_possible(view):
    def refuse():
        raise UsageError("it cannot", hint="clusterctl stop --save")

    assert screen(view, (80, 24), "w")[0]["text"] == "saves"
    assert screen(view, (80, 24), "w", save=refuse)[0]["text"] == "it cannot\ntry: clusterctl stop --save"


def test_d_shows_the_diagnosis_or_why_there_is_none(view):
    def refuse():
        raise UsageError("no log", hint="clusterctl status")

    assert screen(view, (80, 24), "d", diagnose=lambda: "rank 3: out of memory")[0]["text"] == "rank 3: out of memory"
    assert screen(view, (80, 24), "d", diagnose=refuse)[0]["text"] == "no log\ntry: clusterctl status"


def test_search_and_rank_select_the_log(view):
    app = Monitor(lambda: view, actions(), 60.0)
    found = looks(app, (120, 40), ["slash", *"app", "enter"], ["escape"], "r", "R")
    searched, ended, first, everything = (shown["log"] for shown, _ in found)
    assert searched
    assert all("app" in line for line in searched.split("\n"))
    assert len(ended) > len(searched)
    assert first == "\n".join(line.text for line in log_lines(view, 0))
    assert everything == ended


def test_g_shows_every_gpu_and_e_the_events(view):
    shown, visible = screen(view, (80, 24), "g", "e")
    assert all(name in shown["nodes"] for name in ("gpunode0:0", "gpunode0:1", "gpunode1:0", "gpunode1:1"))
    assert "events" in visible
    assert "log" not in visible
    assert "attempt 1 from the start" in shown["events"]


def test_n_lists_the_runs_and_leaves_for_the_chosen_one(view):
    for keys, result in [(["down", "enter"], "another"), (["enter"], None)]:
        app = Monitor(lambda: view, actions(), 60.0)
        looks(app, (80, 24), "n", keys)
        assert app.return_value == result


def test_p_shows_the_logs_of_several_ranks_side_by_side(view):
    app = Monitor(lambda: view, actions(), 60.0)
    (shown, visible), (_, after) = looks(app, (120, 40), ["p", *"0-2", "enter"], ["escape"])
    assert visible & {"log", "log1", "log2", "log3"} == {"log", "log1", "log2"}
    for name, rank in [("log", 0), ("log1", 1), ("log2", 2)]:
        assert shown[name] == "\n".join(line.text for line in log_lines(view, rank))
    assert after & {"log", "log1"} == {"log"}
    assert ranks_of("3,1-2 x 1-999999", 8) == (3, 1, 2, 4, 5, 6, 7, 8)
    assert ranks_of("all", 8) == ()


def test_c_copies_the_diagnosis(view, monkeypatch):
    monkeypatch.delenv("TMUX", raising=False)
    app = Monitor(lambda: view, actions(), 60.0)
    looks(app, (80, 24), "c")
    assert app.clipboard == "all is well"


def test_markup_from_a_node_is_drawn_as_text(recorded):
    watched, head = begin(recorded), recorded[0]
    head.add("run.log", "2026-11-23T02:00:00.000Z [0] [bold]x[/bold] [@click=app.quit]y[/]")
    refresh(watched, *recorded)
    shown, _ = screen(watched.view(0), (80, 24))
    assert "[bold]x[/bold] [@click=app.quit]y[/]" in shown["log"]


@pytest.mark.parametrize(("term", "tty", "says"), [("dumb", True, "TERM=dumb"), ("xterm", False, "needs a terminal")])
def test_a_terminal_without_a_screen_is_refused_with_the_plain_command(monkeypatch, term, tty, says):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr("sys.stdin", type("In", (), {"isatty": lambda _: tty})())
    monkeypatch.setattr("sys.stdout", type("Out", (), {"isatty": lambda _: tty})())
    with pytest.raises(UsageError, match=says) as error:
        refuse_without_screen("sft", as_json=False)
    assert error.value.hint == "clusterctl status sft --watch"
