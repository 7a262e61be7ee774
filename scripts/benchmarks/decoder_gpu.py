"""Forward and backward pass of a decoder on one GPU, ours beside transformers': a line of JSON for each way.

    scripts/benchmarks/decoder_gpu.py [WAY...] [--shape llama-3-8b] [--tokens 8192] [--batch 1]

Ways: ``ours``, ``ours-fp8`` (each size measured), ``ours-tensorwise``, ``ours-rowwise``, ``eager`` (transformers with
sdpa), ``liger``, ``compiled`` (transformers compiled layer by layer, loss in pieces), ``compiled-tensorwise``,
``compiled-rowwise``. Weights and gradients are bf16; there is no optimizer. Each way runs in its own process.
"""

# ruff: noqa: PLC0415 - a way imports only what it measures
from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

WAYS = (
    "ours", "ours-fp8", "ours-tensorwise", "ours-rowwise", "eager", "liger", "compiled", "compiled-tensorwise",
    "compiled-rowwise",
)  # fmt: skip
WARM, STEPS = 4, 8


def ours(way: str, shape: Any, tokens: int) -> tuple[Any, Callable[..., Any], dict[str, Any]]:
    import torch

    from trainer.lm import fp8
    from trainer.lm.loss import loss_and_gradient
    from trainer.lm.model import Decoder

    device = torch.device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = Decoder(replace(shape, block_size=tokens))
    torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else parameter.data.fill_(1)
    recipe = {"ours-fp8": "auto"}.get(way, way.partition("-")[2])
    notes: dict[str, Any] = {}
    if recipe == "auto":
        choices = fp8.convert(model, recipe, tokens, device)
        notes["fp8"] = [fp8.described(choice) for choice in choices]
    elif recipe:
        fp8._replace(model, {n for n, m in model.named_modules() if n.startswith("layers.")}, recipe)
    for layer in model.layers:
        layer.compile()
    model.pieces = torch.compile(loss_and_gradient)
    return model, lambda x: model(x, x), notes


def theirs(way: str, shape: Any, tokens: int) -> tuple[Any, Callable[..., Any], dict[str, Any]]:
    import torch
    import torch.nn.functional as F  # noqa: N812 - the usual name
    import torch.utils.checkpoint
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainer.lm import families

    described = {**families.config_of(replace(shape, block_size=tokens)), "use_cache": False}
    family = described.pop("model_type")
    described.pop("architectures")
    if "liger" in way:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    config = AutoConfig.for_model(family, **described)
    config._attn_implementation = "sdpa"  # noqa: SLF001 - there is no other way
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    model.train()
    if not way.startswith("compiled"):
        return model, lambda x: model(input_ids=x, labels=x).loss, {}
    recipe = way.partition("-")[2]
    if recipe:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model,
            config=Float8LinearConfig.from_recipe_name(recipe),
            module_filter_fn=lambda _, name: "lm_head" not in name,
        )
    for layer in model.model.layers:
        layer.compile()
    weight = model.lm_head.weight

    def part(hidden: Any, targets: Any) -> Any:
        return F.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")

    def pieces(hidden: Any, targets: Any) -> Any:
        total = 0
        for each, following in zip(hidden.chunk(8), targets.chunk(8), strict=True):
            total = total + torch.utils.checkpoint.checkpoint(part, each, following, use_reentrant=False)
        return total / targets.numel()

    lossy = torch.compile(pieces)
    return model, lambda x: lossy(model.model(x).last_hidden_state.flatten(0, 1), x.flatten()), {}


def measure(way: str, name: str, tokens: int, batch: int) -> dict[str, Any]:
    import torch

    from trainer.lm import families
    from trainer.lm.log import peak
    from trainer.lm.model import fastest_attention, flops_per_token

    torch.manual_seed(0)
    shape = families.PUBLISHED[name]
    model, loss_of, notes = (ours if way.startswith("ours") else theirs)(way, shape, tokens)
    x = torch.randint(0, shape.vocab_size, (batch, tokens), device="cuda")
    own = way.startswith("ours")

    def step() -> Any:
        with fastest_attention(x.device) if own else torch.enable_grad():
            loss = loss_of(x)
            loss.backward()
        model.zero_grad(set_to_none=True)
        return loss

    for _ in range(WARM):
        loss = step()
    torch.cuda.reset_peak_memory_stats()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(STEPS):
        step()
    end.record()
    end.synchronize()
    ms = begin.elapsed_time(end) / STEPS
    speed = batch * tokens / ms * 1e3
    flops = flops_per_token(shape, tokens) * speed
    most = peak(torch.device("cuda"))
    return {
        "way": way, "model": name, "batch": batch, "tokens": tokens, "ms": round(ms, 1), "tokens_s": round(speed),
        "mfu": round(flops / most, 4) if most else None, "gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        "loss": round(float(loss), 4), "gpu": torch.cuda.get_device_name(), **notes,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ways", nargs="*", choices=WAYS, default=[], metavar="WAY")
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--limit", type=float, default=150, help="seconds for each way")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        sys.stdout.write(json.dumps(measure(given.ways[0], given.shape, given.tokens, given.batch)) + "\n")
        return
    for way in given.ways or WAYS:
        argv = [sys.executable, __file__, way, "--here", "--shape", given.shape]
        argv += ["--tokens", str(given.tokens), "--batch", str(given.batch)]
        try:
            run = subprocess.run(argv, capture_output=True, text=True, timeout=given.limit, check=False)
        except subprocess.TimeoutExpired:
            sys.stdout.write(json.dumps({"way": way, "failed": f"more than {given.limit:g} s"}) + "\n")
            continue
        rows = [line for line in run.stdout.splitlines() if line.startswith("{")]
        problem = (run.stderr.strip().splitlines() or ["no output"])[-1][:400]
        sys.stdout.write((rows[-1] if rows else json.dumps({"way": way, "failed": problem})) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
