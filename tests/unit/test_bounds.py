"""Bounds of numbers: allowed values and messages."""

import math

import pytest

from trainer.bounds import EVERY, RATE, SHARE, Bound


@pytest.mark.parametrize(
    ("bound", "text"),
    [
        (Bound(low=1), "at least 1"),
        (Bound(above=0, high=1), "more than 0 and at most 1"),
        (Bound(low=0, below=1), "at least 0 and less than 1"),
        (Bound(low=1, also=(0,)), "at least 1, or 0"),
        (Bound(), "a finite number"),
    ],
)
def test_a_bound_reads_as_a_sentence(bound, text):
    assert str(bound) == text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bound", [Bound(), Bound(low=0), EVERY, SHARE, RATE])
def test_infinite_numbers_are_never_allowed(bound, value):
    assert not bound.allows(value)


def test_edges():
    assert EVERY.allows(0)
    assert not EVERY.allows(-1)
    assert SHARE.allows(0)
    assert SHARE.allows(1)
    assert not RATE.allows(0)
    assert Bound(low=0, below=1).problem(1) == "must be at least 0 and less than 1, not 1"
    assert not Bound(low=0, below=1).problem(0.99)
