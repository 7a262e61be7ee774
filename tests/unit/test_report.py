"""``clusterctl report``: a run's data, and the HTML made of it."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import math
import re
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.append(str(Path(__file__).parent))  # for recorded_runs; last, so that it hides no module

from recorded_runs.cases import FOLDER

from provision.cli import cli
from provision.errors import UsageError
from provision.model import Finding
from provision.output import Reporter
from provision.render import render
from provision.report import NodeData, RunData, read_node, report_page
from provision.report.curves import node_curves, pack, run_curves
from provision.report.data import Sample, configuration, happenings
from provision.run.preflight import from_record, preflight, to_record
from provision.tasks.diagnose import split
from provision.tasks.report import report_folder
from trainer.agent.contract.effective import Effective
from trainer.reader import Row

NOW = 1_795_400_000.0
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&\"'\x1b[31m\u2028"
SHELLS = {"dash": ["dash"], "bash": ["bash", "--posix"], "busybox": ["busybox", "sh"]}


class Page(html.parser.HTMLParser):
    """The tags, the data and the texts of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.scripts, self.texts, self._in = [], [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self._in = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, _tag):
        self._in = ""

    def handle_data(self, data):
        if self._in == "script":
            self.scripts[-1] += data
        else:
            self.texts.append(data)


def run_of(rows, **more):
    return RunData("r1", "finished", rows=tuple(rows), **more)


def column(packed):
    if "n" in packed:
        return [packed["start"] + place * packed["by"] for place in range(packed["n"])]
    ((kind, text),) = packed.items()
    return list(array(kind, base64.b64decode(text)))


def command(*words):
    reporter = Reporter()
    return CliRunner().invoke(cli, ["report", *map(str, words)], obj=reporter)


def test_a_folder_of_collect_becomes_a_page_without_nodes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command(FOLDER / "healthy_gpu_zero2")
    assert done.exit_code == 0, done.output
    file = tmp_path / "report-healthy_gpu_zero2.html"
    page = file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    assert "gpunode1" in page
    assert len(page) < 150_000


def test_several_folders_become_one_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command(FOLDER / "healthy_gpu_zero2", FOLDER / "healthy_gpu_zero3", "-o", "x.html").exit_code == 0
    texts = " ".join(Page(Path("x.html").read_text()).texts)
    assert "healthy_gpu_zero2" in texts
    assert "Differences" in texts


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no run in"):
        report_folder(tmp_path)
    with pytest.raises(UsageError, match="cannot read"):
        report_folder(tmp_path / "none")


def test_every_recorded_run_has_a_page():
    for case in sorted(FOLDER.glob("*/case.yaml")):
        if any(place.is_dir() and list(place.glob("*.jsonl")) for place in case.parent.iterdir()):
            assert "<main>" in report_page([report_folder(case.parent).run], NOW), case


def test_the_program_without_data_is_small():
    assert len(report_page([RunData("r1")], NOW)) < 150_000


def test_texts_of_nodes_and_logs_are_only_text():
    node = NodeData(
        EVIL, events=({"event": "notice", "time": 1.0, "text": EVIL, "level": EVIL},), state={"state": EVIL}
    )
    run = RunData(
        EVIL, EVIL, (node,), (Row(1, 2.0), Row(2, 1.0)), record={"argv": [EVIL]}, missing={EVIL: EVIL}, diagnosis=EVIL,
        causes=(EVIL,), files={EVIL: json.dumps({EVIL: EVIL})},
    )  # fmt: skip
    text = report_page([run, run], NOW)
    page = Page(text)
    assert page.tags.count("script") == 3
    assert "img" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in {"style", "src", "href"}]
    assert "\x1b" not in text
    assert json.loads(page.scripts[0])["runs"][0]["id"] == EVIL
    assert "\u2028" not in page.scripts[0]


def test_the_policy_allows_the_pages_own_scripts_and_no_address():
    text = report_page([RunData("r1")], NOW)
    policy = re.search(r'Security-Policy" content="([^"]+)"', text)[1]
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    assert policy.startswith("default-src 'none'; ")
    assert not re.search(r"unsafe|https?:|\*", policy)
    for part in (*Page(text).scripts[1:], style):
        assert base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() in policy


