"""Every check against its recordings, and what every check must have."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import replace
from pathlib import Path

from case_table import every_case

sys.path.append(str(Path(__file__).parent))  # for recorded; last, so that it hides no module

from recorded import FOLDER, recorded

from provision import checks
from provision.checks import Answer, judged

GOOD = {"OK", "N/A"}
LEVELS = {0, 1}
MEASURES = {"ports", "clock", "shares"}
TYPES = {"timeout": float | int, "tool": str, "root": bool, "bundle": bool, "limits": dict, "hung_fix": str}
FILES = Path(checks.__file__).parent


def recordings(kind):
    return [
        recording
        for check in checks.ids()
        if (FOLDER / f"{check}.yaml").exists()  # a separate test proves that each has one
        for recording in getattr(recorded(check), kind)
    ]


def title(recording):
    return f"{recording.check} {recording.name}"


@every_case("recording", lambda: recordings("healthy"), ids=title)
def test_healthy_nodes_are_ok(recording):
    findings = list(judged(recording.check, recording.plan, recording.answers))
    assert sorted(each.node for each in findings) == sorted(recording.answers)
    assert [(each.node, each.verdict, each.observed) for each in findings if each.verdict not in GOOD] == []
    assert all(each.observed for each in findings)


@every_case("recording", lambda: recordings("faulty"), ids=title)
def test_a_fault_is_named_on_its_node_and_on_no_other(recording):
    assert recording.finds, f"{recording.name}: finds nothing"
    findings = list(judged(recording.check, recording.plan, recording.answers))
    assert sorted(each.node for each in findings) == sorted(recording.answers)
    bad = {each.node: each for each in findings if each.verdict not in GOOD}
    message = {name: (each.verdict, each.observed) for name, each in bad.items()}
    assert {name: each.verdict for name, each in bad.items()} == recording.finds, f"{recording.name}: {message}"
    for each in bad.values():
        assert each.check == recording.check
        assert each.observed
        assert each.expected
        assert each.why
        if each.verdict in {"FAIL", "WARN"}:
            assert each.fix, f"{recording.name}: no advice"
    reported = " ".join(f"{each.observed} {each.expected} {each.fix}" for each in bad.values())
    assert [word for word in recording.says if str(word) not in reported] == [], reported


@every_case("check", checks.ids())
def test_every_check_has_recordings_with_their_source(check):
    assert (FOLDER / f"{check}.yaml").exists(), f"tests/unit/recorded/{check}.yaml is missing"
    assert recorded(check).healthy
    assert recorded(check).faulty
    for each in (*recorded(check).healthy, *recorded(check).faulty):
        assert len(each.source) > 5, f"{each.name}: where is it from?"
        assert isinstance(each.seen, bool)
        assert not re.search(r"(?i)\b(edited|after)\b", each.source) or not each.seen, "what was edited was not seen"


@every_case("check", checks.ids())
def test_every_check_keeps_the_contract(check):
    about = checks.load(check)
    assert re.fullmatch(r"[a-z]+\.[a-z0-9_]+", check)
    assert about.id == check
    assert about.level in LEVELS
    title = about.title
    assert title[:1] == title[:1].lower() or title.split()[0].isupper() or re.match(r"[A-Z]+[a-z]*[A-Z0-9]", title)
    assert not title.endswith(".")
    assert len(title) <= 80
    assert about.why.endswith(".")
    assert about.why[0].isupper() or about.why[0].isdigit() or not about.why[0].isalpha()
    if about.measure:
        assert about.measure in MEASURES
        assert about.level == 1
        assert not about.probe
    else:
        assert about.probe
    for name, kind in TYPES.items():
        assert isinstance(getattr(about, name), kind), name
    assert 0 < about.timeout <= 60
    for limit, value in about.limits.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", limit)
        assert isinstance(value, int | float)
        assert not isinstance(value, bool)


MODULES = sorted(each for each in FILES.glob("*_*.py") if each.stem != "__init__")


@every_case("path", MODULES, ids=lambda path: path.stem)
def test_a_module_documents_its_check(path):
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    first = doc.splitlines()[0]
    assert first.startswith(f"{path.stem.replace('_', '.', 1)}: ")
    assert first.endswith(".")


class Asked(dict):
    """Limits that remember which of them were read."""

    def __init__(self, limits):
        super().__init__(limits)
        self.read = set()

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)


@every_case("check", [each for each in checks.ids() if checks.load(each).limits])
def test_every_limit_of_a_check_is_read(check):
    limits = Asked(checks.load(check).limits)
    for recording in (*recorded(check).healthy, *recorded(check).faulty):
        list(judged(check, replace(recording.plan, limits=limits), recording.answers))
    assert limits.read == set(limits)


def test_a_check_reads_its_own_limits_only():
    """A judge that reads a limit which its check does not declare fails with a KeyError."""
    for check in (each for each in checks.ids() if not checks.load(each).limits):
        for recording in (*recorded(check).healthy, *recorded(check).faulty):
            list(judged(check, replace(recording.plan, limits={}), recording.answers))


@every_case("check", checks.ids())
def test_missing_or_hung_probe_is_never_ok(check):
    plan = recorded(check).healthy[0].plan
    node = plan.nodes[0].name
    for state in ("missing", "hung"):
        (finding,) = judged(check, plan, {node: Answer(state=state)})
        assert finding.verdict in {"UNKNOWN", "FAIL"}
        assert finding.observed


def test_every_recording_belongs_to_a_check():
    assert {path.stem for path in FOLDER.glob("*.yaml")} - set(checks.ids()) == set()


def test_a_node_without_the_hardware_is_not_judged_unless_others_have_it():
    plan = recorded("gpu.count").faulty[0].plan
    healthy = next(iter(recorded("gpu.count").healthy[0].answers.values()))
    nowhere = {"a": Answer(state="absent"), "b": Answer(state="absent")}
    assert {each.verdict for each in judged("gpu.count", plan, nowhere)} == {"N/A"}
    found = {each.node: each for each in judged("gpu.count", plan, {**nowhere, "c": healthy})}
    assert {node: each.verdict for node, each in found.items()} == {"a": "FAIL", "b": "FAIL", "c": "OK"}
    assert found["a"].observed == "no NVIDIA GPU, no nvidia-smi; 1 of the other 2 nodes have it"
    assert found["a"].fix
    other = {each.node: each.verdict for each in judged("gpu.mig", plan, {"a": Answer(state="absent"), "c": healthy})}
    assert other == {"a": "N/A", "c": "OK"}  # one check that reports it is enough
