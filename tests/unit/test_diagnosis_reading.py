"""The files of a run's folder, and other launchers' logs, as data; and their statistics."""

from __future__ import annotations

import json
import re

import pytest
from case_table import every_case
from hypothesis import given
from hypothesis import strategies as st

from provision.diagnosis import Evidence, diagnose, reading
from provision.diagnosis.causes import TABLE
from provision.diagnosis.conditions.rules import noise, quantile, rolling, slope
from provision.diagnosis.evidence import attempt, attempts
from provision.diagnosis.signs import match_line, required_text
from provision.summaries.diagnosis import diagnosis_output


def test_agent_lines_have_a_time_and_a_rank():
    text = "2026-11-22T07:15:00.123Z [3] loss\n2026-11-22T07:15:01.000Z [launcher] [rank2]: Traceback\n"
    one, two = reading.log_lines(text, "node01")
    assert (one.text, one.rank, one.node) == ("loss", 3, "node01")
    assert one.time == pytest.approx(1795331700.123)
    assert (two.text, two.rank) == ("Traceback", 2)


@pytest.mark.parametrize(
    ("row", "seconds"),
    [
        ("[INFO|trainer.py:2078] 2024-06-01 16:22:16,125 >> Num examples = 1", 1717258936.125),
        ("2024-06-01 16:22:16.125 | INFO | train", 1717258936.125),
        (
            "[2024-06-01 16:22:16,125] [ERROR] [launch.py:325:sigkill_handler] exits with return code = 1",
            1717258936.125,
        ),
    ],
)
def test_other_launchers_lines_have_the_time_they_name(row, seconds):
    (line,) = reading.log_lines(row, "train.log")
    assert line.time == pytest.approx(seconds)


def test_fields_missing_in_glog_come_from_the_lines_before():
    text = "2024-06-01 16:22:16,125 begins\n[rank0]:[E602 02:07:08.408271257 ProcessGroupNCCL.cpp:607] late\nno time"
    first, second, third = reading.log_lines(text, "train.log")
    assert second.rank == 0
    assert second.time - first.time == pytest.approx(9 * 3600 + 44 * 60 + 52.283, abs=0.01)
    assert third.time == second.time


def test_last_state_of_a_progress_bar_is_used():
    (line,) = reading.log_lines(" 1%|\r 2%|\r 3%| 3/100\n", "x")
    assert line.text == " 3%| 3/100"


@given(st.text(max_size=300), st.text(max_size=300))
def test_no_log_raises(text, more):
    files = {"run.log": text, "events.jsonl": more, "metrics.jsonl": text, "machine": more, "kernel": text}
    diagnosis_output(diagnose(Evidence((reading.record("n", files),))))


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["event", "time", "step", "loss", "lr", "why", "attempt", "state", "gpus", "cpu", "phase"]),
            st.none()
            | st.booleans()
            | st.integers(-9, 9)
            | st.floats()
            | st.text(max_size=4)
            | st.lists(st.integers()),
        ),
        max_size=60,
    )
)
def test_no_event_or_sample_of_any_shape_raises(events):
    text = "\n".join(json.dumps(event) for event in events)
    files = {"events.jsonl": text, "metrics.jsonl": text, "state.json": text}
    diagnosis_output(diagnose(Evidence((reading.record("n", files),))))


def test_losses_are_read_from_logs_of_trainers():
    text = (
        "{'loss': 2.5, 'grad_norm': 1.0, 'learning_rate': 1e-05, 'epoch': 0.1}\n"
        "{'loss': nan, 'grad_norm': nan, 'learning_rate': 1e-05, 'epoch': 0.2}\n"
        "iter 7: loss 3.4785, time 303.49ms\n"
        "step 5: train loss 3.7234, val loss 3.6521\n"
    )
    found = reading.progress(reading.log_lines(text, "x"))
    assert [(each["step"], each.get("loss"), each.get("eval_loss")) for each in found] == [
        (1, 2.5, None),
        (2, None, None),
        (7, 3.4785, None),
        (5, None, 3.6521),
    ]
    assert found[0]["lr"] == 1e-5


def test_progress_of_other_programs_is_read_by_rank_and_has_the_time_of_its_line():
    text = (
        "2026-11-22T07:15:00.123Z [0] epoch 1 step 10 train/loss=2.5\n"
        "2026-11-22T07:15:01.123Z [1] epoch 1 step 10 train/loss=3.5\n"
        "2026-11-22T07:15:02.123Z [0] epoch,step,train_loss\n"
        "2026-11-22T07:15:03.123Z [1] 1,20,9.5\n"
        "2026-11-22T07:15:04.123Z [0] 1,20,2.25\n"
    )
    lines = reading.log_lines(text, "x")
    found = [(each["step"], each["loss"], each["time"]) for each in reading.progress(lines)]
    assert found == [(10, 2.5, lines[0].time), (10, 3.5, lines[1].time), (20, 2.25, lines[4].time)]


