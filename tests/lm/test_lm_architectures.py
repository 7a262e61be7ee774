"""Llama, Qwen2, Qwen3 and GPT-2 compute what transformers' models compute, alone and packed."""

import json

import pytest
from architectures_cases import CASES
from trainings import HERE


@pytest.fixture(scope="module")
def found(gpt, tmp_path_factory):
    result = gpt.run(HERE / "architectures.py", tmp_path_factory.mktemp("architectures"))
    assert result.returncode == 0, result.stderr
    return {row["case"]: row for row in map(json.loads, result.stdout.splitlines()) if "case" in row}


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_transformers_computes(found, case):
    row = found[case]
    assert row["parameters"]
    assert max(row["logits"], row["exported"], row["loss"]) < 1e-5, row


@pytest.mark.parametrize("case", CASES)
def test_the_loss_in_chunks_has_the_gradients_of_the_loss_of_all_logits(found, case):
    assert found[case]["gradient"] < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_packed_documents_have_the_gradients_of_separate_documents(found, case):
    assert found[case]["packed"] < 1e-5
    assert found[case]["packed gradient"] < 1e-5