def test_losses_that_are_no_numbers_are_listed_and_not_drawn():
    run = run_of([Row(1, 2.0), Row(2, math.nan), Row(3, math.inf), Row(4, 1e300), Row(5, 1.0)])
    data = run_curves(run)
    assert data["bad"] == {"loss": [1, 2]}
    values = column(data["columns"]["loss"])
    assert [math.isnan(value) for value in values] == [False, True, True, True, False]
    texts = " ".join(Page(report_page([run], NOW)).texts)
    assert "losses that are NaN or infinite:" in texts
    assert "the first one is at step 2" in re.sub(r"\s+", " ", texts)


def test_equally_spaced_numbers_take_no_space():
    assert pack([3, 6, 9], "d") == {"start": 3, "by": 3, "n": 3}
    assert column(pack([1, 2, 4], "d")) == [1, 2, 4]
    assert math.isnan(column(pack([1, None], "d"))[1])


def test_truncated_and_wrong_lines_are_skipped():
    progress = '{"event": "progress", "time": 5.5, "attempt": 1, "step": 1, "loss": 2.0}'
    events = [
        progress,
        progress[:40],
        '{"event": "end", "time": 9, "state": "fini',
        "\x00\xff",
        '{"event": ["x"], "time": 1}',
    ]
    node = read_node("n", events, ['{"time": 1, "rss": 5}', '{"time": 2, "gp', "[]", '{"time": "x"}'], "{", rank=3)
    assert node.times == ((1, 5.5),)
    assert [(sample.time, sample.step) for sample in node.samples] == [(1, None)]
    assert (node.state, node.rank) == ({}, 3)
    assert "<main>" in report_page([RunData("r", nodes=(node,))], NOW)


def test_files_that_end_in_the_middle_of_a_line_are_read_to_there(tmp_path):
    place = tmp_path / "r1" / "gpu01"
    place.mkdir(parents=True)
    lines = [json.dumps({"time": 100.0 + number, "gpus": [{"index": 0, "use": 50}]}) + "\n" for number in range(5000)]
    (place / "metrics.jsonl.1").write_text("".join(lines[:2000])[:-7])
    (place / "metrics.jsonl").write_bytes("".join(lines[2000:]).encode()[:-9] + b"\xff\x00")
    (place / "events.jsonl").write_text('{"event": "attempt", "time": 100.0, "attempt": 1}\n{"event": "end", "ti')
    (place / "state.json").write_text('{"run": "r1", "sta')
    run = report_folder(tmp_path / "r1").run
    (node,) = run.nodes
    assert 1600 < len(node.samples) <= 2000
    assert (node.samples[0].time, node.samples[-1].time) == (100.0, pytest.approx(5100, abs=5))
    assert [event["event"] for event in node.events] == ["attempt"]
    assert "<main>" in report_page([run], NOW)


def test_a_clock_that_jumps_ahead_keeps_every_value():
    times = {0: 10.0, 1: 20.0, 2: 4e9, 3: 30.0, 4: 9e10}
    lines = [f'{{"event": "progress", "time": {time}, "step": {step}}}' for step, time in times.items()]
    run = RunData("r", nodes=(read_node("gpu07", lines, [], ""),), rows=tuple(Row(step, 1.0) for step in times))
    assert column(run_curves(run)["time"]) == list(times.values())
    assert "<main>" in report_page([run], NOW)


def test_a_clock_that_goes_back_is_reported_by_name():
    lines = [f'{{"event": "progress", "time": {time}, "step": {step}}}' for step, time in enumerate((10, 20, 5, 30))]
    run = RunData("r", nodes=(read_node("gpu07", lines, [], ""),), rows=tuple(Row(step, 1.0) for step in range(4)))
    texts = " ".join(Page(report_page([run], NOW)).texts)
    assert re.search(r"went back during the run:\s+gpu07", texts)


def test_a_running_run_is_marked():
    texts = " ".join(Page(report_page([RunData("r", "running")], NOW)).texts)
    assert "the run was running when this report was written" in texts


