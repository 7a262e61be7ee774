"""The rules between options of a training, for the command line, files and options that a resume inherits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

from trainer.lm.config import PARTS, Config, steps_to_profile, trained_parts


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
