"""The options of a training: defaults, a file (``--config``, YAML or JSON), and ``--key value``, the latter first."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from trainer.gpt.errors import RefusedError

ENGINES = ("plain", "zero0", "zero1", "zero2", "zero3")
CHOICES = {
    "model": ("custom", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
    "engine": ENGINES,
    "offload": ("none", "optimizer", "all"),
    "dtype": ("auto", "bfloat16", "float16", "float32"),
    "compile": ("auto", "whole", "blocks", "off"),
    "schedule": ("cosine", "linear", "constant"),
    "device": ("auto", "cpu", "cuda"),
}
COUNTS = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "accumulation", "max_iters", "log_interval")
TRAVELS = ("float32", "bfloat16")
# Layers, heads, width: GPT-2's published sizes (https://huggingface.co/openai-community, config.json of each).
MODELS = {"gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024), "gpt2-large": (36, 20, 1280), "gpt2-xl": (48, 25, 1600)}


def _is(default: Any, what: str) -> Any:
    return field(default=default, metadata={"help": what})


@dataclass(frozen=True)
class Config:
    """Everything that a training can be told."""

    data: Sequence[str] = _is((), "folders that trainer.gpt.prepare (or nanoGPT) wrote, each DIR or DIR:WEIGHT")
    out: str = _is("out", "folder of checkpoints and logs")
    init: str = _is("scratch", "scratch, a Hugging Face GPT-2 folder, or a checkpoint to take the weights of")
    resume: str = _is("", "latest, or a checkpoint: go on with its optimizer, at its step")

    model: str = _is("custom", "a published size, or custom: n_layer, n_head and n_embd")
    n_layer: int = _is(12, "layers")
    n_head: int = _is(12, "attention heads")
    n_embd: int = _is(768, "width")
    block_size: int = _is(1024, "tokens of a sample")
    dropout: float = _is(0.0, "share of activations that are dropped")

    batch_size: int = _is(8, "samples of a micro-step on each rank")
    accumulation: int = _is(1, "micro-steps of a step")
    global_batch: int = _is(0, "samples of a step on all ranks; accumulation follows from it (0: from accumulation)")
    max_iters: int = _is(1000, "steps in all")
    learning_rate: float = _is(3e-4, "highest learning rate")
    min_lr: float = _is(-1.0, "learning rate at the end (-1: a tenth of the highest)")
    schedule: str = _is("cosine", "how the learning rate falls")
    warmup_iters: int = _is(0, "steps in which it rises")
    decay_iters: int = _is(0, "step at which min_lr is reached (0: max_iters)")
    weight_decay: float = _is(0.1, "AdamW's, on matrices only")
    beta1: float = _is(0.9, "AdamW's")
    beta2: float = _is(0.95, "AdamW's")
    epsilon: float = _is(1e-8, "AdamW's")
    grad_clip: float = _is(1.0, "largest norm of the gradient (0: any)")

    eval_interval: int = _is(100, "steps between evaluations (0: none)")
    eval_iters: int = _is(20, "batches of an evaluation, of all ranks together")
    patience: int = _is(0, "evaluations without a better loss until it stops early (0: never)")
    save_interval: int = _is(0, "steps between checkpoints (0: at each evaluation)")
    save: bool = _is(True, "write checkpoints; false for a trial of the speed")
    always_save: bool = _is(True, "also when the evaluation was not better")
    keep: int = _is(2, "checkpoints that are kept beside the best (0: all)")

    engine: str = _is("plain", "plain: torch with a sharded optimizer; zeroN: DeepSpeed, stage N")
    offload: str = _is("none", "DeepSpeed: what lies in the memory of the host")
    coalesce: bool = _is(False, "zero2, zero3: reduce gradients once a step; 2 bytes a parameter more until then")
    deepspeed_config: str = _is("", "a DeepSpeed file whose other keys are taken over")
    dtype: str = _is("auto", "what is computed in (auto: bfloat16 from Ampere on, else float16; float32 on CPUs)")
    compile: str = _is("auto", "torch.compile of the loss, of each block, or off (auto: whole on GPUs, not with zero3)")
    checkpointing: bool = _is(False, "recompute activations in the backward pass: less memory, a third more time")
    reduce_dtype: str = field(
        default="float32",
        metadata={"help": "plain: what gradients travel in; bfloat16 halves the bytes", "choices": TRAVELS},
    )
    device: str = _is("auto", "where to compute")

    seed: int = _is(1337, "of weights, samples and dropout")
    log_interval: int = _is(1, "steps between lines of the log")
    trackers: str = _is("auto", "tensorboard,wandb, none, or auto: those that are installed; wandb is always offline")


def from_arguments(argv: Optional[List[str]] = None) -> Config:
    """The options of a command line.

    Raises:
        RefusedError: an option, a key of the file or a value that there is not.
    """
    parser = argparse.ArgumentParser(prog="python -m trainer.gpt", description="Train a GPT-2 model.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="options as YAML or JSON; those given here win")
    for each in dataclasses.fields(Config):
        name = "--" + each.name.replace("_", "-")
        told = "%s (%s)" % (each.metadata["help"], "required" if each.name == "data" else each.default)
        told = told.replace("%", "%%")
        common: Dict[str, Any] = {"dest": each.name, "default": argparse.SUPPRESS, "help": told}
        if each.name == "data":
            parser.add_argument(name, nargs="+", metavar="DIR", **common)
        elif isinstance(each.default, bool):
            parser.add_argument(name, type=_flag, nargs="?", const=True, metavar="true|false", **common)
        else:
            kind = type(each.default)
            choices = _choices(each)
            parser.add_argument(name, type=kind, choices=choices, metavar=None if choices else kind.__name__, **common)
    parser.allow_abbrev = False
    given = vars(parser.parse_args(argv))
    path = given.pop("config", None)
    values = dict(_from_file(path)) if path else {}
    values.update(given)
    return check(Config(**values))


def _choices(each: Any) -> Any:
    return each.metadata.get("choices") or CHOICES.get(each.name)


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError("true or false, not %r" % text)
    return text.lower() == "true"


def _from_file(path: Path) -> Dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RefusedError("%s: %s" % (path, error.strerror), "--config names a file of options") from error
    try:
        if path.suffix == ".json":
            said = json.loads(text)
        else:
            import yaml  # noqa: PLC0415 - JSON needs no library

            said = yaml.safe_load(text)
    except ImportError as error:
        raise RefusedError("%s: there is no PyYAML here" % path, "write it as JSON, in a file *.json") from error
    except Exception as error:
        raise RefusedError("%s cannot be read: %s" % (path, str(error).replace("\n", " "))) from error
    if not isinstance(said, dict):
        raise RefusedError("%s: not a list of options" % path, "lines such as max_iters: 1000")
    return {key: _value(path, key, value) for key, value in said.items()}


def _value(path: Path, key: str, value: Any) -> Any:
    fields = {each.name: each for each in dataclasses.fields(Config)}
    if key not in fields:
        near = difflib.get_close_matches(str(key), fields, 1)
        raise RefusedError("%s: there is no option %s" % (path, key), "did you mean %s?" % near[0] if near else "")
    default = fields[key].default
    if key == "data":
        return [value] if isinstance(value, str) else list(value)
    if isinstance(default, float) and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)  # YAML takes 3e-4 for a word
        except ValueError:
            value = str(value)
    if type(value) is not type(default):
        raise RefusedError("%s: %s: %r is no %s" % (path, key, value, type(default).__name__))
    choices = _choices(fields[key])
    if choices and value not in choices:
        raise RefusedError("%s: %s: %r is none of %s" % (path, key, value, ", ".join(choices)))
    return value


def check(config: Config) -> Config:  # noqa: C901 - one rule after the other
    """The same options, with what follows from others filled in.

    Raises:
        RefusedError: values that mean nothing.
    """
    if not config.data:
        raise RefusedError("no data", "python -m trainer.gpt.prepare TEXT --out DIR, then --data DIR")
    for name in COUNTS:
        if getattr(config, name) < 1:
            raise RefusedError("--%s %s: at least 1" % (name.replace("_", "-"), getattr(config, name)))
    if config.eval_interval and config.eval_iters < 1:
        raise RefusedError("--eval-iters %d: at least 1" % config.eval_iters, "--eval-interval 0 for no evaluations")
    if config.offload != "none" and config.engine == "plain":
        raise RefusedError("--offload %s needs DeepSpeed" % config.offload, "--engine zero2, or zero3 for parameters")
    if config.offload == "all" and config.engine != "zero3":
        raise RefusedError("--offload all: only ZeRO-3 shards parameters", "--engine zero3, or --offload optimizer")
    if config.offload == "optimizer" and config.engine == "zero0":
        raise RefusedError("--offload optimizer: ZeRO-0 shards no optimizer", "--engine zero1 or higher")
    if config.coalesce and (config.engine not in ("zero2", "zero3") or config.offload != "none"):
        what = "--coalesce: only zero2 and zero3 without offload reduce gradients in every micro-step on the GPU"
        raise RefusedError(what, "--engine zero2 --offload none, or without --coalesce")
    if config.model != "custom":
        layers, heads, width = MODELS[config.model]
        config = dataclasses.replace(config, n_layer=layers, n_head=heads, n_embd=width)
    if config.n_embd % config.n_head:
        raise RefusedError("--n-embd %d does not divide by --n-head %d" % (config.n_embd, config.n_head))
    if config.min_lr < 0:
        config = dataclasses.replace(config, min_lr=config.learning_rate / 10)
    return config


def accumulation(config: Config, world: int) -> int:
    """How many micro-steps a step has on each of ``world`` ranks.

    Raises:
        RefusedError: the global batch does not divide.
    """
    if not config.global_batch:
        return config.accumulation
    each = config.batch_size * world
    if config.global_batch % each or config.global_batch < each:
        lower = max(each, config.global_batch // each * each)
        raise RefusedError(
            "--global-batch %d does not divide by --batch-size %d x %d ranks"
            % (config.global_batch, config.batch_size, world),
            "--global-batch %d or %d" % (lower, lower + each),
        )
    return config.global_batch // each
