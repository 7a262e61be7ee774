"""DeepSpeed itself loads every configuration that we write, and takes an optimizer step with it; on a CPU."""

import json
import math
import os
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.ds_config import PRESETS, Request, autos, make

PROGRAM = Path(__file__).with_name("ds_steps.py")
OWN = Request(target="own", precision="bf16", micro_batch=2, accumulation=2)
SCHEDULED = replace(OWN, optimizer=True, lr=1e-3, warmup=2, steps=10)
REQUESTS = {
    **{f"stage {stage}": replace(OWN, stage=stage) for stage in range(4)},
    **{f"stage {stage}, Adam on the CPU": replace(OWN, stage=stage, offload_optimizer="cpu") for stage in (1, 2, 3)},
    "stage 3, all on the CPU": replace(OWN, stage=3, offload_optimizer="cpu", offload_param="cpu"),
    "stage 3, parameters on the CPU": replace(OWN, stage=3, offload_param="cpu"),
    "not pinned": replace(OWN, offload_optimizer="cpu", pin_memory=False),
    "overlap": replace(OWN, overlap=True),
    "round robin": replace(OWN, round_robin=True),
    "no overlap in stage 3": replace(OWN, stage=3, overlap=False),
    "fp16": replace(OWN, precision="fp16"),
    "fp32": replace(OWN, precision="fp32"),
    "buckets by the link": replace(OWN, hidden=1600, link=25.0, world=16),
    "stage 3 of a known size": replace(OWN, stage=3, hidden=64, link=25.0, world=16),
    "DeepSpeed's optimizer": replace(OWN, optimizer=True, lr=1e-3, weight_decay=0.1),
    **{kind: replace(SCHEDULED, schedule=kind) for kind in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")},
    "gpt2-xl": PRESETS["gpt2-xl"],
}
FILLED_IN = {name: request for name, request in PRESETS.items() if request.target == "trainer"}


@pytest.fixture(scope="module")
def steps(lab_env, tmp_path_factory):
    """Runs configurations one after the other in one process: by name, what became of each."""

    def run(how, configs):
        folder = tmp_path_factory.mktemp("ds")
        (folder / "configs.json").write_text(json.dumps(configs))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        env = {
            **os.environ, "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1", "TORCH_EXTENSIONS_DIR": str(folder / "extensions"), "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        argv = [lab_env / "bin/python", PROGRAM, how, folder / "configs.json"]
        done = subprocess.run(argv, env=env, cwd=folder, capture_output=True, text=True, check=False, timeout=280)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        lines = [json.loads(row[5:]) for row in done.stdout.splitlines() if row.startswith("STEP ")]
        return {line["name"]: line for line in lines}

    return run


def test_every_configuration_of_a_script_takes_a_step(steps):
    configs = {name: make(request) for name, request in REQUESTS.items()}
    assert not any(autos(config) for config in configs.values())
    done = steps("own", configs)
    assert list(done) == list(configs)
    for name, line in done.items():
        assert line["step"] == 1, name
        before, after = line["loss"]
        if name.startswith("Warmup"):  # whose first rate is nothing
            assert after <= before, name
        else:
            assert after < before, name
    # The stage and where things lie change nothing about the arithmetic. Stage 0 is another matter: its 16-bit
    # optimizer makes Adam's states by a step with gradients of zero (runtime/fp16/unfused_optimizer.py), which counts.
    losses = {name: line["loss"] for name, line in done.items() if name.startswith("stage")}
    begun, late = losses.pop("stage 0")
    for before, after in losses.values():
        assert before == pytest.approx(begun)
        assert after == pytest.approx(losses["stage 1"][1], rel=1e-3)
        assert after < 0.9 * late


def test_nvme_options_are_read_by_deepspeed(steps):
    """A step would need libaio and a file system that it can work on; reading shows that the keys are DeepSpeed's."""
    both = replace(OWN, stage=3, offload_optimizer="nvme", offload_param="nvme", nvme_path="/scratch")
    one = replace(OWN, stage=3, offload_optimizer="nvme", nvme_path="/scratch")
    done = steps("load", {"both": make(both), "one": make(one)})
    assert [line["used"]["devices"] for line in done.values()] == [["nvme", "nvme"], ["nvme"]]
    for line in done.values():
        assert line["step"] == 3
        assert line["used"]["aio"]["block_size"] == 1 << 20
        assert line["used"]["aio"]["queue_depth"] == 8


def test_the_trainer_fills_in_every_auto_and_takes_a_step(steps):
    done = steps("trainer", {name: make(request) for name, request in FILLED_IN.items()})
    assert list(done) == list(FILLED_IN)
    for name, line in done.items():
        assert line["step"] == 1, name
        assert all(map(math.isfinite, line["loss"])), name
        assert line["used"], name
        assert autos(line["used"]) == [], name
