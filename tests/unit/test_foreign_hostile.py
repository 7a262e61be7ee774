"""Any text that ``init --from`` reads is a list of nodes, or an error with a next command: never a traceback."""

# ruff: noqa: E501, PT017 - formats in one piece; what a property asks of an exception

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.errors import UsageError
from provision.inventory.foreign import read
from provision.inventory.foreign.ansible_files import VarsFile
from provision.inventory.names import check_address

pytestmark = pytest.mark.timeout(3600)  # the nightly profile has 10,000 examples
SEEDS = (
    "head ansible_host=10.0.0.9\n[gpus]\ngpu[01:03] ansible_user=ada x='y z'\n[r:children]\ngpus\n[gpus:vars]\nansible_port=2\n",
    "all:\n  vars:\n    ansible_user: root\n    s: !vault |\n      1\n  children:\n    g:\n      hosts:\n        h[1:2]: {ansible_port: 2}\n",
    '{"_meta": {"hostvars": {"a": {"ansible_host": "h", "ansible_port": 2}}}, "g": {"hosts": ["a"], "children": ["k"]}, "k": ["b"]}',
    "worker-1 slots=8\nroot@10.0.0.7:2222 slots=4 max_slots=8\n",
    "a:2\nb:22 binding=user:0\n[::1]:22\nn[1-4]:8\n",
    "adm: head\ngpu: gpu[01-03] @adm,!head\nall: @*\n",
    "nodes:\n  all: '@c,@adm'\n  c: 'gpu[1-4]'\n  adm: ['head']\nracks:\n  r1: '@nodes:c'\n",
    "plugin: aws_ec2\nregions: [a]\n",
)  # fmt: skip
PIECES = st.sampled_from(
    ["\n", " ", "\t", ":", "=", "[", "]", "{", "}", '"', "'", ",", "@", "!", "&", "*", "#", "\0", "\x1b[1m", "\u2028", "\\",
     "-oX", "%h", "$(id)", "{{ x }}", "[1:999999999]", "[1-999999999]", "[a:z]", "9" * 50, "slots=", "ansible_port=0",
     "ansible_group_priority=9", "!vault", "&a ", "*a", "<<: ", "\r\n", "\ufeff", "null", "_meta", "hosts:", "children:", "all"]
)  # fmt: skip


@st.composite
def texts(draw):
    """One of the formats with a few pieces cut out, put in, or repeated."""
    text = draw(st.sampled_from(SEEDS))
    for _ in range(draw(st.integers(0, 5))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        put = draw(st.sampled_from(["", text[start:end] * 2]) | PIECES | st.text(max_size=5))
        text = text[:start] + put + text[end:]
    return text


@given(texts(), texts(), st.sampled_from([None, "gpus", "g", "all", "adm"]))
def test_any_text(text, variables, group):
    beside = [VarsFile(kind, owner, "vars.yml", variables) for kind in ("group", "host") for owner in ("all", "g", "a")]
    try:
        found = read(text, "file", group=group, beside=beside)
    except UsageError as error:
        assert error.hint
        assert str(error).isprintable(), str(error)
        assert all(problem.isprintable() for problem in getattr(error, "problems", ())), error.problems
        return
    for each in found.hosts:
        check_address(each.address)
        assert not (each.user or "").startswith("-")
    assert all(0 <= place < len(found.hosts) for places in found.groups.values() for place in places)
    assert all(note.isprintable() for note in found.notes), found.notes
