"""``scripts/mutants``: its modules and tests exist, and its changes are changes."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from mutants import EQUIVALENT, GROUPS, Mutant, Verdict, as_json, equivalent, kills, mutants, report, run_tests

ROOT = Path(__file__).resolve().parents[2]

SOURCE = '''\
"""A docstring stays."""


def first(items: "list[str]", most: int = 3) -> "str | None":
    if not items or len(items) > most:
        raise ValueError("a text of an error stays")
    print("x")
    return items[0]
'''


@pytest.mark.parametrize("name", GROUPS)
def test_the_modules_and_tests_of_a_group_exist(name):
    group = GROUPS[name]
    assert all(list(ROOT.glob(pattern)) for pattern in group.modules)
    assert all((ROOT / test.partition("::")[0]).is_file() for test in (*group.first, *group.second))


def test_every_change_is_valid_python_and_differs():
    found = list(mutants("first.py", SOURCE))
    changed = {SOURCE[: each.start] + each.text + SOURCE[each.end :] for each in found}
    assert len(changed) == len(found)
    for text in changed:
        compile(text, "first.py", "exec")
        assert text != SOURCE
        assert '"""A docstring stays."""' in text
        assert 'ValueError("a text of an error stays")' in text
    replaced = {(each.was, each.text) for each in found}
    assert ("len(items) > most", "((len(items)) >= (most))") in replaced
    assert ("3", "(3 + 1)") in replaced
    assert ('print("x")', "pass") in replaced
    assert ("return items[0]", "return None") in replaced


def test_every_equivalent_mutant_still_exists():
    for file, line, text in EQUIVALENT:
        source = (ROOT / file).read_text()
        found = [each for each in mutants(file, source) if equivalent(each, source)]
        assert (line, text) in {(source.splitlines()[each.line - 1].strip(), each.text) for each in found}


@pytest.mark.parametrize(
    ("body", "outcome"),
    [("pass", "survived"), ("assert False", "failed"), ("import time; time.sleep(600)", "timed out")],
)
def test_timeout_is_distinguished_from_a_failed_test(tmp_path, body, outcome):
    (tmp_path / "test_one.py").write_text(f"def test_one():\n    {body}\n")
    limit = 3 if outcome == "timed out" else 120
    assert run_tests(tmp_path, ("test_one.py",), limit)[0] == outcome


def test_a_resumed_run_keeps_the_kills_and_tries_the_survivors_again(tmp_path, capsys):
    outcomes = ("failed", "timed out", "survived")
    verdicts = [Verdict(Mutant("a.py", n, n, n + 1, "1", "2"), outcome, 0.5) for n, outcome in enumerate(outcomes)]
    (tmp_path / "found.json").write_text(json.dumps(as_json({"link": verdicts})))
    found = kills(tmp_path / "found.json", "link")
    assert list(map(asdict, found.values())) == list(map(asdict, verdicts[:2]))
    assert kills(tmp_path / "found.json", "packer") == {}
    report("link", verdicts)
    assert capsys.readouterr().out == "link: 2 of 3 killed, 66.7 %; 1 of them by a timeout\n"
