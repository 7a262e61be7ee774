"""The options of a training: their names, defaults and help, and the bound of each number beside its default.

``trainer.lm.rules`` has the rules between options, and ``trainer.lm.options`` reads them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Optional, Sequence, Tuple

from trainer.bounds import COUNT, EVERY, RATE, SHARE, Bound
from trainer.lm import families
from trainer.lm.errors import RefusedError

ENGINES = ("plain", "fsdp", "zero0", "zero1", "zero2", "zero3")
CHOICES = {
    "engine": ENGINES,
    "offload": ("none", "optimizer", "all"),
    "dtype": ("auto", "bfloat16", "float16", "float32"),
    "compile": ("auto", "whole", "blocks", "off"),
    "schedule": ("cosine", "linear", "constant", "wsd"),
    "scale_lr": ("none", "linear", "sqrt"),
    "quantize": ("none", "nf4"),
    "optimizer": ("adamw", "adamw-bf16", "adamw8bit", "muon"),
    "fp8": ("off", "auto", "tensorwise", "rowwise"),
    "sampling": ("auto", "with-replacement", "without-replacement"),
    "checkpointing": ("off", "selective", "full"),
    "save_async": ("auto", "on", "off"),
    "device": ("auto", "cpu", "cuda"),
}
MOST_PROFILED = 100  # steps: their trace takes megabytes each
TRAVELS = ("float32", "bfloat16")
SIZES = ("n_layer", "n_head", "n_embd")
PARTS = ("vision", "projector", "language")  # of a vision-language model; any other model is all language
# A resumed training takes these from its own command line: they say where it runs, not what it is.
PATHS = ("data", "eval_data")  # options with several values
OWN = ("out", "resume", "device", "allow_changes", "profile", "profile_steps")

_SIZE = Bound(low=1, high=1 << 20)
_SIZE_OR_0 = Bound(low=0, high=1 << 20)
_STEPS = Bound(low=0, high=1 << 40)
_AVERAGE = Bound(low=0, below=1)
_RATE_OR_SAME = Bound(above=0, high=1e3, also=(-1,))


def _is(default: Any, what: str, bound: Optional[Bound] = None) -> Any:
    return field(default=default, metadata={"help": what, "bound": bound})


@dataclass(frozen=True)
class Config:
    """All options of a training."""

    data: Sequence[str] = _is(
        (),
        "folders written by trainer.lm.prepare or nanoGPT, or files of conversations (Alpaca, ShareGPT or messages; "
        "JSON, JSONL or parquet); each PATH or PATH:WEIGHT",
    )
    eval_data: Sequence[str] = _is((), "conversations that are only evaluated")
    template: str = _is("", "conversations: a Jinja template, or alpaca, chatml or plain (default: the model's own)")
    image_folder: str = _is("", "images: the folder of relative paths (default: the folder of the data)")
    check_images: bool = _is(False, "images: decode each before the training, instead of reading its header only")
    image_threads: int = _is(
        0, "images: threads of a rank that decode them (0: its share of the cores, at most 16)", Bound(low=0, high=1024)
    )
    max_pixels: int = _is(
        768 * 768,
        "images of Qwen2.5-VL: pixels at most, larger ones are shrunk (0: the model's)",
        Bound(low=0, high=1 << 28),
    )
    max_tiles: int = _is(9, "images of LLaVA-OneVision: tiles at most, beside the whole image", Bound(low=1, high=36))
    patches: int = _is(0, "images: patches in a row at most (0: chosen for the data)", Bound(low=0, high=1 << 24))
    val: float = _is(0.0, "conversations: share of each set held back for evaluation", _AVERAGE)
    skip_wrong: bool = _is(False, "conversations: leave out wrong records instead of refusing them")
    workers: int = _is(0, "conversations: processes that encode them (0: one per core)", Bound(low=0, high=1024))
    sampling: str = _is(
        "auto",
        "shards: random places (with-replacement), or each sample once per epoch (without-replacement; auto: if epochs "
        "are given)",
    )
    separate_documents: bool = _is(False, "shards: attention and positions start again after each document")
    out: str = _is("out", "folder of checkpoints and logs")
    init: str = _is("scratch", "scratch, a Hugging Face folder, or a checkpoint whose weights to use")
    vision: str = _is("", "a folder of SigLIP or CLIP: composes a vision-language model with the decoder of --init")
    image_token: str = _is("", "with vision: the token of an image, new or one that no text has (default: <image>)")
    resume: str = _is(
        "", "latest, or a checkpoint: continues with its optimizer, step and options, except options given here"
    )
    allow_changes: bool = _is(False, "allow a resume with a different global batch or other data")

    model: str = _is(
        "custom",
        "a published size (%s), a folder with config.json, or custom: a GPT-2 with n_layer, n_head and n_embd"
        % ", ".join(families.PUBLISHED),
    )
    n_layer: int = _is(12, "layers", _SIZE)
    n_head: int = _is(12, "attention heads", _SIZE)
    n_embd: int = _is(768, "width", _SIZE)
    block_size: int = _is(1024, "tokens per sample", Bound(low=1, high=1 << 24))
    dropout: float = _is(0.0, "fraction of activations to drop", _AVERAGE)

    lora_rank: int = _is(0, "rank of LoRA adapters for the model of --init (0: train all weights)", _SIZE_OR_0)
    lora_alpha: float = _is(0.0, "their factor times the rank (0: twice the rank)", Bound(low=0, high=1e6))
    lora_dropout: float = _is(0.0, "fraction of their inputs to drop", _AVERAGE)
    lora_targets: str = _is("all", "matrices with an adapter, by Hugging Face's names: q_proj,v_proj; or all")
    lora_rslora: bool = _is(False, "divide by the square root of the rank (rsLoRA), not by the rank")
    quantize: str = _is("none", "nf4: the frozen matrices of LoRA in 4 bits (QLoRA); needs bitsandbytes")

    batch_size: int = _is(8, "samples per micro-step on each rank", _SIZE)
    accumulation: int = _is(1, "micro-steps per step", _SIZE)
    global_batch: int = _is(
        0,
        "samples per step on all ranks; sets accumulation (0: follows from accumulation)",
        Bound(low=0, high=1 << 40),
    )
    max_iters: int = _is(1000, "total steps", COUNT)
    epochs: int = _is(0, "passes over the data; sets max_iters (0: max_iters counts)", _STEPS)
    learning_rate: float = _is(3e-4, "highest learning rate", RATE)
    min_lr: float = _is(-1.0, "final learning rate (-1: a tenth of learning_rate)", Bound(low=0, high=1e3, also=(-1,)))
    parts: str = _is("all", "vision-language models: the parts to train: projector, or vision,language; or all")
    vision_lr: float = _is(-1.0, "highest rate of the part vision (-1: learning_rate)", _RATE_OR_SAME)
    projector_lr: float = _is(-1.0, "highest rate of the part projector (-1: learning_rate)", _RATE_OR_SAME)
    scale_lr: str = _is("none", "multiply all rates by the number of ranks (linear), or by its square root (sqrt)")
    schedule: str = _is("cosine", "how the learning rate decays; wsd: not until the last steps, see decay_share")
    warmup_iters: int = _is(0, "steps over which the learning rate rises", _STEPS)
    decay_iters: int = _is(0, "step at which min_lr is reached (0: max_iters)", _STEPS)
    decay_share: float = _is(0.2, "wsd: share of these steps, the last ones, over which the rate falls", SHARE)
    weight_decay: float = _is(0.1, "of AdamW, on matrices only", Bound(low=0, high=1e3))
    beta1: float = _is(0.9, "of AdamW", _AVERAGE)
    beta2: float = _is(0.95, "of AdamW", _AVERAGE)
    epsilon: float = _is(1e-8, "of AdamW", Bound(above=0, high=1))
    optimizer: str = _is(
        "adamw",
        "plain, fsdp: adamw-bf16 and adamw8bit keep AdamW's averages in 16 and 8 bits; "
        "plain: muon for the layers' matrices, AdamW for the rest",
    )
    grad_clip: float = _is(1.0, "largest gradient norm (0: no limit)", Bound(low=0, high=1e9))

    eval_interval: int = _is(100, "steps between evaluations (0: none)", EVERY)
    eval_iters: int = _is(20, "batches per evaluation, on all ranks together", COUNT)
    patience: int = _is(0, "stop after this many evaluations without a lower loss (0: never)", _STEPS)
    save_interval: int = _is(0, "steps between checkpoints (0: at each evaluation)", EVERY)
    save: bool = _is(True, "write checkpoints; false to only measure the speed")
    save_async: str = _is("auto", "write checkpoints during the next steps, from a copy in host memory (auto: on GPUs)")
    always_save: bool = _is(True, "save also when the loss is not the lowest")
    keep: int = _is(2, "newest checkpoints to keep, beside the best (0: all)", _STEPS)

    engine: str = _is(
        "plain", "plain: torch with a sharded optimizer; fsdp: torch, all sharded; zeroN: DeepSpeed, stage N"
    )
    offload: str = _is("none", "DeepSpeed and fsdp: what to keep in host memory")
    coalesce: bool = _is(
        False, "zero2, zero3, fsdp: reduce gradients once per step; needs 2 more bytes per parameter, fsdp 4"
    )
    deepspeed_config: str = _is("", "a DeepSpeed configuration; its other keys are used")
    dtype: str = _is(
        "auto", "data type of the computation (auto: bfloat16 from Ampere on, else float16; float32 on CPUs)"
    )
    compile: str = _is(
        "auto",
        "torch.compile of the loss, of each block, or off (auto: on GPUs blocks, whole for GPT-2 except with fsdp; "
        "off with zero3)",
    )
    checkpointing: str = _is(
        "off",
        "recompute activations in the backward pass; selective: all but products, a few percent slower; "
        "full: the least memory, a third slower",
    )
    fp8: str = _is(
        "off", "plain, fsdp: fp8 where it is faster, with one recipe of torchao or the best (auto); Ada or Hopper"
    )
    reduce_dtype: str = field(
        default="float32",
        metadata={"help": "plain, fsdp: data type of sent gradients; bfloat16 halves the bytes", "choices": TRAVELS},
    )
    device: str = _is("auto", "where to compute")

    seed: int = _is(1337, "for weights, samples and dropout", Bound(low=0, high=(1 << 63) - 1))
    log_interval: int = _is(1, "steps between log lines", COUNT)
    profile: bool = _is(False, "write a trace of some steps to OUT/profile, and the slowest operations to the log")
    profile_steps: str = _is("4:6", "which steps, counted from the start of this command, as FIRST:LAST")
    trackers: str = _is("auto", "tensorboard,wandb, none, or auto: all that are installed; wandb is always offline")


def steps_to_profile(text: str) -> Optional[Tuple[int, int]]:
    """Return the first and the last step of ``FIRST:LAST``, or None if it is not valid."""
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    return (first, last) if 1 <= first <= last < first + MOST_PROFILED else None


def trained_parts(text: str) -> Tuple[str, ...]:
    """Return the parts that ``--parts`` names, or none if it is not valid."""
    if text == "all":
        return PARTS
    named = text.split(",")
    return tuple(named) if set(named) <= set(PARTS) and len(set(named)) == len(named) else ()


def accumulation(config: Config, world: int) -> int:
    """Return the number of micro-steps per step on each of ``world`` ranks.

    Raises:
        RefusedError: the global batch is not divisible, or contradicts the accumulation.
    """
    if not config.global_batch:
        return config.accumulation
    each = config.batch_size * world
    if config.accumulation not in (1, config.global_batch // each):
        what = "--accumulation %d: --global-batch %d is --batch-size %d x %d ranks x %g micro-steps"
        sizes = (config.accumulation, config.global_batch, config.batch_size, world, config.global_batch / each)
        raise RefusedError(what % sizes, "remove --accumulation, or use --global-batch 0")
    if config.global_batch % each or config.global_batch < each:
        lower = max(each, config.global_batch // each * each)
        raise RefusedError(
            "--global-batch %d is not divisible by --batch-size %d x %d ranks"
            % (config.global_batch, config.batch_size, world),
            "--global-batch %d or %d" % (lower, lower + each),
        )
    return config.global_batch // each
