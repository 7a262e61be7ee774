"""Packing: every sample of an epoch in one row, no row too long, and rows that depend on the seed alone."""

from __future__ import annotations

import random
from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.lm import packing
from trainer.lm.packing import Plan

ROOM = 64
LENGTHS = st.lists(st.integers(1, ROOM), max_size=300)
SETS = st.lists(LENGTHS, min_size=1, max_size=3)
SEEDS = st.integers(0, 2**63)


def rows_of(plan, epoch):
    first = plan.rows(epoch)
    return [list(plan.row(number)) for number in range(first, plan.rows(epoch + 1))]


@given(SETS, SEEDS, st.integers(0, 3))
def test_every_sample_is_in_one_row_of_each_epoch(sets, seed, epoch):
    plan = Plan(sets, [1.0] * len(sets), ROOM, seed)
    rows = rows_of(plan, epoch)
    assert sorted(sample for row in rows for sample in row) == list(range(sum(map(len, sets))))
    assert all(rows)


@given(SETS, SEEDS)
def test_no_row_is_longer_than_its_room(sets, seed):
    plan = Plan(sets, [1.0] * len(sets), ROOM, seed)
    for row in rows_of(plan, 0):
        assert sum(plan.lengths[sample] for sample in row) <= ROOM
        assert len(row) <= plan.most


@given(SETS, SEEDS, st.integers(0, 200))
def test_a_row_does_not_depend_on_the_rows_read_before(sets, seed, number):
    """A resumed training starts at any row, one that was not interrupted at the first."""
    fresh, used = (Plan(sets, [1.0] * len(sets), ROOM, seed) for _ in range(2))
    for earlier in range(number):
        used.row(earlier)
    assert list(fresh.row(number)) == list(used.row(number))
    assert fresh.place(number) == used.place(number)


@given(LENGTHS.filter(bool), SEEDS, st.integers(1, 3))
def test_rows_after_the_last_epoch_are_empty(lengths, seed, epochs):
    plan = Plan([lengths], [1.0], ROOM, seed, epochs)
    seen = Counter(sample for number in range(plan.rows(epochs) + 5) for sample in plan.row(number))
    assert set(seen.values()) == {epochs}
    assert len(seen) == len(lengths)


@given(st.integers(1, 50), st.sampled_from([0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0]), SEEDS, st.integers(1, 12))
def test_a_weight_is_how_often_a_set_is_seen_in_an_epoch(size, weight, seed, epochs):
    drawn = [packing.order([7, size], [1.0, weight], seed, epoch) for epoch in range(epochs)]
    of_second = [sample for epoch in drawn for sample in epoch if sample >= 7]
    assert len(of_second) == round(size * weight * epochs)
    counts = Counter(of_second)  # no sample again before all others
    assert max(counts.values(), default=0) - min((counts[7 + each] for each in range(size)), default=0) <= 1


def test_order_changes_with_the_seed_and_the_epoch():
    orders = {tuple(packing.order([100], [1.0], seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_order_of_a_seed_is_the_same_on_every_machine():
    """Python promises the sequence of random(); a change here changes the samples of every resumed training."""
    values = array("q", range(10))
    packing.shuffle(values, packing.key_of("epoch", 1337, 0))
    assert values.tolist() == EXPECTED


EXPECTED = [4, 1, 8, 6, 3, 9, 5, 2, 7, 0]


def test_chats_of_400_tokens_fill_rows_of_8192():
    chance = random.Random(0)
    lengths = [max(8, min(8192, int(chance.lognormvariate(5.6, 0.85)))) for _ in range(20_000)]
    plan = Plan([lengths], [1.0], 8192, 0)
    assert plan.padding() < 0.01
    assert plan.rows(1) * 8192 * (1 - plan.padding()) == pytest.approx(sum(lengths))


def test_a_sample_longer_than_a_row_is_an_error():
    with pytest.raises(ValueError, match="between 1 and 8 tokens"):
        Plan([[9]], [1.0], 8, 0)


@given(st.integers(0, 200), st.floats(0, 1), SEEDS)
def test_held_back_samples_are_not_trained_on(size, share, seed):
    kept, held = packing.held_back(size, share, seed)
    assert sorted([*kept, *held]) == list(range(size))
    assert len(held) == round(size * share)


def test_steps_include_the_last_rows():
    assert [packing.steps(rows, 8) for rows in (0, 1, 8, 9)] == [0, 1, 1, 2]


SIZED = st.lists(st.tuples(st.integers(1, ROOM), st.one_of(st.just(0), st.integers(1, 50))), max_size=200)


@given(SIZED, SEEDS)
def test_no_row_has_more_than_its_room_for_either_size(samples, seed):
    lengths, sizes = [length for length, _ in samples], [size for _, size in samples]
    plan = Plan([lengths], [1.0], ROOM, seed, second=packing.Second(sizes, 50))
    rows = rows_of(plan, 0)
    assert sorted(sample for row in rows for sample in row) == list(range(len(samples)))
    for row in rows:
        assert sum(lengths[sample] for sample in row) <= ROOM
        assert sum(sizes[sample] for sample in row) <= 50


def test_rows_of_two_sizes_fill_up_with_both():
    """Six of ten samples have an image, whose size varies independently of the text's."""
    drawn = random.Random(0)
    samples = [(drawn.randint(20, 1500), drawn.randint(100, 3000) * (drawn.random() < 0.6)) for _ in range(3000)]
    lengths, sizes = [length for length, _ in samples], [size for _, size in samples]
    mean = sum(sizes) * 8192 / sum(lengths)
    plan = Plan([lengths], [1.0], 8192, 0, second=packing.Second(sizes, int(1.05 * mean)))
    assert plan.padding() < 0.02
    assert plan.padding_of_second() < 0.07


def test_second_sizes_larger_than_their_room_are_refused():
    with pytest.raises(ValueError, match="second size"):
        Plan([[1]], [1.0], 8, 0, second=packing.Second([9], 8))
