"""The options of a training.

They come from ``--key value``, then a file (``--config``, YAML or JSON), then the defaults. Each
number has its bound beside its default. ``RELATIONS`` lists the rules between options. Both apply to the command line,
to files, and to the options that a resumed training inherits from its checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from trainer.bounds import COUNT, EVERY, RATE, SHARE, Bound
from trainer.lm import families
from trainer.lm.errors import RefusedError
from trainer.lm.parser import Parser, check_bound

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


@dataclass(frozen=True)
class Relation:
    """A rule between options: ``rule`` for ``--help``, ``error`` with options in braces, and ``fix``, what to type."""

    rule: str
    holds: Callable[[Config], bool]
    error: str
    fix: str = ""


RELATIONS = (
    Relation(
        "n_embd is a multiple of n_head",
        lambda c: c.n_embd % c.n_head == 0,
        "{n_embd} must be a multiple of {n_head}",
    ),
    Relation(
        "warmup_iters is at most max_iters",
        lambda c: c.warmup_iters <= c.max_iters or c.epochs > 0,
        "{warmup_iters} must be at most {max_iters}",
    ),
    Relation(
        "epochs needs another sampling than with-replacement",
        lambda c: not c.epochs or c.sampling != "with-replacement",
        "{epochs}: {sampling} has no passes over the data",
        "--sampling without-replacement, or --epochs 0",
    ),
    Relation(
        "decay_iters is 0 or at least warmup_iters",
        lambda c: not c.decay_iters or c.decay_iters >= c.warmup_iters,
        "{decay_iters} must be 0 or at least {warmup_iters}",
    ),
    Relation(
        "min_lr is at most learning_rate",
        lambda c: c.min_lr <= c.learning_rate,
        "{min_lr} must be at most {learning_rate}",
    ),
    Relation(
        "parts is all, or some of vision, projector and language",
        lambda c: bool(trained_parts(c.parts)),
        "{parts}: not all, and not some of %s" % ",".join(PARTS),
        "--parts projector, or --parts vision,projector,language",
    ),
    Relation(
        "vision_lr and projector_lr need their part among parts",
        lambda c: all(getattr(c, each + "_lr") < 0 or each in trained_parts(c.parts) for each in PARTS[:2]),
        "{vision_lr}, {projector_lr}: {parts} freezes this part",
        "add the part to --parts, or remove its rate",
    ),
    Relation(
        "parts other than all need lora_rank 0",
        lambda c: c.parts == "all" or not c.lora_rank,
        "{parts}: {lora_rank} freezes all weights but its adapters",
        "--parts all, or --lora-rank 0",
    ),
    Relation(
        "patience needs an eval_interval",
        lambda c: not c.patience or c.eval_interval > 0,
        "{patience} counts evaluations, but {eval_interval} turns them off",
        "--eval-interval 100, or --patience 0",
    ),
    Relation(
        "offload needs the engine fsdp or a DeepSpeed engine",
        lambda c: c.offload == "none" or c.engine != "plain",
        "{offload} needs FSDP or DeepSpeed, not {engine}",
        "--engine zero2, or fsdp or zero3 for parameters; or --offload none",
    ),
    Relation(
        "offload all needs the engine fsdp or zero3",
        lambda c: c.offload != "all" or c.engine in ("fsdp", "zero3"),
        "{offload}: only FSDP and ZeRO-3 shard parameters, not {engine}",
        "--engine fsdp or zero3, or --offload optimizer",
    ),
    Relation(
        "offload optimizer needs the engine zero1, zero2 or zero3",
        lambda c: c.offload != "optimizer" or c.engine != "zero0",
        "{offload}: {engine} cannot shard the optimizer",
        "--engine zero1 or higher, or --offload none",
    ),
    Relation(
        "offload optimizer needs another engine than fsdp",
        lambda c: c.offload != "optimizer" or c.engine != "fsdp",
        "{offload}: with {engine} parameters and optimizer are in the same memory",
        "--offload all, or --engine zero3",
    ),
    Relation(
        "coalesce needs the engine zero2, zero3 or fsdp, and offload none",
        lambda c: not c.coalesce or (c.engine in ("zero2", "zero3", "fsdp") and c.offload == "none"),
        "{coalesce}: only zero2, zero3 and fsdp without offload reduce gradients in every micro-step, "
        "not {engine} {offload}",
        "--engine zero2 --offload none, or --coalesce false",
    ),
    Relation(
        "compile whole needs another engine than fsdp",
        lambda c: c.compile != "whole" or c.engine != "fsdp",
        "{compile}: {engine} gathers weights between the layers",
        "--compile blocks",
    ),
    Relation(
        "reduce_dtype bfloat16 needs the engine plain or fsdp",
        lambda c: c.reduce_dtype == "float32" or c.engine in ("plain", "fsdp"),
        "{reduce_dtype} needs the engine plain or fsdp, not {engine}",
        "--engine plain, or --reduce-dtype float32",
    ),
    Relation(
        "lora_rank needs the engine plain or fsdp",
        lambda c: not c.lora_rank or c.engine in ("plain", "fsdp"),
        "{lora_rank} needs the engine plain or fsdp, not {engine}",
        "--engine plain, or --lora-rank 0",
    ),
    Relation(
        "vision needs a language model: init",
        lambda c: not c.vision or c.init != "scratch",
        "{vision}: a tower needs a trained language model, not {init}",
        "--init FOLDER, or remove --vision",
    ),
    Relation(
        "vision needs lora_rank 0",
        lambda c: not c.vision or not c.lora_rank,
        "{vision}: its new projector is no adapter of {lora_rank}",
        "--parts projector --lora-rank 0; export it, then --init that model with --lora-rank",
    ),
    Relation(
        "lora_rank needs a model: init",
        lambda c: not c.lora_rank or c.init != "scratch",
        "{lora_rank}: adapters need a trained model, not {init}",
        "--init FOLDER, or --lora-rank 0",
    ),
    Relation(
        "quantize needs a lora_rank",
        lambda c: c.quantize == "none" or c.lora_rank > 0,
        "{quantize}: only frozen weights can have 4 bits, but {lora_rank} trains them",
        "--lora-rank 16, or --quantize none",
    ),
    Relation(
        "quantize needs the engine plain",
        lambda c: c.quantize == "none" or c.engine == "plain",
        "{quantize}: weights in 4 bits are whole on each rank, but {engine} shards them",
        "--engine plain, or --quantize none",
    ),
    Relation(
        "fp8 needs the engine plain or fsdp, and lora_rank 0",
        lambda c: c.fp8 == "off" or (c.engine in ("plain", "fsdp") and not c.lora_rank),
        "{fp8} needs the engine plain or fsdp, and all weights trained, not {engine} {lora_rank}",
        "--engine plain --lora-rank 0, or --fp8 off",
    ),
    Relation(
        "fp8 needs a compiled model in bfloat16",
        lambda c: c.fp8 == "off" or (c.compile != "off" and c.dtype in ("auto", "bfloat16")),
        "{fp8} needs a compiled model in bfloat16, not {compile} {dtype}",
        "--compile auto --dtype auto, or --fp8 off",
    ),
    Relation(
        "an optimizer other than adamw needs the engine plain or fsdp",
        lambda c: c.optimizer == "adamw" or c.engine in ("plain", "fsdp"),
        "{optimizer} needs the engine plain or fsdp, not {engine}",
        "--engine plain, or --optimizer adamw",
    ),
    Relation(
        "optimizer muon needs the engine plain",
        lambda c: c.optimizer != "muon" or c.engine != "fsdp",
        "{optimizer} needs whole matrices, but {engine} shards them",
        "--engine plain, or --optimizer adamw",
    ),
    Relation(
        "optimizer muon needs lora_rank 0",
        lambda c: c.optimizer != "muon" or not c.lora_rank,
        "{optimizer} is for whole matrices, not for adapters of {lora_rank}",
        "--optimizer adamw, or --lora-rank 0",
    ),
    Relation(
        "profile_steps is FIRST:LAST, from 1, at most 100 steps",
        lambda c: steps_to_profile(c.profile_steps) is not None,
        "{profile_steps}: not FIRST:LAST, from 1, at most 100 steps",
        "--profile-steps 4:6",
    ),
    Relation(
        "deepspeed_config needs a DeepSpeed engine",
        lambda c: not c.deepspeed_config or c.engine.startswith("zero"),
        "{deepspeed_config} needs DeepSpeed, not {engine}",
        "--engine zero2, or remove --deepspeed-config",
    ),
)


@dataclass(frozen=True)
class UserOptions:
    """The options given on a command line and in its file, without defaults."""

    values: Mapping[str, Any]
    path: Optional[Path] = None
    in_file: Sequence[str] = ()  # options whose value comes from the file

    def where(self, name: str) -> str:
        """Where an option was given: ``--max-iters``, or ``options.yaml: max_iters``."""
        return "%s: %s" % (self.path, name) if name in self.in_file else option(name)


def option(name: str) -> str:
    """The command-line option of a value: ``--max-iters``."""
    return "--" + name.replace("_", "-")


def read(argv: Optional[List[str]] = None, program: str = "trainer.lm") -> UserOptions:
    """Read a command line and its file. ``program``: one of ``WHAT``, for ``--help``.

    Raises:
        RefusedError: an unknown option or key, an invalid value, or a number outside its bound.
    """
    parser = _parser(program)
    options = parser.read(argv)
    path = options.pop("config", None)
    values = dict(_from_file(path)) if path else {}
    in_file = [name for name in values if name not in options]
    values.update(options)
    return UserOptions(values, path, in_file)


def from_arguments(argv: Optional[List[str]] = None) -> Config:
    """Return the options of a training that is not resumed.

    Raises:
        RefusedError: see ``read`` and ``complete``.
    """
    return complete(read(argv))


WHAT = {
    "trainer.lm": "Train a language model: GPT-2, Llama, Qwen2, Qwen2.5 or Qwen3.",
    "trainer.vlm": "Train a vision-language model: Qwen2.5-VL, LLaVA-OneVision, or a tower and a decoder.",
}


def _parser(program: str) -> Parser:
    parser = Parser(program, WHAT[program])
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "Rules between options:\n" + "\n".join("  " + each.rule for each in RELATIONS)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="options as YAML or JSON; the command line takes precedence"
    )
    for each in dataclasses.fields(Config):
        name, what, bound = option(each.name), each.metadata["help"], each.metadata.get("bound")
        shown = "%s (%s)" % (
            what,
            "required" if each.name == "data" else "none" if each.default in ("", ()) else each.default,
        )
        common: Dict[str, Any] = {"dest": each.name, "default": argparse.SUPPRESS}
        if bound:
            number: Any = each.default
            parser.number(name, number, bound, what, **common)
            continue
        common["help"] = shown.replace("%", "%%")
        if each.name in PATHS:
            parser.add_argument(name, nargs="+", metavar="PATH", **common)
        elif isinstance(each.default, bool):
            parser.add_argument(name, type=_flag, nargs="?", const=True, metavar="true|false", **common)
        else:
            kind = type(each.default)
            choices = _choices(each)
            parser.add_argument(name, type=kind, choices=choices, metavar=None if choices else kind.__name__, **common)
    return parser


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
        raise RefusedError("%s: %s" % (path, error.strerror), "--config FILE, a file with options") from error
    try:
        if path.suffix == ".json":
            options_read = json.loads(text)
        else:
            import yaml  # noqa: PLC0415 - JSON needs no library

            options_read = yaml.safe_load(text)
    except ImportError as error:
        raise RefusedError("%s: PyYAML is not installed" % path, "write it as JSON, in a file *.json") from error
    except Exception as error:
        raise RefusedError("%s cannot be read: %s" % (path, str(error).replace("\n", " "))) from error
    if not isinstance(options_read, dict):
        raise RefusedError("%s contains no options" % path, "lines such as max_iters: 1000")
    return {key: _value(path, key, value) for key, value in options_read.items()}


def _value(path: Path, key: str, value: Any) -> Any:
    fields = {each.name: each for each in dataclasses.fields(Config)}
    if key not in fields:
        near = difflib.get_close_matches(str(key), fields, 1)
        raise RefusedError("%s: unknown option %s" % (path, key), "did you mean %s?" % near[0] if near else "")
    default = fields[key].default
    if key in PATHS:
        named = [value] if isinstance(value, str) else value
        if not isinstance(named, list) or not all(isinstance(each, str) for each in named):
            raise RefusedError("%s: %s: %r is not a list of paths" % (path, key, value))
        return named
    if isinstance(default, float) and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            value = float(value)  # YAML reads 3e-4 as a string
        except ValueError:
            value = str(value)
        except OverflowError:
            value = math.inf
    if type(value) is not type(default):
        raise RefusedError("%s: %s: %r is not of type %s" % (path, key, value, type(default).__name__))
    choices = _choices(fields[key])
    if choices and value not in choices:
        raise RefusedError("%s: %s: %r is not one of %s" % (path, key, value, ", ".join(choices)))
    bound = fields[key].metadata.get("bound")
    if bound:
        number: Any = value
        check_bound("%s: %s" % (path, key), number, bound)
    return value


def complete(options: UserOptions, stored: Optional[Mapping[str, Any]] = None, source: str = "") -> Config:
    """Return all options: those given, then those ``stored`` in a checkpoint or model ``source``, then the defaults.

    Raises:
        RefusedError: options contradict each other, or a stored one is outside its bound.
    """
    fields = {each.name: each for each in dataclasses.fields(Config)}
    stored = dict(stored or {})
    if isinstance(stored.get("checkpointing"), bool):  # of checkpoints until format 2
        stored["checkpointing"] = "full" if stored["checkpointing"] else "off"
    inherited = {name: stored[name] for name in stored if name in fields and name not in options.values}
    for name, value in inherited.items():
        bound = fields[name].metadata.get("bound")
        if bound:
            check_bound("%s: %s" % (source, name), value, bound)
    config = _with_sizes(Config(**{**inherited, **options.values}), options)
    if not config.data:
        raise RefusedError("--data is missing", "python -m trainer.lm.prepare TEXT --out DIR, then --data DIR")

    def shown(name: str) -> str:
        text = "%s %s" % (options.where(name), getattr(config, name))
        if name in options.values:
            return text
        return "%s (%s)" % (text, source if name in inherited else "default")

    for relation in RELATIONS:
        if not relation.holds(config):
            raise RefusedError(relation.error.format_map({name: shown(name) for name in fields}), relation.fix)
    return config


def _with_sizes(config: Config, options: UserOptions) -> Config:
    """Set the sizes of a published model, unless others are given."""
    shape = families.named(config.model)
    if shape is None:
        return config
    sizes: Dict[str, Any] = {name: getattr(shape, name) for name in SIZES}
    for name, size in sizes.items():
        if options.values.get(name, size) != size:
            what = "%s %s: %s has %d" % (options.where(name), options.values[name], config.model, size)
            raise RefusedError(what, "--model custom, or remove %s" % option(name))
    return dataclasses.replace(config, **sizes)


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