def test_clock_throttling_and_interfaces_have_curves():
    gpus = [{"clock": 1980, "throttle": ["sw_power_cap"]}, {"clock": 990, "throttle": ["hw_slowdown"]}]
    rates = {"eth0": {"in": 10**6, "out": 10**6}, "eth1": {"in": 0, "out": 0}}
    both = {"time": 1, "gpus": gpus, "network": rates, "infiniband": {"mlx5_0/1": {"in": 3 * 10**6, "out": 0}}}
    one = {"time": 2, "gpus": [{"use": 1, "throttle": None}], "network": rates}
    node = read_node("n", [], [json.dumps(both), json.dumps(one)], "")
    assert node.samples[0].values == {
        "sm_clock": 990, "throttled": 1, "network": 5, "port eth0": 2, "port eth1": 0, "port mlx5_0/1": 3,
    }  # fmt: skip
    assert set(node_curves(node)["columns"]) == {
        "sm_clock",
        "throttled",
        "network",
        "gpu",
        "port eth0",
        "port mlx5_0/1",
    }
    alone = node_curves(read_node("n", [], [json.dumps(one)], ""))  # its only busy interface has the curve of the sum
    assert set(alone["columns"]) == {"network", "gpu"}


def test_the_expected_band_is_drawn_and_in_words():
    slow = "the run as a whole is slow: 2 s a step, expected 0.4 to 0.6 s (given)"
    band = {"version": 1, "basis": "given", "step_seconds": [0.4, 0.6], "memory_bytes": [1 << 30, 2 << 30]}
    events = (f'{{"event": "progress", "time": {NOW + 2 * step}, "step": {step}, "loss": 1}}' for step in range(40))
    samples = [json.dumps({"time": NOW + second, "gpus": [{"memory": 3 << 30}]}) for second in range(40)]
    state = json.dumps({"state": "running", "expected": band, "slow": slow, "measured": {"step_seconds": [2, 2, 2]}})
    node = read_node("node01", events, samples, state)
    run = RunData("r", "running", (node,), tuple(Row(step, 1.0) for step in range(40)))
    curves = run_curves(run)
    assert curves["bands"] == {"ms": (400.0, 600.0), "gpu_memory": (1.0, 2.0)}
    paces = [value for value in column(curves["columns"]["ms"]) if not math.isnan(value)]
    assert paces == [2000.0] * 39
    text = report_page([run], NOW)
    texts = " ".join(Page(text).texts)
    assert slow in texts
    assert "expected time of a step: 0.4 to 0.6 s (given); measured, median: 2 s" in " ".join(texts.split())
    assert "400 to 600 expected" in texts
    assert "1 to 2 expected" in texts
    assert text.count("<rect ") == 2


def test_a_run_that_nothing_is_expected_of_says_why():
    record = {"expected": {"version": 1, "basis": "no estimate: node01 has no GPU"}}
    texts = " ".join(Page(report_page([RunData("r", record=record)], NOW)).texts)
    assert "no step time is expected:" in texts
    assert "no estimate: node01 has no GPU" in texts


def test_values_of_a_hostile_node_are_dropped():
    huge = "1" + "0" * 400
    lines = [
        f'{{"time": 1, "gpus": [{{"use": {huge}, "memory": "x", "power": true}}, {{"use": 50}}]}}',
        f'{{"time": 2, "network": {{"a": {{"in": {huge}, "out": null}}}}, "step": {huge}, "memory_total": 0}}',
        '{"time": 3, "gpus": [{"use": [1]}, {"use": NaN}], "network": {"a": 1}}',
    ]
    node = read_node("n", [], lines, '{"node_rank": "x", "state": ["y"]}')
    assert all(value == 50 for sample in node.samples for value in sample.values.values())
    assert "<main>" in report_page([RunData("r", nodes=(node,))], NOW)


