"""The command around the judgement: files from nodes and from here, and the output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.append(str(Path(__file__).parent))  # for recorded_runs; last, so that it hides no module

from recorded_runs.cases import FOLDER, case

from provision.cli import cli
from provision.diagnosis import Diagnosis, Evidence, Record, diagnose
from provision.diagnosis.evidence import Line
from provision.errors import NodesFailedError, UsageError
from provision.inventory import load
from provision.output import Reporter
from provision.render import render
from provision.run import record as records
from provision.summaries.diagnosis import diagnosis_output
from provision.tasks import diagnose as task

MARK = "@clusterctl:0123456789abcdef"
SHELLS = {"dash": ["dash"], "bash": ["bash", "--posix"], "busybox": ["busybox", "sh"]}
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


def run(script, shell=("sh",)):
    return subprocess.run([*shell, "-c", script], capture_output=True, text=True, timeout=60, check=True).stdout


def script(folder, limit=2 << 20):
    return render("run/evidence.sh.j2", logs=str(folder), mark=MARK, limit=limit)


def test_shellcheck(tmp_path):
    file = tmp_path / "evidence.sh"
    file.write_text(script(tmp_path))
    subprocess.run([SHELLCHECK, "--shell=sh", file], check=True, timeout=60)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_node_sends_the_ends_of_its_files(tmp_path, shell):
    (tmp_path / "run.log").write_text("x" * 100 + "\nlast line\n")
    (tmp_path / "launcher.log").write_text("the same again\n")
    (tmp_path / "events.jsonl").write_text('{"event": "log", "line": "x"}\n{"event": "exit", "rc": 1}\n')
    (tmp_path / "state.json").write_text('{"state": "failed"}')
    files = task.split(run(script(tmp_path, limit=40), SHELLS[shell]), MARK)
    assert files["run.log"].strip() == "last line"
    assert files["events.jsonl"].strip() == '{"event": "exit", "rc": 1}'
    assert json.loads(files["state.json"]) == {"state": "failed"}
    assert "launcher.log" not in files
    assert "clock " in files["machine"]
    assert "cores " in files["machine"]


def test_a_node_without_the_run_sends_nothing(tmp_path):
    assert task.split(run(script(tmp_path / "none")), MARK) == {}


def test_output_of_a_run_is_not_part_of_the_answer(tmp_path):
    (tmp_path / "run.log").write_text("\n@clusterctl:ffff kernel\nno mark of ours\n")
    assert "no mark of ours" in task.split(run(script(tmp_path)), MARK)["run.log"]


def test_files_of_a_node_are_diagnosed(tmp_path):
    recorded = FOLDER / "cuda_oom" / "node02"
    files = task.split(run(script(recorded)), MARK)
    evidence = task.evidence_of(
        "r", "failed", {"node02": files}, {"node02": 1}, {"plans": {"node02": {"first_rank": 2}}}, {}
    )
    verdict = diagnose(evidence).verdict
    assert verdict.first.cause.id == "cuda.oom"
    assert (verdict.node, verdict.rank) == ("node02", 3)


@pytest.fixture
def inventory(tmp_path):
    path = tmp_path / "inventory.yaml"
    path.write_text("prefix: /opt/llm/current\nnodes:\n  node01: 192.0.2.1\n  node02: 192.0.2.2\n")
    return load(path)


def test_local_copies_are_used_if_no_node_answers(inventory):
    folder = records.folder_of(inventory.path, "20261122-071500-sft-3f2a")
    records.write(folder, {"run": folder.name, "state": "failed", "nodes": ["node01", "node02"], "plans": {}})
    (folder / "node02").mkdir()
    (folder / "node02" / "rank1.log").write_text("RuntimeError: CUDA error: invalid device ordinal\n")
    (folder / "node02" / "launcher.log").write_text("closing signal SIGTERM\n")
    down = NodesFailedError("no answer", reasons={"node01": "no route", "node02": "no route"})
    evidence = task.local_evidence(inventory, "3f2a", down)
    result = diagnose(evidence)
    assert (result.verdict.node, result.verdict.rank) == ("node02", 1)
    assert result.verdict.first.cause.id == "cuda.ordinal"
    text = diagnosis_output(result)[1]
    assert "no answer from node[01-02]: no route" in text


def test_a_run_with_a_pattern_is_judged_with_it(inventory):
    """A loss that becomes NaN, in lines that only the run's pattern reads; its record has the pattern."""
    folder = records.folder_of(inventory.path, "20261122-071500-sft-3f2a")
    plan = {"pattern": r"步骤 (?P<step>\d+), 损失 (?P<loss>\S+)"}
    kept = {"run": folder.name, "state": "finished", "nodes": ["node01"], "plans": {"node01": plan}}
    records.write(folder, kept)
    (folder / "node01").mkdir()
    losses = [*("2.5" for _ in range(30)), *("nan" for _ in range(30))]
    lines = "".join(f"步骤 {step}, 损失 {loss}\n" for step, loss in enumerate(losses, 1))
    (folder / "node01" / "rank0.log").write_text(lines)
    down = NodesFailedError("no answer", reasons={"node01": "no route"})
    found = diagnose(task.local_evidence(inventory, "3f2a", down))
    assert [each.id for each in found.conditions] == ["loss.nan"]


