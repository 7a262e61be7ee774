"""``--pattern``: what a pattern may be, what it costs, and what it reads in a log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.append(str(Path(__file__).parent))  # for agents and agent_life; last, so that it hides no module

from agent_life import Life
from agents import plan_of

from provision.cli import cli
from provision.errors import UsageError
from provision.inventory import load
from provision.run import record as records
from provision.run.found import Part, Run
from provision.session import Session
from provision.summaries.runs import run_output
from provision.tasks import logs as task
from provision.tasks.pattern import read_pattern
from provision.tasks.runs import RunStatus
from trainer.agent.contract.plan import Plan, from_json
from trainer.agent.run_files import Events, NodePlan
from trainer.agent.supervisor.numbers import Numbers
from trainer.agent.supervisor.output import Output
from trainer.reader import Pattern, PatternError, Reader, read, series

CHINESE = r"训练步骤: (?P<step>\d+), 损失: (?P<loss>[\d.]+)"
LOG = "开始\n训练步骤: 10, 损失: 2.31\nstep 11 loss 9.9\n训练步骤: 20, 损失: 2.11\n"


def rows(text, pattern):
    """Step and loss of each row."""
    return [(row.step, row.loss) for row in series(read([text], pattern=pattern))]


# --- which patterns ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        (CHINESE, "训练步骤: "),
        (r"(?P<loss>\S+)", ""),
        (r"(?P<step>\d+)", ""),
        (r"(?i)loss (?P<loss>\S+)", ""),
        (r"(?:train|test) done; val=(?P<eval_loss>\S+)", " done; val="),
        (r"(?:\S+\s+){3}(?P<loss>\S+)", ""),
        (r"x(?: of (?P<total>\d+))? is(?P<loss> \S+)", " is"),
        ("(?P<loss>x)" + "a" * 989, "a" * 989),
    ],
)
def test_usable_pattern_and_the_text_that_its_lines_have(text, mark):
    assert Pattern(text).mark == mark


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (r"loss (?P<loss>[\d.]+", r"missing \), unterminated subpattern at character 6"),
        (r"(?P<loss>[)", "unterminated character set at character 10"),
        (r"(?P<loss>a)(?P<loss>b)", "redefinition of group name"),
        (r"(?P<loss>a{99999999999})", "too large"),
        (r"(?P<los>\S+)", r"\(\?P<los>…\) is not a value; the values are step, loss, eval_loss, lr"),
        (r"loss (\S+)", r"it has none of the groups \(\?P<step>…\), \(\?P<loss>…\), \(\?P<eval_loss>…\)"),
        (r"lr (?P<lr>\S+)", "it has none of the groups"),
        ("", "it has none of the groups"),
        (r"(a+)+(?P<loss>\d)", "a repeat inside a repeat"),
        (r"(?:(?:x|y*)z){2,}(?P<loss>\d)", "a repeat inside a repeat"),
        (r"(?P<loss>(?:\d{1,3}){1,3})", "a repeat inside a repeat"),
        (r"(?=(?:a*?b)*?)(?P<loss>\d)", "a repeat inside a repeat"),
        ("(?P<loss>x)" + "a" * 990, "it has 1001 characters, and at most 1000"),
        ("(?P<loss>x)\n", "character 12 is not printable"),
        ("\x1b(?P<loss>x)", "character 1 is not printable"),
        ("(?P<loss>x)\udc80", "character 12 is not printable"),
    ],
)
def test_refused_pattern(text, why):
    with pytest.raises(PatternError, match=why):
        Pattern(text)
    with pytest.raises(UsageError, match=why) as refused:
        read_pattern(text)
    assert "(?P<loss>" in refused.value.hint


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (r".*.*.*.*.*(?P<loss>x)", "1" * 4000),
        (r"(?:a|aa)+(?P<loss>x)", "a" * 4000),
        ("a?" * 40 + "a" * 40 + "(?P<loss>x)", "a" * 60),
    ],
)
def test_pattern_that_would_take_years_is_given_up(text, line):
    pattern = Pattern(text)
    reader = Reader(pattern=pattern)
    started = time.process_time()
    assert reader.feed(f"{line}\n" * 5) == []
    assert pattern.too_slow
    assert reader.feed(f"{line}x\n" * 5) == reader.close() == []  # no longer used
    assert time.process_time() - started < 5


def test_time_limit_does_not_depend_on_the_size_of_a_block():
    pattern = Pattern(r".*(?P<step>\d+).*loss (?P<loss>\S+)")
    lines = 400_000  # more than a second together
    assert len(pattern.read(b"step 1 has a long name and then its loss 2.5\n" * lines)) == lines
    assert not pattern.too_slow


# --- what it reads -------------------------------------------------------------------------------


def test_only_lines_of_the_pattern_count():
    assert rows(LOG, CHINESE) == [(10, 2.31), (20, 2.11)]
    assert rows(LOG, None) != rows(LOG, CHINESE)


def test_all_values():
    text = r"(?P<step>\d+)/(?P<total>\d+) (?P<loss>\S+) (?P<lr>\S+) (?P<grad_norm>\S+) (?P<ms>\S+)ms "
    text += r"(?P<tokens_per_second>\S+)(?: eval (?P<eval_loss>\S+))?"
    one, two = read(["5/100 2.5 1e-4 0.7 12.5ms 1,024 eval 2.25\n6/3 nan - .7 x1ms 9 eval (none)\n"], pattern=text)
    assert one._asdict() == {
        "step": 5,
        "total": 100,
        "loss": 2.5,
        "lr": 1e-4,
        "grad_norm": 0.7,
        "ms": 12.5,
        "tokens_per_second": 1024.0,
        "eval_loss": 2.25,
        "rank": None,
        "source": "pattern",
        "epoch": None,
    }
    assert (two.step, two.total, str(two.loss), two.lr, two.ms, two.eval_loss) == (6, None, "nan", None, None, None)


@pytest.mark.parametrize(
    ("log", "pattern", "expected"),
    [
        ("2026-11-22T07:15:00.123Z [0] it 3: 2.5\n", r"^it (?P<step>\d+): (?P<loss>\S+)$", [(3, 2.5)]),  # run.log
        ("2026-11-22T07:15:00.123Z [launcher] it 3: 2.5\n", r"^it (?P<step>\d+): (?P<loss>\S+)$", [(3, 2.5)]),
        ("\x1b[32mit 3\x1b[0m: 2.5\n", r"it (?P<step>\d+): (?P<loss>\S+)", [(3, 2.5)]),
        ("1 of 9\r2 of 9 2.5\r3 of 9 2.4", r"(?P<step>\d+) of 9 (?P<loss>[\d.]+)", [(2, 2.5)]),  # the last may be cut
        ("3 of 9 (2.4)", r"(?P<step>\d+) of 9 \((?P<loss>[\d.]+)", [(3, 2.4)]),
        ("loss 2.5\nloss 2.4\n", r"loss (?P<loss>\S+)", [(1, 2.5), (2, 2.4)]),  # counted
        ("at 3\nat 4\n", r"at (?P<step>\d+)", [(3, None), (4, None)]),
        ("at 2.5\nat 1e3\nat x\n", r"at (?P<step>\S+)", []),
        (
            "e 0 s 1 l 4\ne 0 s 2 l 3\ne 1 s 1 l 2\n",
            r"e (?P<epoch>\d) s (?P<step>\d) l (?P<loss>\d)",
            [(1, 4), (2, 3), (3, 2)],
        ),
        ("e 0 l 4\ne 1 l 3\n", r"e (?P<epoch>\d) l (?P<loss>\d)", [(0, 4), (1, 3)]),
        ("x" * 5000 + "at 3\n" + "x" * 4093 + "at 34\n", r"at (?P<step>\d+)", []),  # only the start of a line is read
        ('{\n  "log_history": [{"loss": 1, "step": 2}]\n}\n', r"at (?P<step>\d+)", []),
    ],
)
def test_lines(log, pattern, expected):
    assert rows(log, pattern) == expected


def test_evaluation_without_a_step_belongs_to_the_last_one():
    pattern = r"(?:s (?P<step>\d+) l (?P<loss>\d)|eval (?P<eval_loss>\d))"
    (_, row) = series(read(["s 3 l 2\ns 4 l 1\neval 5\n"], pattern=pattern))
    assert (row.step, row.loss, row.eval_loss) == (4, 1.0, 5.0)


def test_evaluations_alone_are_counted():
    found = series(read(["eval 5\neval 4\n"], pattern=r"eval (?P<eval_loss>\d)"))
    assert [(row.step, row.eval_loss) for row in found] == [(1, 5.0), (2, 4.0)]
    assert found.counted


def test_ranks():
    found = series(read(["[rank3]: at 5\n[rank1]: at 6\n"], pattern=r"at (?P<step>\d+)"))
    assert found.ranks == (1, 3)


def test_pieces_of_any_size():
    assert series(read((each for each in [*LOG]), pattern=CHINESE)).ranks == (0,)
    assert rows(LOG, CHINESE) == [(row.step, row.loss) for row in series(read([*LOG], pattern=CHINESE))]


def test_agent_reports_what_the_pattern_reads():
    seen = []
    numbers = Numbers(lambda rank, reading: seen.append((rank, reading.step)), CHINESE)
    numbers.feed("out", 2, LOG.encode())
    assert numbers.take(last=True) == [{"step": 10, "loss": 2.31}, {"step": 20, "loss": 2.11}]
    assert seen == [(2, 10), (2, 20)]
    with pytest.raises(PatternError):
        Numbers(lambda *_: None, "(")


def test_agent_reports_a_pattern_that_is_too_slow_once(tmp_path):
    progress = []
    fields = {"pattern": r".*.*.*.*.*(?P<step>x)", "progress": "trainer_log.jsonl"}
    plan = NodePlan(plan_of(**fields), tmp_path, tmp_path / "plan-0.json")
    (tmp_path / "trainer_log.jsonl").write_text("")
    nothing = [lambda *_: None] * 2
    output = Output(plan, Events(tmp_path), nothing[0], lambda *event: progress.append(event), *nothing)
    (tmp_path / "trainer_log.jsonl").write_text('{"current_steps": 1, "loss": 2.5}\n')  # not of the pattern
    theirs, ours = os.pipe()
    os.write(ours, b"1" * 4000 + b"\n")
    output.take(theirs)
    output.report()
    output.report(last=True)
    output.close()
    os.close(ours)
    os.close(theirs)
    events = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert [event["text"] for event in events if event["event"] == "notice"] == [
        "the pattern takes too long, and no longer reads steps and losses"
    ]
    assert progress == []


@pytest.mark.parametrize(("pattern", "phase"), [(Pattern(r"第(?P<step>\d+)步"), "training"), (None, "starting")])
def test_judgement_of_hangs_takes_the_steps_of_the_pattern(pattern, phase):
    life = Life()
    life.readers[0] = Reader(rank=0, pattern=pattern)
    assert life.say("第1步").say("第2步").watch.phase == phase


# --- the plan, the commands and the summaries ----------------------------------------------------


def test_plan_keeps_the_pattern():
    plan = Plan("r1", "n0", ("python", "t.py"), {}, pattern=CHINESE)
    assert from_json(plan.to_json()) == plan
    old = {key: value for key, value in plan.to_object().items() if key != "pattern"}
    assert from_json(json.dumps(old)).pattern is None


def command(*words, cwd):
    argv = [sys.executable, "-c", "import sys; from provision.cli import main; sys.exit(main())", *words]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_metrics_of_a_file(tmp_path, run):
    (tmp_path / "a.log").write_text(LOG, encoding="utf-8")
    _, out, _ = run("metrics", "--pattern", CHINESE, "--csv", "a.log")
    assert out.splitlines()[1:] == ["10,2.31,,,,,", "20,2.11,,,,,"]
    (tmp_path / "slow.log").write_text("1" * 4000 + "\n")
    for log, pattern, text in [
        ("a.log", "(?P<loss>[)", "unterminated character set at character 10"),
        ("a.log", r"los (?P<loss>\S+)", r"a.log: no line matches the pattern los (?P<loss>\S+)"),
        ("slow.log", r".*.*.*.*.*(?P<loss>x)", "the pattern takes too long"),
    ]:
        code, out, err = run("metrics", "--pattern", pattern, log)
        assert (code, out) == (2, "")
        assert text in " ".join(err.split())


def test_train_refuses_a_pattern_before_it_starts(tmp_path):
    (tmp_path / "t.py").write_text("print(1)\n")
    (tmp_path / "inventory.yaml").write_text("prefix: /opt/llm/current\nnodes:\n  node01: 192.0.2.1\n")
    done = command("train", "--pattern", r"(a+)+(?P<loss>\d)", "t.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "a repeat inside a repeat" in " ".join(done.stderr.split())


def test_help_shows_the_option():
    for name in ("train", "metrics"):
        assert "--pattern REGEX" in CliRunner().invoke(cli, [name, "--help"]).output


class Nodes:
    """Connections that run every script here."""

    def __getitem__(self, _node):
        return types.SimpleNamespace(run=self.run)

    def run(self, text, **_):
        done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, timeout=60, check=True)
        return types.SimpleNamespace(out=done.stdout)


@pytest.fixture
def inventory(tmp_path):
    path = tmp_path / "inventory.yaml"
    path.write_text("prefix: /opt/llm/current\nnodes:\n  node01: 192.0.2.1\n")
    return load(path)


@pytest.fixture
def session(inventory, monkeypatch, tmp_path):
    """The session of a run with the pattern and a log."""
    ours = "2026-11-22T07:15:00.123Z [0] "
    (tmp_path / "run.log").write_text("".join(f"{ours}{line}\n" for line in LOG.splitlines()), encoding="utf-8")
    events = '{"event": "progress", "time": 1.5, "attempt": 1, "step": 5, "loss": 2.5}\n'
    (tmp_path / "events.jsonl").write_text(events)
    head = Part("r", "node01", {"pattern": CHINESE}, alive=False, seen_on=("node01",))
    monkeypatch.setattr(task, "find", lambda *_: (Run("r", (head,)), types.SimpleNamespace(unreachable={})))
    monkeypatch.setattr(task, "logs_folder", lambda *_: str(tmp_path))
    return Session(inventory, connections=Nodes())


def test_a_run_is_read_with_its_own_pattern_or_with_another_one(session):
    found = task.read_run(session, "r")
    assert [(row.step, row.loss) for row in found.series] == [(5, 2.5), (10, 2.31), (20, 2.11)]
    found = task.read_run(session, "r", task.How(pattern=Pattern(r"step (?P<step>\d+)")))
    assert [(row.step, row.loss) for row in found.series] == [(11, None)]
    with pytest.raises(UsageError, match="r: no line matches the pattern none") as refused:
        task.read_run(session, "r", task.How(pattern=Pattern(r"none (?P<step>\d+)")))
    assert refused.value.hint == "clusterctl logs r"


def test_record_of_this_machine_has_the_pattern(inventory):
    folder = records.folder_of(inventory.path, "20261122-071500-sft-3f2a")
    plan = Plan(folder.name, "node01", ("x",), {}, pattern=CHINESE)
    records.write(folder, {"run": folder.name, "nodes": ["node01"], "plans": {"node01": plan.to_object()}})
    (folder / "node01").mkdir()
    (folder / "node01/run.log").write_text(LOG, encoding="utf-8")

    def silent(*_):
        raise task.NodesFailedError("no answer", reasons={"node01": "no route"})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "find", silent)
        found = task.read_run(Session(inventory, connections=Nodes()), None)
    assert [row.step for row in found.series] == [10, 20]


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"state": "finished", "pattern": CHINESE}, True),
        ({"state": "finished", "pattern": CHINESE, "step": 3}, False),
        ({"state": "running", "pattern": CHINESE}, False),
        ({"state": "finished", "pattern": r"val (?P<eval_loss>\S+)"}, False),  # the state has no such value
        ({"state": "finished", "pattern": None}, False),
        ({"state": "finished", "pattern": 3}, False),
    ],
)
def test_status_says_that_no_line_matched(fields, shown):
    run = Run("r", (Part("r", "node01", fields, alive=fields["state"] == "running"),))
    text = run_output(RunStatus(run, {}), 0.0)[1]
    assert (f"no line of the log matched its pattern: {CHINESE}" in text) == shown
