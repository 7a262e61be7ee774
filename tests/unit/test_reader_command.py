"""``clusterctl metrics`` and ``python -m trainer.reader``: output for people and for programs."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.append(str(Path(__file__).parent))  # for reader_logs; last, so that it hides no module

from reader_logs import FOLDER, data, rows

from provision.cli import cli
from provision.errors import NodesFailedError, UsageError
from provision.inventory import load
from provision.model import Progress, StageFinished, StageStarted
from provision.output import Reporter
from provision.render import render
from provision.run import record as records
from provision.session import Session
from provision.summaries.metrics import curve
from provision.tasks import logs as task
from trainer.reader import MARKS
from trainer.reader.__main__ import main as program

SHELLS = {"dash": ["dash"], "bash": ["bash", "--posix"], "busybox": ["busybox", "sh"]}
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


def metrics(*arguments, text=None):
    """The command's answer, as at its end."""
    out = io.StringIO()
    reporter = Reporter(out=out, err=io.StringIO())
    answer = CliRunner().invoke(cli, ["metrics", *map(str, arguments)], obj=reporter, input=text)
    if answer.exception and not isinstance(answer.exception, SystemExit):
        raise answer.exception
    reporter.finish()
    return out.getvalue()


def test_a_table_ends_with_one_line_about_all_of_it():
    head, *table, last = metrics(FOLDER / "gpt.jsonl").splitlines()
    assert head.split() == ["step", "loss", "lr", "grad", "norm", "ms/step", "tokens/s", "eval", "loss"]
    assert [line.split()[0] for line in table] == ["1", "2", "3", "resumed:", *"45678"]
    assert table[3].strip() == "resumed: step 4 follows step 6"
    assert "gpt.jsonl: step 8 of 8; loss 4.466, now 4.369; eval loss 4.359, best 4.359 at 8; " in last
    assert last.endswith("resumed at step 4 after step 6")


def test_columns_without_values_in_the_log_are_omitted():
    assert metrics(FOLDER / "deepspeed.log").splitlines()[0].split() == ["step", "lr", "ms/step"]


@pytest.mark.parametrize(("arguments", "count"), [([], 20), (["--last", "3"], 3), (["--last", "all"], 31)])
def test_how_many_rows_a_table_has(arguments, count):
    lines = metrics(FOLDER / "nanogpt.log", *arguments).splitlines()
    assert len([line for line in lines[1:-1] if "resumed" not in line]) == count
    assert lines[-2].split()[0] == "30"


def test_losses_that_are_nan_are_reported():
    assert "no finite number at 11 of 16, first at 12" in metrics(FOLDER / "trainer_nan.log")


def test_lines_without_steps_are_numbered():
    lines = metrics(FOLDER / "trainer_tee.log").splitlines()
    assert lines[0].split()[0] == "line"
    assert ": 8 lines; " in lines[-1]


def test_json():
    found = json.loads(metrics(FOLDER / "trainer_nan.log", "--json"))
    assert (found["total"], found["sources"], found["rank"], found["counted"]) == (32, ["trainer"], 0, False)
    assert len(found["rows"]) == 16
    assert found["rows"][0] == rows("trainer_nan.log")[0]._asdict()
    assert found["rows"][-1]["loss"] == "NaN"
    resumed = json.loads(metrics(FOLDER / "nanogpt.log", "--json", "--last", "2"))
    assert resumed["resumes"] == [{"after": 24, "at": 20}]
    assert [row["step"] for row in resumed["rows"]] == [29, 30]


def test_csv_has_all_steps_and_nothing_else():
    found = list(csv.DictReader(io.StringIO(metrics(FOLDER / "trainer_nan.log", "--csv"))))
    assert [int(row["step"]) for row in found] == list(range(2, 33, 2))
    assert math.isnan(float(found[-1]["loss"]))
    assert found[-1]["tokens_per_second"] == ""
    assert len(metrics(FOLDER / "trainer_nan.log", "--csv", "--last", "2").splitlines()) == 3


def test_stdin_and_a_folder(tmp_path):
    (tmp_path / "trainer_log.jsonl").write_bytes(data("llamafactory.jsonl"))
    (tmp_path / "run.log").write_bytes(b"iter 99: loss 1.5, time 2.00ms\n")
    assert metrics("--csv", tmp_path) == metrics("--csv", "-", text=data("llamafactory.jsonl"))


