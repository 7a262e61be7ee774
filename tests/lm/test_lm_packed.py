"""Conversations in batches: the tokens of transformers and of LLaMA-Factory, packed, equal on any number of ranks."""

import json

import pytest
from trainings import HERE


@pytest.fixture(scope="module")
def found(gpt, tmp_path_factory):
    result = gpt.run(HERE / "packed.py", tmp_path_factory.mktemp("packed"))
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {row["name"]: row for row in rows}


@pytest.mark.parametrize("name", ["compared", "marked"])
def test_tokens_and_answers_are_those_of_transformers(found, name):
    assert found[name]["talks"] == found[name]["tokens"] == found[name]["masks"] == 150


@pytest.fixture(scope="module")
def beside(gpt):
    result = gpt.run(HERE / "factory.py")
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {row["name"]: row for row in rows}


@pytest.mark.parametrize("name", ["qwen", "llama3", "qwen3_nothink", "chatml", "alpaca"])
def test_tokens_and_answers_are_those_of_llama_factory(beside, name):
    row = beside[name]
    assert row["tokens"] == row["answers"] == row["talks"] > 300, row


def test_a_step_has_the_same_rows_on_any_number_of_ranks(found):
    ranks = found["ranks"]
    assert ranks["steps"] > 20
    assert ranks["differ"] == 0
    assert ranks["wrong"] == 0  # counts of a step
    assert ranks["after"] == 0  # targets after the last epoch
    assert found["steps"]["of_rows"]


def test_documents_between_the_ends_are_the_samples(found):
    assert found["documents"]["times"] == {"first": [1], "second": [2]}
    assert found["documents"]["lengths"] == 1
    assert found["documents"]["padding"] <= found["documents"]["rows"]


@pytest.mark.parametrize("name", ["first", "second"])
def test_evaluation_has_all_held_back_samples_of_a_set(found, name):
    evaluated = found[f"evaluation {name}"]
    assert 0 < evaluated["targets"] == evaluated["counted"] == evaluated["held"]
    assert found["opened"]["held_back"] == {"first": 15, "second": 4}


def test_cut_samples_are_reported(found):
    assert "first: 99 of 150 samples are longer than 97 tokens and are cut" in found["opened"]["notes"]


def test_tokens_are_written_once_and_a_killed_writer_is_continued(found):
    cache = found["cache"]
    assert cache["unchanged"]
    assert cache["same"]
    assert cache["rewritten"] == cache["left"] == 0
    assert cache["parts"] > 20


def test_wrong_data_is_refused_with_file_line_and_field(found):
    refused = found["refused"]
    assert refused["record"].startswith("DIR/wrong.jsonl: line 21 has none of the fields 'instruction', ")
    assert refused["short"] == "first has no sample with an answer in its first 4 tokens"
    assert refused["missing"] == "DIR/none.jsonl: no such file"
    assert refused["weight"].startswith("--data DIR/first.jsonl:0: the weight must be more than 0")
    assert found["vocabulary"]["says"].startswith("the data has the token 339, but the model in DIR/model")


def test_skipped_records_are_counted(found):
    last = found["skipped"]["notes"][-1]
    assert last.startswith("wrong: 2 records skipped; the first: DIR/wrong.jsonl: line 21 has none")
