"""Tries every option that the plan has for a training on the GPUs of this machine, and compares it with the plan.

    python scripts/benchmarks/plan_gpu.py MODEL [--for own] [--seq 1024] [--global-batch 32]
        [--places 0123c] [--batches 4,8] [--overlap] [--seconds 540]

Wants torch, DeepSpeed and, for models that are not trainer.lm's (--for own), transformers. Models begin with random
weights and train on random tokens, in bf16, uncompiled. A JSON line for each option: a point of
trainer/plan/measured.json; the last line says what the plan would have taken, and what was fastest. --places: stages,
and c for those with Adam or everything on the CPU (nvme is not tried).

An option is one optimizer step of the whole global batch, behind a pass and a step that warm up. Memory is
torch.cuda.max_memory_allocated of rank 0 in that step. The options of a stage share processes and an engine, which
do not affect each other: only the batch and checkpointing change. Each stage runs in new processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(HERE))

from trainer.ds_config import find, make  # noqa: E402 - the checkout is not installed here
from trainer.lm import model, ranks  # noqa: E402
from trainer.plan import MODELS, Cluster, Setup, Shape, Training, accumulation  # noqa: E402
from trainer.plan.inputs import GIB  # noqa: E402
from trainer.plan.output import request  # noqa: E402
from trainer.plan.search import PLACES, Option, all_of, pick, survey  # noqa: E402

TRIED = [place for place in PLACES if "nvme" not in place]
KEYS = ("stage", "optimizer_at", "parameters_at", "checkpointing", "micro_batch")
GIVES_UP = 1.1  # times a GPU's memory: what is predicted to need more is not tried


def wish(given: argparse.Namespace) -> tuple[Training, Cluster]:
    """What is planned: the machine as it is."""
    shape = MODELS[given.model]
    if given.program == "own":
        shape = replace(shape, vocab=-(-shape.vocab // model.PAD) * model.PAD)  # as trainer.lm pads it
    training = Training(shape, "pretrain", given.seq, given.global_batch, given.program)
    count = int(os.environ.get("GPUS", torch.cuda.device_count()))
    card = find(torch.cuda.get_device_name() if torch.cuda.is_available() else "H100")  # to try it without a GPU
    return training, Cluster(1, count, card, card.memory)


def options(given: argparse.Namespace, training: Training, cluster: Cluster) -> dict[int, list[Option]]:
    """The options of each place, those first that need least."""
    found: dict[int, list[Option]] = {}
    for number, place in enumerate(TRIED):
        if ("c" if "cpu" in place else str(place[0])) not in given.places:
            continue
        tried = [
            each
            for each in all_of(training, cluster, place, overlap=given.overlap)
            if not given.batches or str(each.setup.micro_batch) in given.batches.split(",")
            if each.memory.total < GIVES_UP * cluster.memory * GIB
        ]
        found[number] = sorted(tried, key=lambda each: each.memory.total)
    return found


def config(training: Training, cluster: Cluster, setup: Setup) -> dict[str, Any]:
    """DeepSpeed's, as the plan writes it, with all that transformers' Trainer would fill in."""
    asked = request(replace(training, program="own"), cluster, setup)
    return make(replace(asked, steps_per_print=10**9))


class Model:
    """A model with random weights on a device, whose checkpointing can be switched."""

    def __init__(self, training: Training, device: torch.device) -> None:
        self.is_own = training.program == "own"
        with device:
            self.module = _own(training.shape) if self.is_own else _theirs(training.shape)
        if self.is_own:
            self.module.start(1)
        self.module.train()

    def checkpoint(self, *, is_on: bool) -> None:
        if self.is_own:
            self.module.checkpointing = is_on
        elif is_on:
            self.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.module.gradient_checkpointing_disable()

    def loss(self, engine: Any, tokens: torch.Tensor) -> torch.Tensor:
        if self.is_own:
            return engine(tokens, tokens)
        return engine(input_ids=tokens, labels=tokens, use_cache=False).loss


def _own(shape: Shape) -> Any:
    return model.Decoder(model.Shape(shape.layers, shape.heads, shape.hidden, shape.context, shape.vocab))


def _theirs(shape: Shape) -> Any:
    import transformers  # noqa: PLC0415 - the lean GPT needs none

    if shape.family == "gpt2":
        raise SystemExit("plan_gpu: GPT-2 is measured with --for own")
    kind = "Qwen2" if shape.qkv_bias else "Llama"
    made = getattr(transformers, f"{kind}Config")(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.context,
        tie_word_embeddings=shape.tied,
        attn_implementation="sdpa",
    )
    return getattr(transformers, f"{kind}ForCausalLM")(made)


def adam(parameters: Any, setup: Setup) -> Any:
    if setup.optimizer_at == "gpu":
        return torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: PLC0415 - it is compiled

    return DeepSpeedCPUAdam(parameters, lr=1e-5)


def measure(engine: Any, trained: Model, training: Training, passes: int, setup: Setup, world: ranks.Ranks) -> Any:
    """What one option adds to what it is."""
    on_gpu = world.device.type == "cuda"
    trained.checkpoint(is_on=setup.checkpointing)
    tokens = torch.randint(0, training.shape.vocab, (setup.micro_batch, training.seq), device=world.device)
    times = []
    for count in (1, passes, passes):
        # What DeepSpeed itself received at its start; set_train_batch_size does not reach its optimizers.
        engine._config.gradient_accumulation_steps = count  # noqa: SLF001
        engine._config.train_micro_batch_size_per_gpu = setup.micro_batch  # noqa: SLF001
        engine.micro_steps = 0
        if hasattr(engine.optimizer, "gradient_accumulation_steps"):
            engine.optimizer.gradient_accumulation_steps = passes
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.monotonic()
        for _ in range(count):
            engine.backward(trained.loss(engine, tokens))
            engine.step()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.monotonic() - started)
    seconds = min(times[1:])
    figures = {"micro_ms": round(seconds / passes * 1e3, 1), "tokens_per_second": round(training.tokens / seconds)}
    if on_gpu:
        figures["allocated_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return figures


def point(training: Training, cluster: Cluster, option: Option) -> dict[str, Any]:
    """An option as measured.json writes it, with what the plan says of it."""
    setup = asdict(option.setup)
    result = {"model": training.shape.name, "program": training.program, "vocab": training.shape.vocab}
    result.update(seq=training.seq, gpu=cluster.gpu.name, gpus=cluster.world, precision="bf16", half_loss=False)
    names = ("stage", "optimizer_at", "parameters_at", "checkpointing", "micro_batch", "overlap", "bucket")
    result.update({name: setup[name] for name in names})
    result["accumulation"] = accumulation(training, cluster, option.setup)
    result["plan"] = {"tokens_per_second": round(option.speed.tokens), "gb": round(option.memory.allocated / 1e9, 2)}
    return result


def rank(given: argparse.Namespace) -> None:
    """One process of one place: all its options."""
    import deepspeed  # noqa: PLC0415 - the process that starts the others needs none

    world = ranks.join("auto")
    training, cluster = wish(given)
    tried = options(given, training, cluster)[given.place]
    trained = Model(training, world.device)
    first = tried[0].setup
    settings = config(training, cluster, first)
    engine, *_ = deepspeed.initialize(
        model=trained.module,
        optimizer=adam(trained.module.parameters(), first),
        config=settings,
        dist_init_required=False,
    )
    for option in tried:
        if time.time() > given.until:
            break
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
        result = point(training, cluster, option)
        try:
            result.update(measure(engine, trained, training, result["accumulation"], option.setup, world))
        except torch.cuda.OutOfMemoryError:
            result["failed"] = "out of memory"  # all that follow need more; this engine is in the middle of a pass
        if world.is_first:
            print(json.dumps(result), flush=True)
        if "failed" in result:
            break
    os._exit(0)  # nothing is left to do, and NCCL may wait for a rank that has exited


def compare(training: Training, cluster: Cluster, found: list[dict[str, Any]], *, overlap: bool) -> dict[str, Any]:
    """The plan's pick against what was fastest."""
    best = pick(survey(training, cluster, overlap=overlap))
    fastest = max(found, key=lambda each: each.get("tokens_per_second", 0))
    result: dict[str, Any] = {"name": "pick against search", "options": len(found), "fastest": fastest}
    for each in found:
        if best is not None and all(each[name] == getattr(best.setup, name) for name in KEYS):
            result.update(pick=each, share=round(each.get("tokens_per_second", 0) / fastest["tokens_per_second"], 4))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--for", dest="program", choices=("trainer", "own"), default="trainer")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--places", default="0123c")
    parser.add_argument("--batches", default="")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--place", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.place is not None:
        rank(given)
        return
    until = time.time() + given.seconds
    training, cluster = wish(given)
    if not cluster.world:
        sys.exit("plan_gpu: torch sees no GPU here")
    found: list[dict[str, Any]] = []
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cluster.world)]
    for place in options(given, training, cluster):
        if time.time() > until:
            break
        argv = [*torchrun, __file__, *sys.argv[1:], "--place", str(place), "--until", str(until)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                if line.startswith("{"):
                    found.append(json.loads(line))
                    print(line, end="", flush=True)
        if process.returncode:
            sys.exit(f"plan_gpu: ZeRO-{TRIED[place][0]} ended with exit code {process.returncode}")
    if found:
        print(json.dumps(compare(training, cluster, found, overlap=given.overlap)), flush=True)


if __name__ == "__main__":
    main()
