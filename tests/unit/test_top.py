"""``clusterctl top``: the program on the node, its samples as rows, and the screen."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from provision.cli.monitor_panes import Pane
from provision.cli.top_app import TopScreen
from provision.model import Result
from provision.run.view import View, node_view
from provision.ssh.remote import NodeUnreachable
from provision.summaries.top import TABLES, UNLIMITED, process_lines, top_head, top_lines, top_node_lines, top_output
from provision.summaries.words import CHINESE, chinese
from provision.tasks.node_program import program, program_script
from provision.tasks.top import MODULES, Top
from trainer.agent import top

# Answers of nvidia-smi 580.159.04, H100 x2, 2026-11; throttled.sh prints what a driver before 535.54 would.
CONSTANTS = "0, 1980, GPU-87c01b2e-7981-0ff9-8490-e32a18575155\n1, 1980, GPU-3ca7e7ed-bc6d-d21a-0246-4bdd26aa1229\n"
VALUES = "0, 0, 527, 81559, 122.39, 41, 1980, 0x0000000000000000\n1, 0, 4, 81559, 72.03, 34, 345, 0x0000000000000001\n"
APP = f"{os.getpid()}, GPU-87c01b2e-7981-0ff9-8490-e32a18575155, 518\n"
NVIDIA_SMI = f"""\
#!/bin/sh
case $* in
*uuid,used*|*compute-apps*) printf '{APP}' ;;
*clocks.max.sm*) printf '{CONSTANTS}' ;;
*clocks_event_reasons*) echo 'Field "clocks_event_reasons.active" is not a valid field to query.'; exit 2 ;;
*) printf '{VALUES}' ;;
esac
case $* in *--loop*) exec sleep 600 ;; esac
"""


def sample(**changes):
    hot = ["hw_slowdown", "hw_thermal_slowdown"]
    gpus = [
        {"index": at, "use": 90 + at, "memory": 60 << 30, "memory_total": 80 << 30, "power": 650.5, "temperature": 61,
         "clock": 1980, "clock_max": 1980, "throttle": ["sw_power_cap"] if at else hot}
        for at in range(8)
    ]  # fmt: skip
    users = [
        {"gpu": at, "pid": 700 + at, "user": "alice", "memory": 1 << 30,
         "command": "/opt/llm/bin/python -u /home/alice/train.py --api-key=sk-123456789012345678901234"}
        for at in range(8)
    ]  # fmt: skip
    found = {"time": 1.0, "memory_total": 512 << 30, "memory_available": 500 << 30, "load": 3.25, "cores": 64,
             "gpus": gpus, "users": users, "network": {"eth0": {"in": 10, "out": 2_000_000}},
             "infiniband": {"mlx5_0/1": {"in": 5 << 30, "out": 5 << 30}}, "disk_free": 1 << 40}  # fmt: skip
    return {**found, **changes}


def view_of(*nodes):
    return View("", 1795396100.0, nodes=tuple(nodes))


@pytest.fixture
def node_with_gpus(tmp_path):
    """The environment of a node with a recorded nvidia-smi."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(NVIDIA_SMI)
    tool.chmod(0o755)
    return {"PATH": os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), "/usr/bin", "/bin"])}


def test_the_agents_sampler_runs_from_stdin_without_a_release(node_with_gpus, tmp_path):
    script = program_script(["/nonexistent"], MODULES, ["top", "--once", "--folder", "/nonexistent"])
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env=node_with_gpus, cwd=tmp_path) as node:  # fmt: skip
        node.stdin.write(program(MODULES))
        node.stdin.flush()  # it stays open, as a connection does
        line, errors = node.stdout.readline(), node.stderr.read()
    assert (node.returncode, errors) == (0, b"")
    found = json.loads(line)
    assert [each["clock"] for each in found["gpus"]] == [1980, 345]
    assert [each["clock_max"] for each in found["gpus"]] == [1980, 1980]
    assert [each["throttle"] for each in found["gpus"]] == [[], ["gpu_idle"]]
    (user,) = found["users"]
    assert (user["gpu"], user["pid"], user["memory"]) == (0, os.getpid(), 518 << 20)
    assert "python" in user["command"]
    assert user["user"]
    assert found["cores"] == os.cpu_count()
    assert found["disk_free"] > 0  # of the disk on which its root will be
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nvidia-smi"]  # nothing was written


