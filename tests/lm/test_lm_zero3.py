"""ZeRO-3 and FSDP start without the whole model on any rank, and with the weights of every other engine."""

import json

import pytest
from trainings import HERE


@pytest.fixture(scope="module")
def begun(gpt):
    result = gpt.run(HERE / "shards.py", gpt.folder / "shards")
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {line.pop("name"): line for line in lines}


def test_the_measure_sees_a_whole_model(begun):
    assert min(begun["plain"]["making"]) >= 1


FSDP = ["fsdp scratch", "fsdp hugging face", "fsdp checkpoint"]


@pytest.mark.parametrize(
    ("name", "half"),
    [("scratch", 1), ("bfloat16", 0.5), ("hugging face", 1), ("checkpoint", 1), *((name, 1) for name in FSDP)],
)
def test_a_rank_has_its_share_of_the_model_and_one_parameter(begun, name, half):
    """The largest parameter is a thirtieth of the model; it is whole when it is drawn and while it is put there."""
    assert max(begun[name]["making"]) < 0.5 * half + 0.1
    assert max(begun[name]["loading"]) < 0.1


@pytest.mark.parametrize("name", ["plain", "scratch", "bfloat16", "hugging face", "checkpoint", *FSDP])
def test_every_engine_starts_with_the_same_weights(begun, name):
    """To the last bit; in 16 bits rounded to them, as DeepSpeed does in all stages."""
    assert begun[name]["wrong"] == [0, 0]
    assert sum(begun[name]["share"]) == pytest.approx(1)
