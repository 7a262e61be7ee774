"""DeepSpeed's own fields: a version without one of them is named, before the first step."""

import json

import pytest
from trainings import HERE


@pytest.fixture(scope="module")
def reported(gpt):
    result = gpt.run(HERE / "unknown.py")
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {line["field"]: line for line in lines}


def test_complete_deepspeed_gives_no_message(reported):
    assert len(reported) == 10
    assert reported[""]["what"] is None


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("fp16_groups", "has no attribute 'fp16_groups'"),
        ("fp32_groups", "has no attribute 'fp32_groups'"),
        ("single_partition_of_fp32_groups", "has no attribute 'single_partition_of_fp32_groups'"),
        ("_hp_mapping", "has no attribute '_hp_mapping'"),
        ("grad_position", "has no attribute 'grad_position'"),
        ("fp32_partitioned_groups_flat", "has no attribute 'fp32_partitioned_groups_flat'"),
        ("coalesce_grad_reduction", "has no attribute 'coalesce_grad_reduction'"),
        ("half", "layers.0.attention.qkv.weight is outside its tensor"),
        ("one", "all ranks together hold 3440 of 5488 weights"),
    ],
)
def test_missing_field_is_named_with_the_version(reported, field, words):
    line = reported[field]
    assert line["what"].startswith(f"DeepSpeed {line['version']} differs from 0.19, which this engine needs: ")
    assert line["what"].endswith(words)
    assert line["fix"].startswith("use --engine plain")
