"""Bytes from outside become a value or one kind of error, whatever they are."""

from __future__ import annotations

import json
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.agent.contract.untrusted import (
    MOST,
    UntrustedError,
    finite,
    is_number,
    is_whole,
    parse_json,
    parse_object,
    whole,
)


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


@given(st.integers() | st.floats() | st.booleans() | st.none() | st.text() | st.lists(st.integers()))
def test_a_number_is_taken_only_within_its_range(value):
    number = type(value) in (int, float)
    assert is_whole(value) == (type(value) is int and 0 <= value < MOST)
    assert whole(value, 10, -5) == (value if type(value) is int and -5 <= value < 10 else None)
    assert is_number(value) == (number and (type(value) is int or math.isfinite(value)))
    assert finite(value, 8.0, 2.0) == (float(value) if number and 2 <= value < 8 else None)


def test_huge_numbers_are_no_error():
    assert not is_whole(10**400)
    assert is_number(10**300)
    assert not is_number(10**400)
    assert finite(-(10**400)) is None
