"""Samples as Prometheus text: judged by Prometheus' own promtool and by its Python client's parser."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trainer.agent.contract.prometheus import NAMES, Source, exposition

SAMPLE = {
    "time": 1764187200.125,
    "attempt": 2,
    "step": 10,
    "total": 100,
    "loss": 2.5,
    "eval_loss": 2.25,
    "epoch": 0.5,
    "lr": 1e-05,
    "grad_norm": 1.5,
    "ms": 125.0,
    "tokens_per_second": 4096,
    "gpus": [  # the second one as an agent without clocks wrote it
        {
            "index": 0,
            "use": 98,
            "memory": 1 << 36,
            "memory_total": 1 << 37,
            "power": 683.21,
            "temperature": 61,
            "clock": 1980,
            "clock_max": 1980,
            "throttle": ["sw_power_cap"],
        },
        {"index": 1, "use": 0, "memory": 0, "memory_total": 1 << 37, "power": None, "temperature": 33},
    ],
    "cpu": {"0": 1.5, "1": 0.25},
    "network": {"ib0": {"in": 5, "out": 7}},
    "infiniband": {"mlx5_0/1": {"in": 11, "out": 13}},
    "memory_available": 1 << 30,
    "memory_total": 1 << 31,
    "rss": 4096,
    "load": 0.5,
    "disk_free": 1 << 40,
}
SOURCES = [Source("r1", "gpu01", True, SAMPLE), Source("r1", "gpu02", True, SAMPLE)]


def values(text):
    """By name and labels besides run and node, the values of gpu01."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.type == "gauge"
        assert family.documentation
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "r1"
            if labels.pop("node") == "gpu01":
                key = (family.name, *labels.values())
                assert key not in found, "a series is there twice"
                found[key] = sample.value
    return found


def test_units_are_seconds_bytes_and_ratios():
    found = values(exposition(SOURCES))
    assert found["clusterctl_step_duration_seconds",] == 0.125
    assert found["clusterctl_gpu_utilization_ratio", "0"] == 0.98
    assert found["clusterctl_gpu_memory_used_bytes", "0"] == 1 << 36
    assert ("clusterctl_gpu_power_watts", "1") not in found  # its sensor is missing
    assert found["clusterctl_rank_cpu_cores", "0"] == 1.5
    assert found["clusterctl_network_receive_bytes_per_second", "ib0"] == 5
    assert found["clusterctl_infiniband_transmit_bytes_per_second", "mlx5_0/1"] == 13
    assert found["clusterctl_gpu_sm_clock_hertz", "0"] == 1.98e9
    assert found["clusterctl_gpu_throttle_reason", "0", "sw_power_cap"] == 1
    assert found["clusterctl_gpu_throttle_reason", "0", "hw_slowdown"] == 0
    assert not [key for key in found if key[:2] == ("clusterctl_gpu_throttle_reason", "1")]  # an old agent's sample
    assert found["clusterctl_run_active",] == 1
    assert {key[0] for key in found} == set(NAMES)


def test_promtool_accepts_it():
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    promtool = shutil.which("promtool", path=path)
    if promtool is None:
        pytest.skip("promtool is missing: scripts/setup takes it from Debian's package prometheus")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=exposition(SOURCES), capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_every_metric_has_its_lines_together():
    text = exposition(SOURCES)
    names = [line.split("{")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len([a for a, b in itertools.pairwise(names) if a != b]) == len(set(names)) - 1
    assert text.endswith("\n")


def test_labels_are_escaped():
    name = 'a\\b"c\nd\udcff'
    text = exposition([Source(name, "n", True, {"network": {name: {"in": 1}}})])
    sample = next(s for f in text_string_to_metric_families(text) for s in f.samples if "interface" in s.labels)
    assert sample.labels["interface"] == sample.labels["run"] == 'a\\b"c\nd?'


def test_numbers_that_are_not_finite():
    text = exposition([Source("r", "n", True, {"loss": math.nan, "grad_norm": math.inf, "lr": -math.inf})])
    assert [line.split()[-1] for line in text.splitlines() if line[0] != "#"] == ["1", "NaN", "-Inf", "+Inf"]


@pytest.mark.parametrize(
    "sample",
    [
        {},
        {"step": "7", "loss": None, "time": True, "lr": [1]},
        {
            "gpus": [None, 3, {"index": "x", "use": 1}, {"use": 1}],
            "cpu": {"0": "1"},
            "network": {"a": 1},
        },
        {"gpus": None, "cpu": 3, "network": [], "infiniband": None},
    ],
)
def test_invalid_values_are_omitted(sample):
    lines = [line for line in exposition([Source("r", "n", False, sample)]).splitlines() if line[0] != "#"]
    assert lines == ['clusterctl_run_active{run="r",node="n"} 0']


def test_number_of_values_is_bounded():
    many = {str(rank): 1.0 for rank in range(100_000)}
    assert len(exposition([Source("r", "n", True, {"cpu": many})])) < 1 << 20


def test_dashboard_uses_only_exported_names():
    path = Path(__file__).parents[2] / "docs/assets/grafana.json"
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in dashboard["templating"]["list"]]
    used = {name for query in queries for name in re.findall(r"clusterctl_\w+", query)}
    assert len(used) > 10
    assert used <= set(NAMES)