def test_without_local_copies_missing_answers_are_the_error(inventory):
    down = NodesFailedError("no answer", reasons={"node01": "no route"})
    with pytest.raises(NodesFailedError):
        task.local_evidence(inventory, None, down)


def test_a_log_of_another_launcher():
    result = task.diagnose_files([FOLDER / "plain_log_deepspeed" / "train.log"])
    assert result.verdict.first.cause.id == "cuda.oom"
    assert result.verdict.node == "train.log"


def test_logs_with_the_same_name_are_distinguished(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.log").write_text(
            "RuntimeError: CUDA error: invalid device ordinal\n" if name == "b" else ""
        )
    result = task.diagnose_files([tmp_path / name / "train.log" for name in ("a", "b")])
    assert result.verdict.node == str(tmp_path / "b" / "train.log")


def test_missing_log(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        task.diagnose_files([tmp_path / "none.log"])


def test_the_command_judges_files_without_an_inventory(tmp_path):
    log = str(FOLDER / "plain_log_deepspeed" / "train.log")
    answer = CliRunner().invoke(cli, ["diagnose", "--log", log, "--json"], obj=Reporter(), catch_exceptions=False)
    assert answer.exit_code == 0


@pytest.mark.parametrize("arguments", [["a", "b"]])
def test_the_command_takes_one_run(arguments):
    answer = CliRunner().invoke(cli, ["diagnose", *arguments], obj=Reporter())
    assert isinstance(answer.exception, UsageError)


def test_the_first_lines_are_the_run_and_the_verdict():
    text = diagnosis_output(diagnose(case("cuda_oom").evidence))[1].splitlines()
    assert text[0] == "run cuda_oom: failed"
    assert text[1].startswith("node02 rank 3 failed first: CUDA out of memory: 2.00 GiB more")
    assert any(line.startswith("try: lower per_device_train_batch_size") for line in text)
    then = " ".join(" ".join(text).partition("then: ")[2].split())
    assert "NCCL lost another rank (node02 rank 2, node01 rank 0-1)" in then


def test_json_of_a_diagnosis():
    data, _ = diagnosis_output(diagnose(case("cuda_oom").evidence))
    verdict = json.loads(json.dumps(data))["verdict"]
    assert (verdict["cause"], verdict["node"], verdict["rank"]) == ("cuda.oom", "node02", 3)
    assert verdict["consequences"]
    assert verdict["source"].startswith("https://")


def live(seconds):
    """A running run whose rank 1 printed an exception, and another line so many seconds later."""
    lines = (
        Line("FileNotFoundError: [Errno 2] No such file or directory: '/etc/vllm.json'", "node01", 1, 100.0),
        Line("Running tokenizer on dataset", "node01", 1, 100.0 + seconds),
    )
    return Evidence((Record("node01", lines=lines),), "r", "running")


def test_survived_errors_of_a_running_run_are_no_failure():
    assert diagnose(live(300)).verdict is None


def test_a_rank_that_failed_while_the_others_continue_is_reported():
    assert diagnose(live(1)).verdict.first.cause.id == "file.missing"


def test_earlier_attempts_are_reported():
    result = diagnose(case("second_attempt").evidence)
    assert result.attempts == 2
    assert [each.first.cause.id for each in result.earlier] == ["cuda.oom"]
    assert "attempt 1: node01 rank 0: CUDA out of memory" in diagnosis_output(result)[1]


def test_a_killed_rank_of_an_earlier_attempt_is_named_by_the_agents_reason():
    why = {"node": "node02", "rank": 1, "text": "rank 1 was killed by SIGKILL"}
    events = (
        {"event": "attempt", "time": 10.0, "attempt": 1},
        {"event": "exit", "time": 20.0, "attempt": 1, "rc": 143},
        {"event": "notice", "time": 20.1, "attempt": 1, "text": "attempt 1 of 2 failed", "why": why},
        {"event": "attempt", "time": 21.0, "attempt": 2},
        {"event": "end", "time": 30.0, "attempt": 2, "state": "finished", "why": None},
    )
    records = tuple(Record(name, rank, events=events) for rank, name in enumerate(("node01", "node02")))
    shown = diagnosis_output(diagnose(Evidence(records, "r", "finished")))[1]
    assert "attempt 1: node02 rank 1: rank 1 was killed by SIGKILL" in shown


@pytest.mark.parametrize(
    ("state", "words"),
    [("running", "is running"), ("finished", "has finished"), ("stopped", "was stopped"), ("", "no failure was found")],
)
def test_run_without_faults_is_reported_as_such(state, words):
    assert words in diagnosis_output(Diagnosis("r", state, None))[1]


def test_run_without_answers_is_not_reported_as_healthy():
    message = diagnosis_output(Diagnosis("r", "running", None, missing=(("node01", "no route"),)))[1]
    assert "unknown" in message
    assert "no problem was found" not in message
