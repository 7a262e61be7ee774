"""``scripts/mutants``: its modules and tests exist, and its changes are changes."""

from pathlib import Path

import pytest
from mutants import GROUPS, mutants

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
    assert all((ROOT / test).is_file() for test in (*group.first, *group.second))


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
