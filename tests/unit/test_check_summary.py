"""How findings are shown, and what becomes of a judge that fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath

from case_table import every_case

from provision import checks
from provision.checks import Answer, Plan, ids, judged, load
from provision.cli.check import refusal
from provision.errors import NodesFailedError, PreflightError
from provision.model import CommandLine, Inventory, Node
from provision.session import Session
from provision.summaries.check import check_output, finding_rows
from provision.tasks.check import CheckResult, judge

NAMES = [f"gpu{number:02}" for number in range(1, 17)]
TEMP = "gpu.temp"


def ok(check, node, observed):
    return checks.finding(check, node, checks.ok(observed))


def not_here(check, node, observed):
    return checks.finding(check, node, checks.not_here(observed))


def warn(check, node, observed, **options):
    return checks.finding(check, node, checks.warn(observed, **options))


def fail(check, node, observed, **options):
    return checks.finding(check, node, checks.fail(observed, **options))


def unknown(check, node, observed, **options):
    return checks.finding(check, node, checks.unknown(observed, **options))


CLUSTER = Inventory(Path("inventory.yaml"), PurePosixPath("/opt/llm/current"), ())
SESSION = Session(CLUSTER, typed=CommandLine("check"))


def result(*findings, unreachable=None, checks=None):
    found = checks or tuple(dict.fromkeys(each.check for each in findings))
    nodes = tuple(name for name in NAMES if name not in (unreachable or {}))
    return CheckResult(findings, found, nodes, unreachable or {}, 1.25)


def rows(*findings, **options):
    return [line.text for line in finding_rows(result(*findings), **options)]


def test_worst_verdict_is_first_and_equal_nodes_are_folded():
    hot = [fail(TEMP, name, "GPU 0: 97 C", expected="below 95 C", fix="see the fans") for name in NAMES[2:5]]
    off = [warn("gpu.persist", name, "GPU 0: off", expected="", fix="switch it on") for name in NAMES]
    lost = [unknown("gpu.topo", "gpu01", "not understood")]
    fine = [ok("gpu.mig", name, "off") for name in NAMES]
    assert rows(*lost, *off, *fine, *hot) == [
        f"FAIL  gpu.temp: {load(TEMP).title}",
        "    gpu[03-05]: GPU 0: 97 C",
        "    expected: below 95 C",
        f"    why: {load(TEMP).why}",
        "    try: see the fans",
        f"WARN  gpu.persist: {load('gpu.persist').title}",
        "    gpu[01-16]: GPU 0: off",
        f"    why: {load('gpu.persist').why}",
        "    try: switch it on",
        f"UNKNOWN  gpu.topo: {load('gpu.topo').title}",
        "    gpu01: not understood",
        f"    why: {load('gpu.topo').why}",
    ]
    assert rows(*fine) == []
    assert rows(*fine, verbose=True) == ["OK  gpu.mig  gpu[01-16]: off"]


def test_differing_nodes_are_in_one_block_with_their_fixes():
    found = rows(
        fail(TEMP, "gpu01", "97 C", expected="below 95 C", fix="see the fans"),
        fail(TEMP, "gpu02", "99 C", expected="below 95 C", fix="switch it off"),
    )
    assert found[1:3] == ["    gpu01: 97 C", "    gpu02: 99 C"]
    assert found.count("    expected: below 95 C") == 1
    assert found[-2:] == ["    try: see the fans (gpu01)", "    try: switch it off (gpu02)"]


def test_checks_without_the_same_tool_are_grouped():
    found = rows(
        *(unknown(check, name, "no nvidia-smi", fix="install it") for check in (TEMP, "gpu.mig") for name in NAMES)
    )
    assert found == ["UNKNOWN  gpu.temp, gpu.mig", "    gpu[01-16]: no nvidia-smi", "    try: install it"]


def test_output_of_a_node_cannot_move_the_cursor():
    assert "\x1b" not in "".join(rows(fail(TEMP, "gpu01", "\x1b[2Jhot\r", expected="\x07cold", fix="\x1b]0;x\x07run")))


def test_the_numbers():
    data, text = check_output(
        result(
            fail(TEMP, "gpu01", "97 C", expected="", fix="x"),
            fail("gpu.mig", "gpu01", "on", expected="", fix="x"),
            unknown("gpu.topo", "gpu01", "?"),
            *(ok("gpu.topo", name, "x") for name in NAMES[1:]),
        )
    )
    assert data["counts"] == {"FAIL": 2, "WARN": 0, "UNKNOWN": 1, "OK": 15, "N/A": 0}
    assert data["findings"][0]["why"] == load(TEMP).why
    assert text == "gpu[01-16]: 3 checks in 1.2 s, 2 FAIL (2 checks), 1 UNKNOWN (1 check), 15 OK"
    assert check_output(result(ok(TEMP, "gpu01", "x")))[1] == "gpu[01-16]: 1 check in 1.2 s, all OK"


def test_exit_code_is_4_for_findings_and_5_for_missing_nodes():
    bad = fail(TEMP, "gpu03", "97 C", expected="", fix="x")
    harmless = [warn(TEMP, "gpu01", "86 C", expected="", fix="x"), unknown(TEMP, "gpu02", "?")]
    assert refusal(SESSION, result(*harmless)) is None
    refused = refusal(SESSION, result(*harmless, bad))
    assert isinstance(refused, PreflightError)
    assert "--exclude gpu03" in refused.hint
    away = refusal(SESSION, result(*harmless, unreachable={"gpu16": "timed out"}))
    assert isinstance(away, NodesFailedError)
    assert away.reasons == {"gpu16": "timed out"}
    assert "no answer from 1 of 16 nodes" in str(away)
    both = refusal(SESSION, result(bad, unreachable={"gpu16": "timed out"}))
    assert (both.exit_code, both.reasons) == (4, {"gpu16": "timed out"})
    assert "--exclude 'gpu[03,16]'" in both.hint


def test_exception_of_a_judge_makes_its_check_unknown(monkeypatch):
    nodes = tuple(Node(name, f"10.0.0.{number}") for number, name in enumerate(NAMES, 1))
    plan = Plan(Inventory(Path("inventory.yaml"), PurePosixPath("/opt/llm/current"), nodes), nodes)
    answers = {name: Answer("what a new driver prints") for name in NAMES[:2]}

    def broken(*_):
        raise ValueError("not enough values to unpack")
        yield

    real, bad = checks.load, replace(load(TEMP), judge=broken)
    monkeypatch.setattr(checks, "load", lambda check: bad if check == TEMP else real(check))
    first, second = judge(TEMP, plan, answers)
    assert (first.node, second.node) == ("gpu01", "gpu02")
    assert first.verdict == second.verdict == "UNKNOWN"
    assert "ValueError: not enough values" in first.observed


def lacking(check, node, observed="no NVIDIA GPU, no nvidia-smi"):
    return not_here(check, node, observed)


def test_inapplicable_checks_are_counted_separately():
    """A node without GPUs is not "all OK": nothing was checked there."""
    found = result(ok(TEMP, "gpu01", "at most 40 °C"), lacking(TEMP, "gpu02"), lacking("gpu.ecc", "gpu02"))
    data, text = check_output(found)
    assert data["counts"] == {"FAIL": 0, "WARN": 0, "UNKNOWN": 0, "OK": 1, "N/A": 2}
    assert text.endswith("1 OK, 2 n/a (no NVIDIA GPU)")
    assert "all OK" not in text
    assert refusal(SESSION, found) is None
    assert rows(*found.findings) == []
    assert "n/a  gpu.ecc  gpu02: no NVIDIA GPU, no nvidia-smi" in rows(*found.findings, verbose=True)


def test_only_a_cluster_where_everything_was_checked_is_all_ok():
    assert check_output(result(ok(TEMP, "gpu01", "cool")))[1].endswith("all OK")
    assert "0 OK, 1 n/a" in check_output(result(lacking(TEMP, "gpu01")))[1]


@every_case("check", [each for each in ids() if each.startswith(("gpu.", "ib."))])
def test_no_check_of_hardware_is_ok_on_a_node_without_it(check):
    """Recorded answers of nodes that lack the hardware, and the state that a probe gives without its tool."""
    nodes = (Node("a", "10.0.0.1"), Node("b", "10.0.0.2"))
    plan = Plan(CLUSTER, nodes, limits=load(check).limits)
    bare = {
        "gpu.pci": "looked\n", "gpu.xid": "log readable\nlooked\n", "gpu.sxid": "log readable\nlooked\n",
        "gpu.aer": "looked\n", "gpu.pcielog": "log readable\nlooked\n",
    }  # fmt: skip
    if check in bare:
        answers = {node.name: Answer(bare[check]) for node in nodes}
    elif load(check).tool:
        answers = {node.name: Answer(state="absent") for node in nodes}
    elif check.startswith("ib.") and check != "ib.ports":
        answers = {node.name: Answer("@end\n") for node in nodes}
    else:
        return
    assert {each.verdict for each in judged(check, plan, answers)} == {"N/A"}
