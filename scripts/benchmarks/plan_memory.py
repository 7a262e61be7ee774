"""Measures what the plan predicts, memory and speed of ZeRO: a point of trainer/plan/measured.json a line.

    python scripts/benchmarks/plan_memory.py [SECONDS]

Wants torch and DeepSpeed, and uses all GPUs of the machine. Trains GPT-2 medium, large and XL of trainer/gpt on random
tokens for a few steps, in bf16, in stages 0 to 3, with and without checkpointing, until SECONDS (600) are over. Every
point has processes of its own: DeepSpeed's stage 3 gives nothing back. Memory is torch.cuda.max_memory_allocated of
rank 0 over whole steps; times are medians.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(HERE))

from trainer.gpt import ranks  # noqa: E402 - the checkout is not installed here
from trainer.gpt.config import MODELS  # noqa: E402
from trainer.gpt.model import GPT, Shape  # noqa: E402

BLOCK = 1024
VOCABULARY = 50304
BUCKET = 200_000_000
ACCUMULATION = 2
STEPS = 4
CASES = [
    (model, batch, stage, checkpointing)
    for checkpointing in (False, True)
    for model, batch in (("gpt2-medium", 8), ("gpt2-large", 8), ("gpt2-xl", 4))
    for stage in (2, 3, 1, 0)
]


def measure(model: str, batch: int, stage: int, checkpointing: bool, world: ranks.Ranks) -> dict[str, object]:
    """What one point adds to what it is."""
    import deepspeed  # noqa: PLC0415 - the process that starts the others needs none

    device = world.device
    shape = Shape(*MODELS[model], BLOCK, VOCABULARY)
    with device:
        gpt = GPT(shape, checkpointing=checkpointing)
        gpt.start(1)
    zero: dict[str, object] = {"stage": stage, "contiguous_gradients": True, "overlap_comm": True}
    zero.update(reduce_bucket_size=BUCKET, allgather_bucket_size=BUCKET)
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-5, fused=True)
    engine, *_ = deepspeed.initialize(model=gpt, optimizer=optimizer, config=config, dist_init_required=False)
    tokens = torch.randint(0, VOCABULARY, (batch, BLOCK + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    times = []
    for step in range(STEPS):
        if step == 1:  # the first one also makes the optimizer's states
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.monotonic()
        for _ in range(ACCUMULATION):
            engine.backward(engine(inputs, targets))
            engine.step()
        torch.cuda.synchronize()
        times.append(time.monotonic() - began)
    seconds = statistics.median(times[1:])
    allocated = torch.cuda.max_memory_allocated()
    return {
        "micro_ms": round(seconds / ACCUMULATION * 1e3, 1),
        "tokens_per_second": round(world.world * batch * ACCUMULATION * BLOCK / seconds),
        "allocated_gb": round(allocated / 1e9, 2),
    }


def rank(number: int) -> None:
    """One process of one point."""
    world = ranks.join("cuda")
    model, batch, stage, checkpointing = CASES[number]
    said = measure(model, batch, stage, checkpointing, world)
    card = torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0]
    point = {"model": model, "vocab": VOCABULARY, "seq": BLOCK, "gpu": card, "gpus": world.world, "stage": stage}
    point.update(precision="bf16", micro_batch=batch, accumulation=ACCUMULATION, checkpointing=checkpointing)
    point.update(half_loss=False, overlap=True, bucket=BUCKET, **said)
    name = f"{model}, ZeRO-{stage} bf16, batch {batch} x {ACCUMULATION}" + ", checkpointing" * checkpointing
    if world.is_first:
        print(json.dumps({"name": name, **point}), flush=True)
    ranks.leave()


def main() -> None:
    if "RANK" in os.environ:
        rank(int(sys.argv[1]))
        return
    until = time.monotonic() + float(sys.argv[1] if len(sys.argv) > 1 else 600)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "gpu", __file__]
    for number in range(len(CASES)):
        if time.monotonic() > until:
            break
        subprocess.run([*torchrun, str(number)], check=True)


if __name__ == "__main__":
    main()
