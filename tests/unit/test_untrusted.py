"""Bytes from outside become a value or one kind of error, whatever they are."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.agent.contract.untrusted import UntrustedError, parse_json, parse_object


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
@pytest.mark.parametrize("levels", [40, 987, 5000, 400_000])
def test_deep_nesting_is_an_error_like_any_other(opening, levels):
    with pytest.raises(UntrustedError):
        parse_json(opening * levels, limit=1 << 23)


@pytest.mark.parametrize("levels", [33, 200, sys.getrecursionlimit() // 2])
def test_a_document_that_is_well_formed_but_deep_is_refused(levels):
    with pytest.raises(UntrustedError, match="nested more than 32 levels"):
        parse_json("[" * levels + "]" * levels)


def test_deepest_allowed_document_is_read():
    assert parse_json("[" * 32 + "]" * 32)
    assert parse_json("1", depth=0) == 1
    with pytest.raises(UntrustedError, match="nested"):
        parse_json("[]", depth=0)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xff", "not UTF-8"),
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"9" * 5000, "5000 digits"),
        (b"[-" + b"9" * 41 + b"]", "42 digits"),
        (b" " * 100, "100 bytes"),
    ],
)
def test_error_gives_the_reason(data, why):
    with pytest.raises(UntrustedError, match=why):
        parse_json(data, limit=99 if why == "100 bytes" else 1 << 20)


def test_document_must_be_an_object():
    assert parse_object(b'{"a": 1}') == {"a": 1}
    with pytest.raises(UntrustedError, match="not a JSON object"):
        parse_object(b"[]")


@given(st.binary(max_size=200) | st.text(alphabet='[]{}",:0123456789eE+-.\\untrfalse', max_size=200))
def test_anything_is_a_value_or_an_untrusted_error(data):
    try:
        value = parse_json(data)
    except UntrustedError:
        return
    again = json.dumps(value)
    assert json.dumps(json.loads(again)) == again
