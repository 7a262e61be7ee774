"""A fine-tuning has the losses of LLaMA-Factory's, step by step: same model, samples, order, AdamW and schedule."""

import json

import pytest
from trainings import HERE


@pytest.fixture(scope="module")
def trained(gpt, tmp_path_factory):
    result = gpt.run(HERE / "factory_trains.py", tmp_path_factory.mktemp("factory"))
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [json.loads(line[5:]) for line in result.stdout.splitlines() if line.startswith("SAYS ")]
    return {row["micro_steps"]: row for row in rows}


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_losses_are_those_of_llama_factory(trained, micro_steps):
    """Packed rows beside padded ones, with answers of different lengths in each micro-step."""
    row = trained[micro_steps]
    assert row["pairs"] == row["rows"] == 48  # so steps have the same samples
    assert len(row["ours"]) == len(row["theirs"]) == 12
    ours, theirs = ([[step[which] for step in row[name]] for which in (0, 1)] for name in ("ours", "theirs"))
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-4)  # gradient norms, before they are clipped
    assert ours[0][0] - ours[0][-1] > 0.5
    assert min(ours[1]) > 1  # so clipping is compared as well