@pytest.mark.parametrize("told", ["state", "plan"])
def test_progress_of_a_run_with_a_pattern_is_read_with_it(told):
    pattern = r"步骤 (?P<step>\d+), 损失 (?P<loss>[\d.]+)"
    files = {"run.log": "步骤 3, 损失 2.5\nstep 4 loss 9.5\n步骤 5, 损失 2.25\n"}
    if told == "state":
        files["state.json"] = json.dumps({"pattern": pattern})
    record = reading.record("n", files, pattern=pattern if told == "plan" else None)
    assert [(each["step"], each["loss"]) for each in reading.progress(record.lines, record.pattern)] == [
        (3, 2.5),
        (5, 2.25),
    ]
    assert reading.progress(record.lines, "(") == ()


def test_the_kernels_lines_get_the_nodes_time():
    (line,) = reading.kernel_lines("[ 5069.5] NVRM: Xid\nno time here\n", "clock 1795332000 6000.5\n", "node02")
    assert line.time == pytest.approx(1795332000 - 931)
    assert reading.kernel_lines("[ 1.0] x", "", "node02") == ()


def test_links_and_cores():
    assert reading.read_machine("cores 64\nlink eth0 25000\nlink mlx5_0/1 200000\n") == (
        {"eth0": 3.125e9, "mlx5_0/1": 25e9},
        64,
    )


def test_first_rank_of_a_node_comes_from_its_launcher():
    text = "  rank      : 11 (local_rank: 3)\n[rank9]: Traceback\n"
    assert reading.record("node02", {"run.log": text}).first_rank == 8
    assert reading.record("node02", {"run.log": "[rank9]: Traceback\n"}).first_rank == 9
    assert reading.record("node02", {"run.log": ""}).first_rank == 0


def test_an_attempt_has_its_own_lines():
    events = tuple({"event": "started", "time": at, "attempt": number} for number, at in ((1, 100.0), (2, 200.0)))
    lines = tuple(reading.Line(str(at), "n", 0, float(at)) for at in (99.5, 150, 198, 199.5, 250))
    evidence = Evidence((reading.Record("n", lines=lines, events=events),))
    assert attempts(evidence) == 2
    texts = [[line.text for line in attempt(evidence, each).records[0].lines] for each in (1, 2)]
    assert texts == [["99.5", "150", "198"], ["199.5", "250"]]


@every_case(
    "pattern", sorted({line for cause in TABLE for line in (*cause.lines, *(each for each, _ in cause.traced))})
)
def test_required_text_of_a_pattern_is_part_of_it(pattern):
    word = required_text(pattern)
    assert re.escape(word).replace("\\ ", " ").replace("\\-", "-").replace("\\", "") in pattern.replace("\\", "")


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        (r"invalid device ordinal", "invalid device ordinal"),
        (r"failed \(exitcode: -9\) local_rank: (?P<local_rank>\d+) \(pid", "failed (exitcode: -9) local_rank: "),
        (r"colou?r of it", "r of it"),
        (r"ab*cdef", "cdef"),
        (r"one|other", ""),
        (r"(?i)Word", ""),
        (r"[Aa]ddress in use", "ddress in use"),
        (r"x{2}yz \[a\]", "yz [a]"),
    ],
)
def test_needed(pattern, word):
    assert required_text(pattern) == word


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("RuntimeError: DataLoader worker (pid 1) is killed by signal: Bus error. It is possible that", "shm.full"),
        (
            "\tsize mismatch for a.bias: from checkpoint, the shape in current model is torch.Size([3]).",
            "checkpoint.shape",
        ),
        (
            "\tsize mismatch for a.b: from checkpoint, the shape in current model is torch.Size([0]).",
            "zero3.partitioned",
        ),
    ],
)
def test_line_is_explained_by_the_most_specific_cause(text, cause):
    assert next(match_line(text))[0].id == cause


def test_statistics():
    assert rolling([1, 9, 2, 3, 4], 3) == [2, 3, 3]
    assert noise([1, 1, 1]) == 0
    assert noise([]) == 0
    assert slope([1, 2, 3, 4])[0] == pytest.approx(1)
    assert slope([5, 5, 5, 5]) == (0, 0)
    assert quantile([1, 2, 3, 4], 0.9) == 4