def test_a_node_without_python_says_so():
    script = program_script(["/nonexistent"], MODULES, ["top"], release="/nonexistent")
    done = subprocess.run(["/bin/sh", "-c", script], env={"PATH": "/nonexistent"}, capture_output=True, check=False)
    assert done.returncode == 4
    assert b"there is no Python" in done.stderr


def test_the_list_of_processes_is_read_defensively(tmp_path):
    answers = tmp_path / "answers"
    answers.write_text("No running processes found\n1, GPU-a, [N/A]\nx, GPU-a, 3\n2, nothing, 3\n999999999, GPU-b, 7\n")
    users = top.Users(("/bin/sh", "-c", f"cat {answers}; exec sleep 600"))
    ticks = iter(range(10**6))
    while not (found := users.look(next(ticks) / 1e6, {"GPU-a": 3})):
        pass
    known, unknown = found
    assert (known["gpu"], known["pid"], known["user"], known["memory"]) == (3, 1, "root", None)
    assert unknown == {"gpu": None, "pid": 999999999, "user": None, "command": None, "memory": 7 << 20}
    assert users.look(1000.0, {}) == []  # they have not been listed again
    users.close()


def test_rows_of_nodes_and_processes():
    view = view_of(node_view("gpu01", sample()), node_view("gpu02", {}))
    assert "2 nodes  8 GPUs  use 94 %  5,204 W" in top_head(view, 100).text
    header, first, second = (line.text for line in top_node_lines(view, 300))
    assert header.split()[:4] == ["NODE", "GPUS", "USE", "MEM"]
    for text in ("1980 MHz", "hw thermal (1)", "3.2/64", "12.9 GB/550 GB", "5.4 GB/s"):
        assert text in first
    assert first.endswith("alice: python train.py (8)")
    assert second.split() == ["gpu02", *["-"] * (len(header.replace("DISK FREE", "DISK").split()) - 1)]
    rows = [line.text for line in process_lines(view)]
    assert rows[1].startswith("gpu01  0    700  alice  1.1 GB")
    assert "sk-123456789012345678901234" not in "".join(rows)
    assert process_lines(view_of())[0].text == "no process uses a GPU"


def test_every_text_is_known_in_chinese():
    asked = set()

    def say(text, *values):
        asked.add(text)
        return chinese(text, *values)

    silent = replace(node_view("gpu02", {}), state="no answer", silent="no route to host")
    views = (view_of(node_view("gpu01", sample()), silent), view_of(node_view("gpu01", {})), view_of())
    lines = [line.text for view in views for line in [*top_lines(view, 300, say), *process_lines(view, say=say)]]
    for title, lines_of in TABLES:
        lines += [say(title), *(line.text for view in views for line in lines_of(view, 300, 40, say))]
    assert asked - set(CHINESE) <= {""}
    text = "\n".join(lines)
    for expected in ("2 个节点  1 个无应答  8 个 GPU  利用率 94 %", "硬件过热保护 (1)", "gpu02  无应答", "没有节点"):
        assert expected in text
    assert "显存    命令" in text  # columns of two wide signs


def test_a_snapshot_is_one_json_object_and_a_table():
    silent = replace(node_view("gpu02", {}), state="no answer", silent="no route to host")
    data, text = top_output(view_of(node_view("gpu01", sample()), silent), {"gpu02": "no route to host"}, UNLIMITED)
    assert json.loads(json.dumps(data, allow_nan=False))["nodes"]["gpu01"]["gpus"][0]["throttle"] == [
        "hw_thermal_slowdown"
    ]
    assert data["unreachable"] == {"gpu02": "no route to host"}
    assert "gpu02: no answer: no route to host" in text
    assert text.count("gpu01:") == 8  # one GPU a line
    assert all(len(line.text) <= 80 for line in top_lines(view_of(node_view("gpu01", sample())), 80)[:3])


