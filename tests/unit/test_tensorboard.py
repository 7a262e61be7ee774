"""TensorBoard event files of runs, compared with those of TensorBoard's own writer.

tests/nodes/test_run_checkpoints.py reads one of a real run with TensorBoard's own reader.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.append(str(Path(__file__).parent))  # for recorded_runs; last, so that it hides no module

from recorded_runs.cases import FOLDER

from provision.cli import cli
from provision.errors import UsageError
from provision.output import Reporter
from provision.report import NodeData, RunData, read_node
from provision.report.tensorboard import SAMPLES, Moment, encode, event_file, moments, record
from provision.tasks.tensorboard import write_events
from trainer.agent.contract.throttle import LOWERS
from trainer.agent.reader.scalars import EventFile
from trainer.reader import Row

# What RecordWriter of tensorboard 2.21 writes for the version and the two events of the first test.
RECORDED = bytes.fromhex(
    "1800000000000000a37f4b220900002010d749da411a0d627261696e2e4576656e743a32801caeeb"
    "3a000000000000001295eae20900005010d749da412a2f0a110a0a747261696e2f6c6f737315000020400a1a0a13747261696e2f6c"
    "6561726e696e675f7261746515acc52737c9b97781"
    "4500000000000000ebe668b00900009010d749da4110ac022a370a110a0a747261696e2f6c6f7373150000c07f0a220a1b6e6f6465"
    "2f67707530312f677075302f7574696c69736174696f6e150000807f41248b80"
)
SAMPLE = {
    "time": 103.0,
    "gpus": [{"index": 1, "use": 98, "memory": 3 << 30, "power": 683.2, "temperature": None}],
    "memory_total": 8 << 30,
    "memory_available": 6 << 30,
    "load": 0.5,
    "cpu": {"7": 1.5},
    "network": {"ib0": {"in": 5_000_000, "out": 7_000_000}},
}


def run_of(rows, times=(), samples=(), **more):
    node = NodeData("gpu01", times=tuple(times), samples=read_node("", [], list(map(json.dumps, samples)), "").samples)
    return RunData("r1", "finished", (node,), tuple(rows), **more)


def command(*words):
    return CliRunner().invoke(cli, ["metrics", *map(str, words)], obj=Reporter())


def test_bytes_are_those_of_tensorboards_own_writer():
    first = Moment(1764187201.25, 0, {"train/loss": 2.5, "train/learning_rate": 1e-5})
    second = Moment(1764187202.25, 300, {"train/loss": math.nan, "node/gpu01/gpu0/utilisation": math.inf})
    version = next(event_file(run_of([], [(1, 1764187200.5)])))
    assert version + record(encode(first)) + record(encode(second)) == RECORDED


def test_rows_have_the_names_that_users_expect_and_their_own_times():
    rows = [Row(1, 4.5, 1e-3, 2.0, 125.0, 4096), Row(2, math.nan), Row(3, eval_loss=4.25), Row(9, 1e300)]
    found = list(moments(run_of(rows, [(1, 100.0), (3, 104.0)])))
    assert [(each.time, each.step) for each in found] == [(100.0, 1), (102.0, 2), (104.0, 3), (104.0, 9)]
    assert found[0].values == {
        "train/loss": 4.5,
        "train/learning_rate": 1e-3,
        "train/grad_norm": 2.0,
        "throughput/ms_per_step": 125.0,
        "throughput/tokens_per_second": 4096,
    }
    assert math.isnan(found[1].values["train/loss"])
    assert found[2].values == {"eval/loss": 4.25}
    [reading] = EventFile().feed(record(encode(found[3])))
    assert (reading.step, reading.loss) == (9, math.inf)  # four bytes hold no more


def test_samples_belong_to_the_last_step_before_them_also_after_a_restart():
    """Steps 2 and 3 were repeated: the times of the second attempt count, so no curve goes back."""
    rows = [Row(step, 1.0) for step in range(1, 5)]
    times = [(1, 100.0), (2, 102.0), (3, 104.0), (2, 112.0), (3, 114.0), (4, 116.0)]
    samples = [SAMPLE | {"time": time, "step": 3} for time in (99.0, 104.0, 113.0, 120.0)]
    found = [each for each in moments(run_of(rows, times, samples)) if "node/gpu01/load" in each.values]
    assert [(each.time, each.step) for each in found] == [(99.0, 0), (104.0, 1), (113.0, 2), (120.0, 4)]
    assert found[0].values == {
        "node/gpu01/gpu1/utilisation": 98,
        "node/gpu01/gpu1/memory_gib": 3,
        "node/gpu01/gpu1/power_watts": 683.2,
        "node/gpu01/memory_gib": 2,
        "node/gpu01/load": 0.5,
        "node/gpu01/rank7/cores": 1.5,
        "node/gpu01/network/ib0/in_mb_per_second": 5,
        "node/gpu01/network/ib0/out_mb_per_second": 7,
    }


@pytest.mark.parametrize(
    "sample",
    [
        {"gpus": [{"index": "0", "use": 1}, {"index": 1, "use": "1"}], "network": {"a": {"in": None, "out": [1]}}},
        {"gpus": [{"index": True}], "cpu": {"0": "1"}, "load": 1e308 * 10, "memory_total": 5},
        {"rss": 10**400},
    ],
)
def test_invalid_values_of_a_node_are_omitted(sample):
    assert list(moments(run_of([], samples=[{"time": 1.0} | sample]))) == []


def test_reasons_that_slow_gpus_down_are_counted_by_node():
    reasons = [["hw_slowdown", "hw_thermal_slowdown"], ["hw_thermal_slowdown"], ["gpu_idle"], None, "sw_power_cap"]
    gpus = [{"index": at, "throttle": each} for at, each in enumerate(reasons)]
    (found,) = moments(run_of([], samples=[{"time": 1.0, "gpus": gpus}]))
    tags = {f"node/gpu01/gpus_slowed_down/{name}": value for name, value in dict.fromkeys(LOWERS, 0).items()}
    assert found.values == {**tags, "node/gpu01/gpus_slowed_down/hw_thermal_slowdown": 2}


def test_samples_of_many_nodes_are_thinned():
    samples = read_node("", [], [f'{{"time": {time}, "load": 1}}' for time in range(1000)], "").samples
    run = RunData("r", nodes=tuple(NodeData(f"n{number}", samples=samples) for number in range(41)))
    found = list(moments(run))
    assert SAMPLES * 0.6 < len(found) <= SAMPLES
    assert len({name for each in found for name in each.values}) == 41


def test_a_run_without_times_has_its_steps():
    assert [each.step for each in moments(RunData("r", rows=(Row(1, 2.0), Row(5, 1.0))))] == [1, 5]


def test_command_writes_a_folder_of_collect_and_replaces_the_file(tmp_path):
    for _ in range(2):
        result = command(FOLDER / "healthy_gpu_zero2", "--tensorboard", tmp_path)
        assert result.exit_code == 0, result.output
    [path] = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert path.parent == tmp_path / "healthy_gpu_zero2"
    assert "tfevents" in path.name
    assert len(EventFile().feed(path.read_bytes())) == 40


@pytest.mark.parametrize("words", [["--csv"], ["--last", "3"], ["--prometheus"], ["--rank", "0"], ["b"]])
def test_other_outputs_are_refused(words):
    error = command("a", *words, "--tensorboard", "tb").exception
    assert isinstance(error, UsageError)
    assert error.hint == "clusterctl metrics --tensorboard DIR RUN"


def test_names_of_a_hostile_node_are_bounded_and_stay_in_the_folder(tmp_path):
    sample = {"time": 1.0, "network": {"x" * 100_000: {"in": 1}}}
    written = write_events(replace(run_of([], samples=[sample]), id="../../x"), tmp_path)
    assert written.path.parent == tmp_path / "--..-x"
    assert (written.steps, written.samples) == (0, 1)
    assert written.bytes < 1000


def test_a_folder_that_cannot_be_written_is_reported():
    error = command(FOLDER / "healthy_gpu_zero2", "--tensorboard", "/proc/none").exception
    assert isinstance(error, UsageError)
    assert str(error).startswith("cannot write /proc/none/")