def test_several_files_are_read_as_one_training(tmp_path):
    content = data("nanogpt.log")
    at = content.index(b"Resuming training")
    for name, part in (("one", content[:at]), ("two", content[at:])):
        (tmp_path / name).write_bytes(part)
    assert metrics("--csv", tmp_path / "one", tmp_path / "two").count("\n") == 32
    assert "one and 1 more: step 30; " in metrics(tmp_path / "one", tmp_path / "two")


def test_a_rank_of_several():
    text = b"[rank0]: iter 1: loss 1.5, time 2.00ms\n[rank1]: iter 1: loss 2.5, time 2.00ms\n"
    assert "rank 0 (1 more rank reports numbers)" in metrics("-", text=text)
    assert "loss 2.5" in metrics("-", "--rank", "1", text=text)
    with pytest.raises(UsageError, match="rank 5 reports nothing") as refused:
        metrics("-", "--rank", "5", text=text)
    assert refused.value.hint == "ranks with numbers: 0, 1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.log"], r"cannot read none\.log: No such file"),
        (["./none"], "cannot read none: No such file"),
        ([FOLDER / "README.md"], "no line has a step, a loss or a time"),
        ([FOLDER.parent / "env"], "no log in .*env: it has no trainer_log.jsonl, train.log, run.log"),
        (["--csv", "--json", FOLDER / "gpt.log"], "--csv and --json cannot be used together"),
        (["--prometheus", "--csv", "r1"], "--prometheus prints the newest samples of one run"),
        (["--prometheus", "--last", "3"], "--prometheus prints the newest samples of one run"),
        (["--prometheus", "r1", "r2"], "--prometheus prints the newest samples of one run"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message) as refused:
        metrics(*arguments)
    assert refused.value.hint or "cannot read" in message or "cannot be used together" in message


@pytest.mark.parametrize("count", ["0", "-3", "some", "1.5"])
def test_number_of_rows_is_positive_or_all(count):
    answer = CliRunner().invoke(cli, ["metrics", f"--last={count}", "x.log"], obj=Reporter())
    assert answer.exit_code == 2
    assert "must be at least 1, or all" in answer.output


def test_progress_is_reported_for_a_slow_read(monkeypatch, tmp_path):
    (tmp_path / "log").write_bytes(data("nanogpt.log") * 500)
    clock = iter(range(10_000))
    monkeypatch.setattr(task.time, "monotonic", lambda: float(next(clock)))
    events = []
    task.read_logs([task.open_log(tmp_path / "log")], emit=events.append)
    size = (tmp_path / "log").stat().st_size
    assert isinstance(events[0], StageStarted)
    assert (events[0].total, events[0].unit) == (size, "bytes")
    assert events[-2] == Progress("metrics", size, size)
    assert isinstance(events[-1], StageFinished)


def test_progress_is_not_reported_for_a_fast_read():
    task.read_logs([task.open_log(FOLDER / "gpt.log")], emit=pytest.fail)


@pytest.mark.parametrize(
    ("values", "signs"),
    [
        ([], ""),
        ([1.0], "▁"),
        ([3.0, 2.0, 1.0], "█▅▁"),
        ([1.0, math.nan, 9.0], "▁x█"),
        ([math.inf] * 2, "xx"),
        ([0.0] * 600 + [7.0] * 600, "▁" * 30 + "█" * 30),
    ],
)
def test_the_curve(values, signs):
    assert curve(values) == signs


# --- a run ---------------------------------------------------------------------------------------


def script(folder, limit=1 << 20, *, events=True, marks=MARKS):
    return render("run/metrics.sh.j2", logs=str(folder), events=events, marks=marks, limit=limit)


