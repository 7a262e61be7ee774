"""Samples of shards without replacement: each once per epoch, by number, on any number of ranks."""

import json

import pytest
from trainings import HERE


@pytest.fixture(scope="module")
def found(gpt):
    result = gpt.run(HERE / "once.py")
    assert result.returncode == 0, result.stderr
    return {row["name"]: row for row in map(json.loads, result.stdout.splitlines())}


def test_permutation_of_any_size_has_every_place_once(found):
    assert found["permuted"]["wrong"] == 0
    assert found["permuted"]["orders"] == 2
    assert found["permuted"]["moved"] > 900


def test_no_token_is_seen_twice_in_an_epoch(found):
    assert found["epochs"]["repeated"] == [1, 1, 1]
    assert found["epochs"]["seen"] == [160, 160, 160]
    assert found["epochs"]["orders"] == 3
    assert found["epochs"]["same"]


def test_each_set_has_its_share_and_is_not_repeated(found):
    assert found["shares"]["shares"] == pytest.approx([0.7, 0.25, 0.05], abs=2e-4)
    assert found["shares"]["repeated"] == 1


def test_ranks_divide_the_same_samples(found):
    assert found["ranks"]["same"]


def test_documents_end_after_their_end_token_and_with_the_row(found):
    assert found["documents"]["lengths"] == 1
    assert found["documents"]["problems"] == 0