def test_aliases_of_a_configuration_do_not_multiply():
    lines = ["a0: &a0 {}"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert configuration(RunData("r", files={"sft.yaml": "\n".join(lines)})) == {}


def test_samples_of_a_thousand_nodes_are_thinned():
    samples = [json.dumps({"time": number, "rss": 1}) for number in range(5000)]
    assert len(read_node("n", [], samples, "", nodes=1000).samples) <= 200
    assert len(read_node("n", [], samples, "").samples) == 1667


def test_equal_events_of_several_nodes_are_one():
    def node(name, time):
        return NodeData(name, events=({"event": "attempt", "time": time, "attempt": 2, "checkpoint": "/c/10"},))

    run = RunData("r", nodes=(node("a", 10.0), node("b", 10.4), node("c", 99.0)), causes=("a rank 1: out of memory",))
    found = happenings(run)
    assert [(each.nodes, each.kind) for each in found] == [(("a", "b"), "restart"), (("c",), "restart")]
    texts = " ".join(Page(report_page([run], NOW)).texts)
    assert "from /c/10" in texts
    assert "a rank 1: out of memory" in texts


def test_configuration_has_no_secrets():
    text = "lr: 1.0e-4\nhub_token: s3cr3t1\nnested: {api_key: s3cr3t2, seed: 3}\n"
    text += "parts: [{api_key: s3cr3t3}, {b: [1, 2]}]\n"
    plan = {"argv": ["torchrun", "x.py"], "env": {"A": "1", "URL": "http://me:s3cr3t4@host/", "HF_TOKEN": "s3cr3t5"}}
    run = RunData(
        "r", record={"prefix": "/opt/releases/abc12", "plans": {"n": plan}}, files={"sft.yaml": text, "bad.json": "{"}
    )
    found = configuration(run)
    assert found["release"] == "abc12"
    assert found["sft.yaml: lr"] == "0.0001"
    assert found["sft.yaml: nested.seed"] == "3"
    assert found["sft.yaml: parts.1.b"] == "[1, 2]"
    assert found["env.A"] == "1"
    assert "s3cr3t" not in json.dumps(found)
    assert "s3cr3t" not in report_page([run], NOW)


def test_checks_before_the_start_are_listed_with_nodes_and_fix():
    names = [f"gpu{number:02}" for number in range(1, 17)]
    found = [Finding("net.route", name, "OK", "fine") for name in names]
    found += [Finding("fs.tmp", name, "WARN", "/tmp is full", fix="free it: hf_" + "a" * 34) for name in names]
    found += [Finding("gpu.ecc", "gpu01", "N/A", "no GPU"), Finding("gpu.ecc", "gpu02", "FAIL", EVIL)]
    kept = json.loads(json.dumps(to_record(preflight(found, {"gpu17": "no answer"}))))
    assert len(json.dumps(kept)) < 2000
    page = report_page([RunData("r", record={"preflight": kept})], NOW)
    part = re.search(r'id="preflight".*?</section>', page)[0]
    assert [each.verdict for each in from_record(kept).problems] == ["FAIL", "WARN"]
    text = " ".join(Page(part).texts)
    for shown in (
        "1  passed , 1  failed , 1  warned",
        "gpu[01-16]",
        "/tmp is full",
        "free it: ***",
        "gpu17",
        "no answer",
    ):
        assert shown in text, (shown, text)


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        {},
        {"checks": [1], "problems": {"a": 1}, "dropped": "x"},
        {"checks": {"OK": True, "WARN": -1, "x": 1}, "problems": [1, {"verdict": ["WARN"]}, {"verdict": "WARN"}]},
        {"problems": [{"verdict": "FAIL", "nodes": [1, None, EVIL], "observed": ["x"], "fix": 5}] * 1000},
    ],
)
def test_unknown_results_of_checks_are_skipped(content):
    assert "<main>" in report_page([RunData("r", record={"preflight": content})], NOW)


def test_findings_of_many_nodes_stay_small():
    found = [Finding("fs.tmp", f"node{n}", "WARN", f"{n} bytes left" * 100) for n in range(5000)]
    assert len(json.dumps(to_record(preflight(found, {})))) < 100_000