def test_shellcheck(tmp_path):
    file = tmp_path / "metrics.sh"
    file.write_text(script("/a folder/it's"))
    subprocess.run([SHELLCHECK, "--shell=sh", file], check=True, timeout=60)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_node_sends_the_lines_that_can_hold_a_number(tmp_path, shell):
    logs = tmp_path / "a folder"
    logs.mkdir()
    ours = "2026-11-22T07:15:00.123Z [0] "
    (logs / "run.log").write_text(f"{ours}words\n{ours}iter 3: loss 1.5, time 2.00ms\n{ours}Token indices\n")
    event = '{"event": "progress", "time": 1.5, "attempt": 1, "step": 3, "lr": 0.1}'
    (logs / "events.jsonl").write_text(f'{{"event": "log", "line": "iter 3: loss 1.5"}}\n{event}\n')
    done = subprocess.run([*SHELLS[shell], "-c", script(logs)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{event}\n{ours}iter 3: loss 1.5, time 2.00ms\n"
    assert done.stderr == ""
    text = script(logs, events=False, marks=["words"])
    done = subprocess.run([*SHELLS[shell], "-c", text], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{ours}words\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_node_without_logs_sends_nothing(tmp_path, shell):
    for folder in (tmp_path, tmp_path / "none"):
        done = subprocess.run(
            [*SHELLS[shell], "-c", script(folder)], capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout == done.stderr == ""


@pytest.fixture
def inventory(tmp_path):
    path = tmp_path / "inventory.yaml"
    path.write_text("prefix: /opt/llm/current\nnodes:\n  node01: 192.0.2.1\n  node02: 192.0.2.2\n")
    return load(path)


class Nodes:
    """Connections that run every script here, and record its node."""

    def __init__(self, *_):
        self.asked = []

    def __getitem__(self, node):
        self.asked.append(node.name)
        return types.SimpleNamespace(run=self.run)

    def run(self, text, **_):
        done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, timeout=60, check=True)
        return types.SimpleNamespace(out=done.stdout)


@pytest.mark.parametrize(("seen_on", "asked"), [(("node02",), "node02"), (("node01",), "node01"), ((), "node02")])
def test_a_runs_numbers_come_from_its_first_node(inventory, monkeypatch, tmp_path, seen_on, asked):
    logs = tmp_path / "runs/r/logs/node0"
    logs.mkdir(parents=True)
    (logs / "run.log").write_bytes(data("nanogpt.log"))
    head = types.SimpleNamespace(node="node02", seen_on=seen_on, logs="r/logs/node0", fields={})
    nodes = Nodes()
    monkeypatch.setattr(
        task, "find", lambda *_: (types.SimpleNamespace(id="r", head=head), types.SimpleNamespace(unreachable={}))
    )
    monkeypatch.setattr(task, "logs_folder", lambda _inventory, part: f"{tmp_path}/runs/{part.logs}")
    found = task.read_run(Session(inventory, connections=nodes), "r")
    assert list(found.series) == rows("nanogpt.log")
    assert (found.names, nodes.asked) == (("r",), [asked])
    (logs / "run.log").write_text("it loads\n")
    with pytest.raises(UsageError, match="r: no line has") as refused:
        task.read_run(Session(inventory, connections=nodes), "r")
    assert refused.value.hint == "clusterctl logs r"


def test_local_copies_are_used_if_no_node_answers(inventory, monkeypatch):
    down = NodesFailedError("no answer", reasons={"node01": "no route"})

    def silent(*_):
        raise down

    monkeypatch.setattr(task, "find", silent)
    folder = records.folder_of(inventory.path, "20261122-071500-sft-3f2a")
    with pytest.raises(NodesFailedError):
        task.read_run(Session(inventory, connections=Nodes()), None)
    records.write(folder, {"run": folder.name, "nodes": ["node01", "node02"], "plans": {}})
    with pytest.raises(NodesFailedError):
        task.read_run(Session(inventory, connections=Nodes()), "3f2a")
    (folder / "node01").mkdir()
    (folder / "node01" / "rank0.log").write_bytes(data("gpt.log"))
    found = task.read_run(Session(inventory, connections=Nodes()), "3f2a")
    assert list(found.series) == rows("gpt.log")


# --- without clusterctl --------------------------------------------------------------------------


def test_the_program_needs_python_alone():
    argv = [sys.executable, "-S", "-m", "trainer.reader", str(FOLDER / "gpt.log")]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        argv, cwd=root, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == metrics(FOLDER / "gpt.log", "--csv")


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["none.log"], 2, "cannot read none.log: No such file or directory"),
        (["--wrong"], 2, "python -m trainer.reader"),
        (["--help"], 0, "python -m trainer.reader"),
        ([str(FOLDER / "README.md")], 1, ""),
        ([str(FOLDER / "gpt.log")], 0, ""),
    ],
)
def test_the_programs_exit_code(argv, code, message, capsys):
    assert program(argv) == code
    out, err = capsys.readouterr()
    assert message in err
    assert bool(out) == (argv[0].endswith("gpt.log"))
