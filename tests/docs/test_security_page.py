"""docs/security.md: every promise names a test, and every test that the page names exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/security.md").read_text(encoding="utf-8")
PROMISES = PAGE.partition("## What is promised\n")[2].partition("\n## ")[0]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)(?:\[[^`]*\])?`")
ROWS = [row for row in PROMISES.splitlines() if row.startswith("| ") and not row.startswith("| promise ")]


@cache
def parsed_tests(path):
    """The tests of a file by name, those of a class as ``Class::test``."""
    found = {}
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{each.name}": each for each in node.body if isinstance(each, ast.FunctionDef)}
    return {name: node for name, node in found.items() if node.name.startswith("test_")}


def is_generated(path, name):
    """Whether hypothesis generates a test's inputs, in the profile's number."""
    decorators = [ast.unparse(each) for each in parsed_tests(path)[name].decorator_list]
    return any(each.startswith("given(") for each in decorators) and not any(
        "max_examples" in each for each in decorators
    )


@pytest.mark.parametrize(("path", "name"), sorted({(match[1], match[2]) for match in NAMED.finditer(PAGE)}))
def test_a_test_that_the_page_names_exists(path, name):
    assert (ROOT / path).is_file(), path
    assert name in parsed_tests(path), f"{path} has no test {name}"


def test_every_name_of_a_test_has_the_form_that_is_checked():
    assert len(NAMED.findall(PAGE)) == PAGE.count("::test_") > 80


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:60])
def test_every_promise_names_a_test(row):
    _, promise, tests, _ = row.split("|")
    assert promise.strip()
    assert NAMED.search(tests)


def test_every_boundary_has_promises():
    sections = PROMISES.split("\n### ")[1:]
    assert len(sections) == 9
    assert all("\n| promise | tests |\n" in section and NAMED.search(section) for section in sections)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if "(fuzz)" in row], ids=lambda row: row.split("|")[1].strip()[:60]
)
def test_a_promise_about_every_input_has_a_test_with_as_many_as_the_profile_says(row):
    assert any(is_generated(path, name) for path, name in NAMED.findall(row))


def test_the_nightly_profile_has_10_000_examples():
    assert settings.get_profile("nightly").max_examples == 10_000
    assert settings.get_profile("clusterctl").max_examples <= 100


def test_every_test_takes_its_number_of_examples_from_the_profile():
    """A number in a test would replace the profile's, and the nightly profile would not try 10,000."""
    fixed = re.compile(r"max_examples=\d")
    paths = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    assert len(paths) > 100
    assert [path.name for path in paths if fixed.search(path.read_text(encoding="utf-8"))] == []
