"""DeepSpeed's configuration: one source of defaults, the user's file, and the fields that the trainer sets."""

import json

import pytest

from trainer.lm import options, zero_config
from trainer.lm.errors import RefusedError


def made(*argv, dtype="torch.bfloat16", on_gpu=True):
    given = options.from_arguments(["--data", "none", "--batch-size", "4", *map(str, argv)])
    return zero_config.make(given, int(given.engine[-1]), 8, dtype, on_gpu)


def test_gpu_configuration_is_the_measured_one():
    """docs/benchmarks.md has figures of these values."""
    assert made("--engine", "zero2") == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": True,
        "fp16": {"enabled": False},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "allgather_bucket_size": 200_000_000,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 200_000_000,
            "contiguous_gradients": True,
        },
        "steps_per_print": 10**9,
    }
    # DeepSpeed's own thresholds: 5e7 parameters ahead, below 1e5 whole everywhere.
    assert made("--engine", "zero3")["zero_optimization"] == {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 10**9,
        "reduce_bucket_size": 200_000_000,
        "stage3_max_live_parameters": 10**9,
        "stage3_max_reuse_distance": 10**9,
        "stage3_gather_16bit_weights_on_model_save": True,
    }


@pytest.mark.parametrize(
    ("dtype", "on"), [("bfloat16", [False, True]), ("float16", [True, False]), ("float32", [False, False])]
)
def test_one_precision_is_on(dtype, on):
    reported = made("--engine", "zero1", dtype=f"torch.{dtype}")
    assert [reported["fp16"]["enabled"], reported["bf16"]["enabled"]] == on


def test_cpu_configuration_has_no_overlap_and_no_pinned_memory():
    reported = made("--engine", "zero3", "--offload", "all", on_gpu=False)
    zero = reported["zero_optimization"]
    assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu", "pin_memory": False}
    assert (zero["overlap_comm"], reported["zero_force_ds_cpu_optimizer"]) == (False, False)
    assert "round_robin_gradients" not in made("--engine", "zero2", "--offload", "optimizer")["zero_optimization"]


def test_options_override_the_configuration_file(tmp_path):
    path = tmp_path / "mine.json"
    place = {"device": "cpu", "ratio": 0.5}
    zero = {"stage": 2, "reduce_bucket_size": 5, "overlap_comm": "auto", "offload_optimizer": place}
    printed = {
        "zero_optimization": zero,
        "train_batch_size": 7,
        "gradient_clipping": 3.0,
        "optimizer": {"type": "Adam"},
    }
    printed |= {"fp16": {"enabled": True, "initial_scale_power": 8}, "wall_clock_breakdown": True}
    path.write_text(json.dumps(printed))
    options = ("--engine", "zero2", "--deepspeed-config", path, "--grad-clip", 0.0)
    reported = made(*options, "--offload", "optimizer")
    zero = reported.pop("zero_optimization")
    assert (zero["reduce_bucket_size"], zero["overlap_comm"], zero["allgather_bucket_size"]) == (5, True, 200_000_000)
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert made(*options)["zero_optimization"]["offload_optimizer"] == place
    assert reported["fp16"] == {"enabled": False, "initial_scale_power": 8}
    assert (reported["wall_clock_breakdown"], reported["gradient_clipping"]) == (True, 0.0)
    assert not {"train_batch_size", "optimizer"} & set(reported)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSON"),
        ("[]", "not a JSON object"),
        ('{"zero_optimization": 2}', "zero_optimization is not an object"),
        ('{"zero_optimization": {"stage": 3}}', "is for stage 3"),
        ('{"zero_optimization": {"offload_param": {"device": "nvme"}}}', "offload_param to nvme"),
        (None, "No such file"),
    ],
)
def test_unusable_configuration_file_is_refused(tmp_path, text, message):
    path = tmp_path / "mine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RefusedError) as refused:
        made("--engine", "zero3" if "nvme" in message else "zero2", "--deepspeed-config", path)
    assert message in f"{refused.value}; {refused.value.fix}"
    assert refused.value.fix


def test_fp16_requires_a_gpu():
    assert made("--engine", "zero1", dtype="torch.float16")["fp16"]["loss_scale"] == 0
    with pytest.raises(RefusedError, match="fp16 only on GPUs"):
        made("--engine", "zero1", dtype="torch.float16", on_gpu=False)
