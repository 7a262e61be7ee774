"""The examples of checks in CONTRIBUTING.md work when they are pasted into the files that the page names."""

import re
import textwrap
from pathlib import Path, PurePosixPath

import pytest
import yaml

from provision.checks import Answer, Check, Plan, cpu, mem
from provision.model import Inventory, Node

PAGE = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTION = PAGE.split("\n## Add a check\n")[1].split("\n## ")[0]


def blocks(language):
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```", SECTION, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(text) for text in found]


def pasted(source, module):
    """The check that a block declares at the end of a module."""
    names = dict(vars(module))
    exec(source, names)
    (check,) = (each for name, each in names.items() if isinstance(each, Check) and each is not vars(module).get(name))
    assert check.id.startswith(f"{Path(module.__file__).stem}.")
    assert f"`provision/checks/{Path(module.__file__).name}`" in SECTION
    return check


def judged(check, answers):
    nodes = tuple(Node(name, f"10.0.0.{number}") for number, name in enumerate(answers, 1))
    inventory = Inventory(Path("inventory.yaml"), PurePosixPath("/opt/llm/current"), nodes)
    return dict(check.judge(Plan(inventory, nodes, limits=check.limits), answers))


def test_threshold_example_judges_its_recordings():
    check = pasted(blocks("python")[0], mem)
    assert f"tests/unit/recorded/{check.id}.yaml" in SECTION
    recorded = yaml.safe_load(blocks("yaml")[0])
    for case in (recorded["healthy"], *recorded["faulty"]):
        found = judged(check, {name: Answer(**answer) for name, answer in case["nodes"].items()})
        bad = {name: each for name, each in found.items() if each.verdict != "OK"}
        assert {name: each.verdict for name, each in bad.items()} == case.get("finds", {})
        text = " ".join(f"{each.observed} {each.expected} {each.fix}" for each in bad.values())
        assert [word for word in case.get("says", ()) if word not in text] == []


@pytest.mark.parametrize(("answers", "bad"), [(("on", "on", "off"), {"c"}), (("on", "on", "on"), set())])
def test_equal_example_names_the_odd_node(answers, bad):
    check = pasted(blocks("python")[1], cpu)
    found = judged(check, {name: Answer(f"{answer}\n") for name, answer in zip("abc", answers, strict=True)})
    assert {name for name, each in found.items() if each.verdict != "OK"} == bad