def test_the_rank_that_others_wait_for_is_named():
    event = {"event": "straggler", "time": 5.0, "node": "gpu07", "rank": 3, "text": "10 % slower", "kind": "clock"}
    run = RunData("r", nodes=(NodeData("gpu02", events=(event, {"event": "straggler"})),))
    part = re.search(r'id="slowest".*?</section>', report_page([run], NOW))[0]
    assert "<td>gpu07</td><td>3</td><td>clock</td><td>10 % slower</td>" in part


def test_the_account_is_that_of_the_node_that_took_rank_0():
    accounts = [Effective(training=seconds, top=9).to_object() for seconds in (5.0, 8.0)]
    lost = NodeData("gpu01", 0, state={"spent": accounts[0]})
    spare = NodeData("gpu03", 2, state={"spent": accounts[1], "excluded": {"gpu01": "no power"}})
    assert RunData("r", nodes=(lost, spare)).spent.training == 8
    assert RunData("r", nodes=(lost,)).spent.training == 5


def test_a_node_with_other_means_is_marked():
    def node(name, watts):
        return NodeData(name, samples=(Sample(1.0, 1, {"power": watts}),))

    page = report_page([RunData("r", nodes=tuple(map(node, "abcd", (600.0, 610.0, 605.0, 400.0))))], NOW)
    assert re.findall(r'<b class="note">([^<]+)</b>', page) == ["400.0"]


def test_differences_of_runs_are_listed():
    first = RunData("a", files={"sft.yaml": "lr: 1\nseed: 3"}, nodes=(NodeData("gpu01"),))
    second = RunData("b", files={"sft.yaml": "lr: 2\nseed: 3"}, nodes=(NodeData("gpu02"),))
    part = re.search(r'id="differences".*?</section>', report_page([first, second], NOW))[0]
    assert "sft.yaml: lr" in part
    assert "gpu02" in part
    assert "seed" not in part


def test_what_every_run_has_of_its_own_is_no_difference():
    def of(name):
        return RunData(name, record={"argv": ["--out", f"/out/{name}"], "master": f"10.0.0.1:{name}"})

    assert "No difference" in report_page([of("run-1"), of("run-2")], NOW)


def test_an_unknown_configuration_is_no_difference():
    page = report_page([RunData("a", files={"sft.yaml": "lr: 1"}), RunData("b")], NOW)
    part = re.search(r'id="differences".*?</section>', page)[0]
    assert "is not known" in part
    assert "sft.yaml" not in part


def node_script(logs, job):
    mark = "@clusterctl:0123456789abcdef"
    text = render("run/report.sh.j2", mark=mark, logs=str(logs), job=str(job), limit=1000, samples=10, files=20)
    return text, mark


def test_shellcheck(tmp_path):
    file = tmp_path / "report.sh"
    file.write_text(node_script(tmp_path, tmp_path)[0])
    subprocess.run([Path(sys.executable).with_name("shellcheck"), "--shell=sh", file], check=True, timeout=60)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_node_sends_its_part(tmp_path, shell):
    logs, job = tmp_path / "logs", tmp_path / "job"
    logs.mkdir()
    job.mkdir()
    (logs / "events.jsonl").write_text('{"event": "log", "line": "x"}\n{"event": "exit", "rc": 1}\n')
    (logs / "metrics.jsonl.1").write_text("".join(f"{number}\n" for number in range(10)))
    (logs / "metrics.jsonl").write_text("".join(f"{number}\n" for number in range(10, 20)))
    (logs / "state.json").write_text('{"state": "failed"}')
    (job / "sft.yaml").write_text("lr: 1\n")
    (job / "big.json").write_text("x" * 70_000)
    script, mark = node_script(logs, job)
    done = subprocess.run([*SHELLS[shell], "-c", script], capture_output=True, text=True, timeout=30, check=True)
    files = split(done.stdout, mark)
    assert files["events.jsonl"].strip() == '{"event": "exit", "rc": 1}'
    assert files["metrics.jsonl"].split() == ["2", "5", "8", "11", "14", "17"]
    assert files["state.json"].strip() == '{"state": "failed"}'
    assert files["job/sft.yaml"].strip() == "lr: 1"
    assert "job/big.json" not in files
    assert done.stderr == ""
