"""A new check is one declaration or one module: dropping the file into the tree is all there is to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from provision.checks import Answer, Plan
from provision.checks.kit import Level, threshold
from provision.model import Inventory, Node

TABLE = '''
"""Printers: a subject of one file."""

from provision.checks.kit import Level, each_node, equal, number, ok, pairs, threshold, warn

CHECKS = (
    equal(
        "printer.model",
        "every node has the same printer",
        probe="echo model laser",
        read=lambda answer: pairs(answer).get("model"),
        fix="buy another",
        why="Paper jams.",
    ),
    threshold(
        "printer.ink",
        "the ink lasts for a run",
        probe="echo ink 7",
        read=lambda answer: Level(number(pairs(answer)["ink"]), pairs(answer)["ink"]),
        least="percent",
        limits={"percent": 10},
        expected="at least {limit:g} %",
        fix="refill it",
        why="Pages stay white.",
    ),
)


@each_node("printer.paper", "there is paper", probe="echo paper no", why="Nothing is printed.")
def paper(node, answer):
    """WARN without paper."""
    return ok("some") if "paper yes" in answer.lines else warn("none", fix=f"fill {node}")
'''

MODULE = '''
"""mem.colour: all memory has one colour.

Colours are those of the vendor.
"""

from provision.checks.kit import Answers, Judgements, fail, ok

TITLE = "all memory has one colour"
WHY = "Colours clash."
PROBE = "echo colour red"


def judge(answers: Answers) -> Judgements:
    """FAIL for every colour but the first node's."""
    first = next(iter(answers.values()))
    for node, answer in answers.items():
        yield node, ok("the same") if answer.out == first.out else fail(answer.out.strip(), fix="paint it")
'''

USE = """
import json, sys
from pathlib import Path, PurePosixPath
import provision
from provision import checks
from provision.checks import Answer, Plan
from provision.checks.kit.probing import probe_of
from provision.model import CheckOptions, Inventory, Node

assert Path(provision.__file__).is_relative_to(Path.cwd()), provision.__file__
nodes = (Node("a", "127.0.0.1"), Node("b", "127.0.0.1"))
cluster = Inventory(Path("inventory.yaml"), PurePosixPath("/opt/llm/current"), nodes)
options = CheckOptions(limits={"printer.ink": {"percent": 5}})
assert list(checks.problems((), options.limits)) == []
found = {}
for check in checks.choose(options, level=0, only=["printer", "mem.colour"], bundle=False):
    plan = Plan(cluster, nodes, limits=checks.limits(check, options))
    told = {"printer.model": ("model laser", "model ink"), "mem.colour": ("colour red", "colour blue")}
    outs = told.get(check) or (probe_of(check, plan, nodes[0]).text.removeprefix("echo "),) * 2
    answers = {node.name: Answer(out + "\\n") for node, out in zip(nodes, outs)}
    judged = checks.judged(check, plan, answers)
    found[check] = [(each.node, each.verdict, each.observed, each.expected, each.fix) for each in judged]
print(json.dumps(found))
"""


def test_declaration_and_module_are_registered_by_their_files(tmp_path, copy_tree):
    copy_tree(tmp_path)
    (tmp_path / "provision" / "checks" / "printer.py").write_text(TABLE)
    (tmp_path / "provision" / "checks" / "mem_colour.py").write_text(MODULE)
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    differ = "a has laser; b has ink"
    assert json.loads(done.stdout) == {
        "mem.colour": [
            ["a", "OK", "the same", "", ""],
            ["b", "FAIL", "colour blue", "all memory has one colour", "paint it"],
        ],
        "printer.ink": [["a", "OK", "7", "", ""], ["b", "OK", "7", "", ""]],
        "printer.model": [
            ["a", "WARN", differ, "the same on every node", "buy another"],
            ["b", "WARN", differ, "the same on every node", "buy another"],
        ],
        "printer.paper": [
            ["a", "WARN", "none", "there is paper", "fill a"],
            ["b", "WARN", "none", "there is paper", "fill b"],
        ],
    }


def test_a_threshold_has_two_steps_and_an_exemption():
    check = threshold(
        "mem.example",
        "there is enough",
        probe="true",
        read=lambda answer: Level(float(answer.out), answer.out, " of its own") if answer.out else None,
        least="good",
        fail_below="bad",
        limits={"good": 10, "bad": 5},
        expected="at least {limit:g}",
        fix="add some",
        why="It matters.",
    )
    plain = threshold(
        "mem.plain", "none", probe="true", read=lambda answer: Level(float(answer.out), answer.out), fix="x", why="Y."
    )
    nodes = (Node("a", "127.0.0.1"),)
    plan = Plan(Inventory(Path("i"), Path("/x"), nodes), nodes, limits=check.limits)

    def judged(check, out):
        ((_, judgement),) = check.judge(plan, {"a": Answer(out)})
        return judgement.verdict, judgement.observed

    assert judged(check, "10") == ("OK", "10")
    assert judged(check, "7") == ("OK", "7 of its own")
    assert judged(check, "")[0] == "UNKNOWN"
    assert [judged(plain, each)[0] for each in ("0", "1")] == ["OK", "WARN"]
