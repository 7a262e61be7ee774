"""Samples as Prometheus text: judged by Prometheus' own promtool and by its Python client's parser.

A real agent's file goes through a real node_exporter into a real Prometheus, which evaluates the Grafana dashboard.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import PYTHON, Run, eventually, free_port, plan_of

from trainer.agent.contract.prometheus import NAMES, Source, exposition
from trainer.agent.run_files import Events, NodePlan
from trainer.agent.textfile import Textfile

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "docs/assets/grafana.json").read_text(encoding="utf-8"))

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
    "expected": {"version": 1, "step_seconds": [0.1, 0.2], "tokens_per_second": [3e3, 6e3], "memory_bytes": [1e9, 2e9]},
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
    assert found["clusterctl_expected_step_duration_seconds", "low"] == 0.1
    assert found["clusterctl_expected_tokens_per_second", "high"] == 6e3
    assert found["clusterctl_run_active",] == 1
    assert {key[0] for key in found} == set(NAMES)


def program(name):
    """A program of Debian's packages."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return shutil.which(name, path=path) or pytest.skip(f"{name} is missing: scripts/setup takes it from Debian")


def test_promtool_accepts_it():
    checked = subprocess.run(
        [program("promtool"), "check", "metrics"],
        input=exposition(SOURCES),
        capture_output=True,
        text=True,
        check=False,
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
        {"expected": {"version": 1, "step_seconds": [2, 1]}},
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
    queries = [target["expr"] for _, target in targets()]
    queries += [each["query"] for each in DASHBOARD["templating"]["list"]]
    used = {name for query in queries for name in re.findall(r"clusterctl_\w+", query)}
    assert len(used) > 10
    assert used <= set(NAMES)


def targets():
    """Each panel of the dashboard with each of its queries."""
    return [(panel, target) for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_dashboard_has_the_form_that_grafana_imports():
    """Grafana is not in Debian. These are the rules of its JSON model that an import depends on."""
    assert DASHBOARD["uid"]
    assert DASHBOARD["title"]
    assert isinstance(DASHBOARD["schemaVersion"], int)
    assert "id" not in DASHBOARD  # the number of another Grafana's database
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert {x for x, _ in cells} == set(range(24))
    for panel in panels:
        ids = [target["refId"] for target in panel["targets"]]
        assert len(set(ids)) == len(ids)
        for each in (panel, *panel["targets"]):
            assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert set(re.findall(r"\$\{?(\w+)", json.dumps(panel))) <= variables


# --- real parts ----------------------------------------------------------------------------------

TRAINS = """
import time
for step in range(1, 4):
    print(f"step {step}/10 | loss: {4 - step:.2f} | lr: 1e-4 | grad_norm: 1.5 | tokens/s: 4096", flush=True)
time.sleep(600)
"""
NVIDIA_SMI = """#!/bin/sh
names=$(printf '%s\n' "$1" | sed 's/.*=//; s/,/ /g')
row=
for name in $names; do
    case $name in
    index) value=3 ;;
    utilization.gpu) value=75 ;;
    memory.*) value=1024 ;;
    clocks_*) value=0x0000000000000000 ;;
    *) value=100 ;;
    esac
    row="$row${row:+, }$value"
done
echo "$row"
case "$*" in *--loop*) exec sleep 600 ;; esac
"""
FAST = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from trainer.agent import __main__ as agent
from trainer.agent import metrics
metrics.EVERY = 0.3
sys.exit(agent.main())
"""


class Prometheus:
    """A running server that scrapes ``target``."""

    def __init__(self, port, target):
        self.url, self.target = f"http://127.0.0.1:{port}/api/v1/", target

    def ask(self, path, **query):
        """The data of an answer; None while the server starts."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(query)}", timeout=5) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # not ready
                return None
            raise AssertionError(f"{query}: {error.read().decode()}") from error
        except (urllib.error.URLError, ConnectionError):
            return None

    def vector(self, expression):
        """The current values of an expression, by their labels."""
        found = self.ask("query", query=expression)
        return {frozenset(each["metric"].items()): float(each["value"][1]) for each in (found or {}).get("result", ())}


@contextlib.contextmanager
def started(*argv, log):
    """A program that ends with the block."""
    with log.open("wb") as output:
        process = subprocess.Popen([str(word) for word in argv], stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.fixture
def collector(tmp_path):
    """The folder of a node_exporter's textfile collector, and the Prometheus that scrapes it."""
    prometheus, exporter = program("prometheus"), program("prometheus-node-exporter")
    folder = tmp_path / "collector"
    folder.mkdir()
    ports = free_port(), free_port()
    target = f"127.0.0.1:{ports[0]}"
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
        "scrape_configs": [{"job_name": "node", "static_configs": [{"targets": [target]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    serve = ("--collector.disable-defaults", "--collector.textfile", f"--collector.textfile.directory={folder}")
    scrape = (f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data")
    listen = [f"--web.listen-address=127.0.0.1:{port}" for port in ports]
    with (
        started(exporter, *serve, listen[0], log=tmp_path / "exporter.log"),
        started(prometheus, *scrape, listen[1], log=tmp_path / "prometheus.log"),
    ):
        yield folder, Prometheus(ports[1], target)


def test_agents_file_reaches_prometheus_and_every_panel_of_the_dashboard_has_data(collector, tmp_path):
    folder, prometheus = collector
    other = NodePlan(plan_of(run="all-fields", node="gpu01", textfile=str(folder)), tmp_path, tmp_path / "plan.json")
    Textfile(other, Events(tmp_path)).write(SAMPLE)
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(NVIDIA_SMI)
    smi.chmod(0o755)
    run = Run(tmp_path)
    run.command = lambda *words: [PYTHON, "-c", FAST, str(ROOT), words[0], str(run.path)]
    env = dict(os.environ, PATH=f"{smi.parent}:{os.environ['PATH']}")
    ranks = {"RANK": "0", "LOCAL_RANK": "0"}
    band = {"version": 1, "step_seconds": [0.5, 1.5]}
    try:
        run.start(TRAINS, stdout=subprocess.DEVNULL, inherited=env, env=ranks, textfile=str(folder), expected=band)
        base = {"run": run.id, "node": "n0", "instance": prometheus.target, "job": "node"}

        def value(name, **more):
            """The value with exactly these labels."""
            labels = {"__name__": f"clusterctl_{name}", **base, **more}
            return prometheus.vector(f'clusterctl_{name}{{run="{run.id}"}}').get(frozenset(labels.items()))

        eventually(lambda: value("step") == 3 and value("loss") == 1 and value("rank_cpu_cores", rank="0") is not None)
        eventually(lambda: value("gpu_utilization_ratio", gpu="3") == 0.75)
        assert value("run_active") == value("attempt") == 1
        assert value("last_step") == 10
        assert value("learning_rate") == 1e-4
        assert value("tokens_per_second") == 4096
        assert value("gpu_memory_used_bytes", gpu="3") == 1 << 30
        assert value("memory_size_bytes") > 1 << 20
        assert value("expected_step_duration_seconds", bound="high") == 1.5

        names = prometheus.ask("label/run/values", **{"match[]": "clusterctl_run_active"})
        assert set(names) == {run.id, "all-fields"}
        chosen = "(" + "|".join(re.escape(name).replace("\\-", "-") for name in names) + ")"  # as Grafana does
        for panel, target in targets():
            found = prometheus.vector(target["expr"].replace("$run", chosen))
            assert found, (panel["title"], target["expr"])
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert all(label in dict(labels) for labels in found), (panel["title"], label)
        run.do("stop")
        eventually(lambda: value("run_active") is None)  # the file is removed at the end of the run
        assert prometheus.vector('clusterctl_run_active{run="all-fields"}')
    finally:
        run.close()
