"""``agent statuses``: one connection shows all nodes of a run; and what the controller accepts of it."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module
from agents import eventually, nodes

from provision.tasks.status import read_answer
from trainer.agent.contract.statuses import LARGEST
from trainer.agent.statuses import output_of

SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def parts(tmp_path):
    """Three running agents and a spare's, each with a script that names its node."""
    runs, plan = nodes(tmp_path, 4)
    plan["link"]["others"] = [["127.0.0.1", plan["link"]["port"] + 1 + rank] for rank in range(3)]
    plan["nnodes"] = 3
    for run in runs:
        run.plan(SLEEP, **plan)
        (run.folder / "status.sh").write_text(f"echo 'me {run.rank}'\necho \"part x of {run.rank}\"\n")
        run.begin()
    eventually(lambda: [run.state().get("state") for run in runs] == ["running"] * 3 + ["spare"])
    yield runs
    for run in runs:
        run.close()


def ask(run, patience=20.0):
    """The lines of ``agent statuses`` on a node, without the first one, by the node's name."""
    done = subprocess.run(
        run.command("statuses", "--patience", patience), capture_output=True, text=True, check=False, timeout=90
    )
    first, *lines = map(json.loads, done.stdout.splitlines() or ["{}"])
    return done.returncode, first, {line["node"]: line for line in lines}


def test_any_agent_shows_all_nodes_of_the_run(parts):
    for run in (parts[0], parts[2], parts[3]):  # the hub, another node, and the spare
        rc, first, lines = ask(run)
        assert (rc, first, sorted(lines)) == (0, {"nodes": 4}, ["n0", "n1", "n2", "n3"])
        for name, line in lines.items():
            node, out, clock = read_answer(json.dumps(line))
            assert (node, out) == (name, f"me {name[1]}\npart x of {name[1]}\n")
            assert abs(clock.seconds) <= clock.error < 20  # all have the same clock
        assert list(run.logs.glob(".statuses.*")) == []
    assert [run.state()["state"] for run in parts] == ["running"] * 3 + ["spare"]


def test_an_agent_that_does_not_answer_has_no_line(parts):
    stopped = parts[1].state()["pid"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        (parts[2].folder / "status.sh").write_text("exec sleep 600\n")  # hangs
        (parts[3].folder / "status.sh").unlink()
        began = time.monotonic()
        rc, first, lines = ask(parts[0], 8.0)
        assert time.monotonic() - began < 60
        assert (rc, first) == (0, {"nodes": 4})
        assert sorted(lines) == ["n0"]
    finally:
        os.kill(stopped, signal.SIGCONT)
    (parts[2].folder / "status.sh").write_text("echo me 2\n")
    (parts[3].folder / "status.sh").write_text("echo me 3\n")
    eventually(lambda: sorted(ask(parts[0])[2]) == ["n0", "n1", "n2", "n3"])


def test_a_stop_that_saves_is_not_disturbed_by_questions(parts):
    assert ask(parts[1])[0] == 0
    parts[0].do("stop")
    assert [run.wait_end()["state"] for run in parts] == ["stopped"] * 4
    rc, first, lines = ask(parts[0])
    assert (rc, first, lines) == (1, {}, {})


def test_a_script_that_prints_too_much_is_no_answer(tmp_path):
    script = tmp_path / "status.sh"
    script.write_text("yes 0123456789 | head -c 1000000\n")
    assert output_of(script) is None
    script.write_text(f"head -c {LARGEST - 100} /dev/urandom\n")  # does not compress
    assert output_of(script) is None
    script.write_text("yes 0123456789 | head -c 200000\n")
    assert len(output_of(script)) < 4000
    assert output_of(tmp_path / "missing") == output_of(script, patience=0.0) is None


def line(out=b"uptime 1.0\n", **changes):
    encoded = base64.b64encode(zlib.compress(out)).decode()
    content = {"node": "n1", "out": encoded, "sent": 10.0, "taken": 110.1, "given": 110.2, "received": 10.5}
    return json.dumps({key: value for key, value in (content | changes).items() if value is not None})


def test_the_clock_is_between_the_bounds_that_the_times_allow():
    _, out, clock = read_answer(line())
    assert out == "uptime 1.0\n"
    assert clock.seconds == pytest.approx(99.9)  # 110.2 - 10.5 to 110.1 - 10.0
    assert clock.error == pytest.approx(0.2)


@pytest.mark.parametrize(
    "changes",
    [{"sent": "x"}, {"sent": 0}, {"taken": None}, {"given": True}, {"received": float("nan")}, {"taken": 1.0}],
)
def test_times_that_cannot_be_are_no_clock(changes):
    assert read_answer(line(**changes))[2] is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"nodes": 4}',
        line(node=7),
        line(node=None),
        line(out=b"x").replace("n1", "n" * (2 << 20)),
        json.dumps({"node": "n1", "out": "no base64"}),
        json.dumps({"node": "n1", "out": base64.b64encode(b"no zlib").decode()}),
        line(bytes(LARGEST + 1)),  # a bomb
        json.dumps({"node": "n1", "out": base64.b64encode(zlib.compress(b"cut off" * 99)[:-8]).decode()}),
    ],
)
def test_what_is_no_answer_is_skipped(text):
    assert read_answer(text) is None
