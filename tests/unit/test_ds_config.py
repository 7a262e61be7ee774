"""DeepSpeed's configuration: what guides print, what goes together, and what does not."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.ds_config import FILLED, GPUS, PRESETS, ConfigError, Request, autos, find, make, notices, text
from trainer.ds_config.__main__ import main
from trainer.ds_config.build import DEFAULT, reduce_elements
from trainer.ds_config.request import DEVICES, OPTIONS, PRECISIONS, SCHEDULES, request_of

AUTO_BATCH = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
FP16 = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
CPU = {"device": "cpu", "pin_memory": True}
FLAT = {  # stages 0 to 2 of LLaMA-Factory's examples
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": False,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
    "round_robin_gradients": True,
}
STAGE3 = {
    "stage": 3,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
FACTORY = {
    **AUTO_BATCH,
    "zero_allow_untested_optimizer": True,
    "fp16": {"enabled": "auto", **FP16},
    "bf16": {"enabled": "auto"},
}
KNOWN = {
    "z0": {**FACTORY, "zero_optimization": {"stage": 0, **FLAT}},
    "z2": {**FACTORY, "zero_optimization": {"stage": 2, **FLAT}},
    "z2-offload": {**FACTORY, "zero_optimization": {"stage": 2, "offload_optimizer": CPU, **FLAT}},
    "z3": {**FACTORY, "zero_optimization": {"overlap_comm": False, **STAGE3}},
    "z3-offload": {
        **FACTORY,
        "zero_optimization": {"offload_optimizer": CPU, "offload_param": CPU, "overlap_comm": False, **STAGE3},
    },
    "llama-7b": {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.0}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 2e-5, "warmup_num_steps": 1000},
        },
        "zero_optimization": {
            "stage": 3, "offload_optimizer": CPU, "offload_param": CPU, "contiguous_gradients": True,
            "overlap_comm": True,
        },
        "fp16": {"enabled": True, **FP16},
        "bf16": {"enabled": False},
        "gradient_clipping": 1.0,
        "steps_per_print": 50,
    },
    "13b": {
        **AUTO_BATCH,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2, "offload_optimizer": CPU, "allgather_partitions": True, "allgather_bucket_size": 2e8,
            "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": 2e8, "contiguous_gradients": True,
        },
    },
    "70b": {
        **AUTO_BATCH,
        "bf16": {"enabled": True},
        "zero_optimization": {"offload_optimizer": CPU, "offload_param": CPU, "overlap_comm": True, **STAGE3},
    },
    "gpt2-xl": {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 32,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 2, "allgather_partitions": True, "overlap_comm": True, "contiguous_gradients": True,
        },
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    },
}  # fmt: skip


def lacking(wanted, made, above=""):
    """The differences between ``made`` and ``wanted``."""
    found = []
    for key, value in wanted.items():
        if isinstance(value, dict) and isinstance(made.get(key), dict):
            found += lacking(value, made[key], f"{above}{key}.")
        elif key not in made or made[key] != value:
            found.append(f"{above}{key}: {made.get(key)!r}, not {value!r}")
    return found


def test_every_preset_is_compared():
    assert KNOWN.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_configuration_can_be_produced(name):
    assert lacking(KNOWN[name], make(PRESETS[name])) == []


def test_presets_of_llamafactory_have_no_other_keys():
    for name in ("z0", "z2", "z2-offload", "z3", "z3-offload"):
        assert make(PRESETS[name]) == KNOWN[name]


@pytest.mark.parametrize(
    ("gpu", "precision"),
    [
        ("V100", "fp16"), ("Tesla V100-SXM2-32GB", "fp16"), ("T4", "fp16"), ("A100", "bf16"), ("rtx 3090", "bf16"),
        ("NVIDIA A100-SXM4-40GB", "bf16"), ("NVIDIA GeForce RTX 4090", "bf16"), ("NVIDIA H200", "bf16"),
    ],
)  # fmt: skip
def test_precision_depends_on_the_card(gpu, precision):
    config = make(Request(gpu=gpu))
    assert [key for key in ("fp16", "bf16") if config[key]["enabled"]] == [precision]


def test_names_with_a_common_start_are_distinguished():
    names = ("L4", "NVIDIA L40S", "H20", "NVIDIA H200", "H100 80GB HBM3", "NVIDIA A10G", "NVIDIA A10", "A100-SXM4-80GB")
    assert [find(name).name for name in names] == ["L4", "L40S", "H20", "H200", "H100", "A10G", "A10", "A100"]
    for other in ("NVIDIA T400 4GB", "NVIDIA RTX A4000", "A4000", "Quadro P1000", "P1000"):
        with pytest.raises(ConfigError, match="not in the table"):
            find(other)
    others = ("NVIDIA RTX A6000", "NVIDIA L40", "NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA H20-3e", "Tesla T4")
    assert [find(name).name for name in others] == ["RTX A6000", "L40", "GH200", "GB200", "H20-3e", "T4"]
    boards = ("NVIDIA H100 PCIe", "NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-40GB", "Tesla V100-PCIE-32GB", "H100 NVL")
    assert [find(name).name for name in boards] == ["H100 PCIe", "A100 PCIe", "A100 PCIe", "V100 PCIe", "H100 NVL"]
    assert all(find(name).name == name for name in GPUS)


def test_cards_have_the_memory_that_nvidia_smi_shows():
    """MiB in nvidia-smi, with ECC if the card has it; on GDDR6 ECC takes a sixteenth."""
    shown = {
        "T4": 15360, "A10": 23028, "L4": 23034, "L40S": 46068, "A40": 46068, "RTX4090": 24564, "A30": 24576,
        "A100": 81920, "H100": 81559,
    }  # fmt: skip
    assert {name: GPUS[name].memory for name in shown} == pytest.approx(
        {name: size / 1024 for name, size in shown.items()}, rel=0.006
    )


@pytest.mark.parametrize(
    ("request_", "message", "way_out"),
    [
        (Request(stage=2, offload_param="cpu"), "only stage 3 shards parameters", "--stage 3"),
        (Request(stage=0, offload_optimizer="cpu"), "keeps everything on every GPU", "--stage 2"),
        (Request(stage=3, offload_optimizer="nvme"), "offload to nvme needs a path", "--nvme-path DIR"),
        (Request(stage=2, offload_optimizer="nvme", nvme_path="/scratch"), "uses host memory", "--stage 3"),
        (Request(stage=3, nvme_path="/scratch"), "nothing is offloaded to nvme", "--offload-optimizer nvme"),
        (Request(stage=3, offload_param="nvme", nvme_path="scratch"), "must be absolute", ""),
        (Request(gpu="V100", precision="bf16"), "V100 (compute capability 7.0) does not support it", "fp16"),
        (Request(gpu="Voodoo 2"), "Voodoo 2: not in the table", "A100"),
        (Request(target="own", micro_batch=1), "only transformers' Trainer can choose", "--gpu A100"),
        (Request(target="own", precision="bf16"), "needs the samples per GPU", "--micro-batch 1"),
        (Request(target="own", precision="bf16", micro_batch=1, optimizer=True), "needs a learning rate", "--lr"),
        (Request(schedule="WarmupLR"), "only schedules its own optimizer", "--optimizer"),
        (
            Request(target="own", precision="bf16", micro_batch=1, optimizer=True, lr=1e-3, schedule="WarmupDecayLR"),
            *("needs the number of steps", "--steps"),
        ),
        (Request(stage=4), "--stage 4: must be one of 0, 1, 2, 3", ""),
        (Request(micro_batch=0), "--micro-batch must be at least 1", ""),
        (Request(link=float("nan")), "--link must be more than 0 and at most 100000, not nan", ""),
    ],
)
def test_conflicting_options_are_refused(request_, message, way_out):
    with pytest.raises(ConfigError) as refused:
        make(request_)
    assert message in str(refused.value)
    assert way_out in refused.value.hint


REQUESTS = st.builds(
    Request,
    stage=st.integers(0, 3),
    target=st.sampled_from(["trainer", "own"]),
    precision=st.sampled_from(PRECISIONS),
    gpu=st.none() | st.sampled_from(list(GPUS)),
    offload_optimizer=st.sampled_from(DEVICES),
    offload_param=st.sampled_from(DEVICES),
    nvme_path=st.none() | st.just("/scratch"),
    overlap=st.none() | st.booleans(),
    hidden=st.none() | st.integers(1, 16384),
    link=st.none() | st.floats(0.01, 1000),
    world=st.none() | st.integers(1, 4096),
    micro_batch=st.none() | st.integers(1, 64),
    optimizer=st.booleans(),
    lr=st.none() | st.floats(1e-6, 1),
    schedule=st.sampled_from(SCHEDULES),
    warmup=st.none() | st.integers(0, 1000),
    steps=st.none() | st.integers(1, 1000),
)


@given(REQUESTS)
def test_auto_is_written_only_for_fields_that_the_trainer_fills(request_):
    try:
        config = make(request_)
    except ConfigError:
        return
    assert set(autos(config)) <= (FILLED if request_.target == "trainer" else set())
    assert json.loads(text(config)) == config
    assert not (config["fp16"]["enabled"] is True and config["bf16"]["enabled"] is True)
    zero = config["zero_optimization"]
    assert ("offload_param" in zero) <= (zero["stage"] == 3)
    assert ("nvme" in text(config)) == ("aio" in config)
    assert isinstance(notices(request_), list)


@given(st.none() | st.integers(1, 20000), st.none() | st.floats(0.001, 2000), st.none() | st.integers(1, 10000))
def test_buckets_are_bounded_and_even(hidden, link, world):
    elements = reduce_elements(hidden, link, world)
    assert 5_000_000 <= elements <= DEFAULT
    assert elements % 2 == 0


@given(st.integers(64, 16384), st.floats(0.1, 99), st.floats(0.1, 99), st.integers(2, 512))
def test_faster_link_has_no_smaller_bucket(hidden, link, other, world):
    slow, fast = sorted((link, other))
    assert reduce_elements(hidden, slow, world) <= reduce_elements(hidden, fast, world)


def test_options_override_the_preset():
    request = request_of({"stage": 3, "lr": None, "gpu": "A100"}, "gpt2-xl")
    assert (request.stage, request.accumulation, request.gpu) == (3, 32, "A100")
    assert request_of({"lr": 1e-4}).optimizer
    assert request_of({}, "z3") == PRESETS["z3"]


def test_every_field_is_an_option():
    assert {each.field for each in OPTIONS} == set(Request.__dataclass_fields__)


def test_risky_settings_give_notices():
    assert any("watch grad_norm" in each for each in notices(Request(stage=2, overlap=True)))
    assert any("--with-ops" in each for each in notices(Request(offload_optimizer="cpu")))
    assert any("libaio" in each for each in notices(Request(stage=3, offload_optimizer="nvme", nvme_path="/n")))
    assert any("training's arguments" in each for each in notices(Request(micro_batch=4)))
    assert notices(Request()) == []


def test_the_module_is_a_program(tmp_path, capsys):
    file = tmp_path / "ds.json"
    assert main(["--like", "z2", "--stage", "1", "-o", str(file)]) == 0
    assert json.loads(file.read_text()) == make(replace(PRESETS["z2"], stage=1))
    assert main(["--stage", "2"]) == 0
    assert json.loads(capsys.readouterr().out) == make(Request())
    assert main(["--offload-param", "cpu"]) == 2
    assert "try: --stage 3" in capsys.readouterr().err
    assert main(["-o", str(tmp_path / "no" / "file")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_the_module_needs_nothing_but_python():
    argv = [sys.executable, "-S", "-m", "trainer.ds_config", "--stage", "3", "--no-overlap"]
    message = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout
    assert json.loads(message)["zero_optimization"]["overlap_comm"] is False