@pytest.mark.parametrize(
    "found",
    [
        {"gpus": 3, "users": 3, "network": [], "infiniband": 3, "load": "x", "cores": None, "memory_total": True},
        {
            "gpus": [3, {}],
            "users": [3, {}, {"pid": "x"}, {"pid": 1, "user": 3, "command": ["x"], "gpu": "y", "memory": "z"}],
        },
        {"gpus": [{"index": 10**300, "clock": float("nan"), "throttle": 3}] * 999, "users": [{"pid": 1}] * 9999},
        {"users": [{"pid": 1, "user": "\x1b[31m\n[red]", "command": "a\x00\u2028b" * 9999}], "memory_available": 9},
    ],
)
def test_samples_of_a_hostile_node_are_bounded(found):
    view = view_of(node_view("gpu01", found))
    for line in [*top_lines(view, 80), *top_lines(view, UNLIMITED), top_head(view, 20)]:
        assert "\x1b" not in line.text
        assert "\n" not in line.text
        assert len(line.text) < 1000
    assert len(view.nodes[0].processes) <= 256
    assert len(view.nodes[0].gpus) <= 64


class Connections:
    """Nodes that print a sample and wait for the end of their input, or do not answer."""

    def __init__(self):
        self.asked = threading.Event()

    def __getitem__(self, node):
        def run(_script, *, stdin, on_line, deadline=None):
            assert next(stdin) == program(MODULES)
            if node.name == "gpu02":
                raise NodeUnreachable(node, "no route to host\nmore")
            if node.name == "gpu03":
                return Result(4, "", "there is no Python: deploy a release, or install python3\n")
            on_line("a login script prints this")
            on_line(json.dumps(sample()))
            self.asked.set()
            if deadline is None:
                next(stdin, None)
            return Result(0, "", "")

        return SimpleNamespace(run=run)


def test_a_silent_node_delays_no_other():
    nodes = tuple(SimpleNamespace(name=f"gpu0{at}", address="10.0.0.1", port=22) for at in (1, 2, 3))
    connections = Connections()
    inventory = SimpleNamespace(prefix="/opt/llm/current", root="/opt/llm")
    session = SimpleNamespace(connections=connections, nodes=nodes, inventory=inventory)
    with Top(session, 2.0) as watched:
        assert connections.asked.wait(20)
        view = watched.view()
        while sum(bool(node.silent) for node in view.nodes) < 2:
            view = watched.view()
    assert [node.silent for node in view.nodes] == [
        "", "no route to host", "there is no Python: deploy a release, or install python3",
    ]  # fmt: skip
    assert len(view.nodes[0].gpus) == 8


# --- the screen ----------------------------------------------------------------------------------


def test_a_thousand_nodes_scroll_and_g_shows_the_other_tables():
    one = node_view("gpu0000", sample())
    nodes = [one, *(node_view(f"gpu{at:04}", sample(gpus=[{"index": 0, "use": 5}], users=[])) for at in range(1, 1000))]
    app = TopScreen(lambda: view_of(*nodes), 60.0)

    async def pilot():
        tables = []
        async with app.run_test(size=(80, 24)) as pilot:
            for _ in range(4):
                await pilot.pause()
                tables.append(app.query_one("#table", Pane).text)
                await pilot.press("g")
            await pilot.pause()
            await pilot.press("end")
            await pilot.pause()
            assert app.query_one("#table", Pane).scroll_offset.y > 900
            for size in [(20, 5), (1, 1), (200, 60)]:
                await pilot.resize_terminal(*size)
                await pilot.pause()
            return [*tables, app.query_one("#table", Pane).text]

    nodes_at_80, gpus, processes, network, nodes_at_200 = asyncio.run(pilot())
    assert nodes_at_80.count("\n") == 1000
    assert "hw thermal (1)" in nodes_at_80
    assert "gpu0000:7  97%  75%  61C 650W 1980MHz p" in gpus
    assert "alice" in processes
    assert "mlx5_0/1" in network
    assert "1980 MHz" in nodes_at_200
    assert "gpu0999" in nodes_at_200
