"""Well-known configurations as requests. ``--like NAME`` starts from one of them.

The first five have the values of LLaMA-Factory's ``examples/deepspeed`` (0.9.5). The others come from guides for a
LLaMA-7B, for 13B and 70B models and for a GPT-2 XL.
"""

from __future__ import annotations

from typing import Dict

from trainer.ds_config.request import Request

_FACTORY = 500_000_000  # elements of LLaMA-Factory's buckets in stages 0 to 2

PRESETS: Dict[str, Request] = {
    "z0": Request(stage=0, reduce_bucket=_FACTORY, overlap=False, round_robin=True),
    "z2": Request(stage=2, reduce_bucket=_FACTORY, overlap=False, round_robin=True),
    "z2-offload": Request(stage=2, reduce_bucket=_FACTORY, overlap=False, round_robin=True, offload_optimizer="cpu"),
    "z3": Request(stage=3, overlap=False),
    "z3-offload": Request(stage=3, overlap=False, offload_optimizer="cpu", offload_param="cpu"),
    "llama-7b": Request(
        stage=3,
        precision="fp16",
        offload_optimizer="cpu",
        offload_param="cpu",
        overlap=True,
        optimizer=True,
        lr=2e-5,
        weight_decay=0.0,
        schedule="WarmupDecayLR",
        warmup=1000,
        clip=1.0,
        steps_per_print=50,
    ),
    "13b": Request(
        stage=2,
        precision="bf16",
        offload_optimizer="cpu",
        overlap=True,
        reduce_bucket=200_000_000,
        round_robin=False,
    ),
    "70b": Request(stage=3, precision="bf16", offload_optimizer="cpu", offload_param="cpu", overlap=True),
    "gpt2-xl": Request(stage=2, target="own", precision="fp16", micro_batch=1, accumulation=32, clip=1.0, overlap=True),
}
