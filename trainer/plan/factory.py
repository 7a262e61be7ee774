"""A LLaMA-Factory configuration as a plan understands it, and its estimated speed and memory.

The keys and their defaults are those of LLaMA-Factory 0.9.5 (``hparams/``) and transformers 5.6.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Mapping, Optional, Tuple

from trainer.plan.inputs import GIB, Cluster, Setup, Training
from trainer.plan.lengths import Lengths, Rows, packed, padded
from trainer.plan.memory import gpu_memory
from trainer.plan.search import bucket
from trainer.plan.shape import PlanError, Shape
from trainer.plan.speed import speed

_LARGEST = 1_000_000  # of a batch, an accumulation or a length
# Fraction of the peak of attention with a mask for every pair of tokens, which torch's flash kernel does not take.
_MASKED = 0.25
# model_type -> what LLaMA-Factory 0.9.5 does not do with it
_NO_LIGER = ("gpt2", "qwen2_moe")  # model/model_utils/liger_kernel.py
_WINDOWS = ("gemma2", "gemma3", "gemma3_text")  # packing's mask has no sliding window


@dataclass(frozen=True)
class Settings:
    """The settings of a LLaMA-Factory configuration that decide its speed.

    Attributes:
        stage: ``sft``, ``pt`` and so on.
        method: ``full``, ``lora`` or ``qlora``; a frozen model counts as ``full``.
        batch: ``per_device_train_batch_size``; with packing, sequences.
        accumulation: ``gradient_accumulation_steps``.
        cutoff: ``cutoff_len``.
        packing: samples share sequences.
        neat: they do so without attending to each other.
        checkpointing: gradient checkpointing.
        liger: ``enable_liger_kernel``.
        attention: ``flash_attn``.
        grouped: batches of samples with similar lengths.
        precision: ``bf16``, ``fp16``, ``pure_bf16`` or ``fp32``.
        zero: DeepSpeed's stage; None: no DeepSpeed.
        offload: DeepSpeed offloads to the host.
        workers: ``dataloader_num_workers``.
        preprocessing: ``preprocessing_num_workers``.
        rank: ``lora_rank``.
        eight_bit: ``optim`` keeps Adam's states in 8 bits.
        save_steps: steps between checkpoints; None: not by steps.
        states: checkpoints have the optimizer's states.
        upcast: keys that compute norms or logits in 32 bits.
    """

    stage: str = "sft"
    method: str = "lora"
    batch: int = 8
    accumulation: int = 1
    cutoff: int = 2048
    packing: bool = False
    neat: bool = False
    checkpointing: bool = True
    liger: bool = False
    attention: str = "auto"
    grouped: bool = False
    precision: str = "fp32"
    zero: Optional[int] = None
    offload: bool = False
    workers: int = 0
    preprocessing: Optional[int] = None
    rank: int = 8
    eight_bit: bool = False
    save_steps: Optional[int] = 500
    states: bool = True
    upcast: Tuple[str, ...] = ()

    def with_(self, **changes: Any) -> Settings:
        """Return a copy with changes."""
        return replace(self, **changes)


def settings_of(config: Mapping[str, Any], deepspeed: Optional[Mapping[str, Any]] = None) -> Settings:
    """Read the settings of a configuration.

    Args:
        config: its keys and values.
        deepspeed: the DeepSpeed configuration that it names.

    Raises:
        PlanError: a value is not usable.
    """

    def flag(key: str, default: bool = False) -> bool:
        value = config.get(key)
        return default if value is None else value is True or str(value).lower() == "true"

    def number(key: str, default: Optional[int], low: int = 1) -> Any:
        value = config.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _LARGEST:
            raise PlanError(f"{key}: {repr(value)[:40]} is not a whole number from {low} to {_LARGEST:,}")
        return value

    stage, kind = str(config.get("stage", "sft")), str(config.get("finetuning_type", "lora"))
    method = "full" if kind in {"full", "freeze"} else "qlora" if config.get("quantization_bit") else "lora"
    precision = next((each for each in ("pure_bf16", "bf16", "fp16") if flag(each)), "fp32")
    neat = flag("neat_packing")
    zero, offload = _zero(deepspeed)
    return Settings(
        stage=stage,
        method=method,
        batch=number("per_device_train_batch_size", 8),
        accumulation=number("gradient_accumulation_steps", 1),
        cutoff=number("cutoff_len", 2048, 16),
        packing=neat or flag("packing", default=stage == "pt"),
        neat=neat,
        checkpointing=not flag("disable_gradient_checkpointing"),
        liger=flag("enable_liger_kernel"),
        attention=str(config.get("flash_attn", "auto")),
        grouped=flag("group_by_length") or config.get("train_sampling_strategy") == "group_by_length",
        precision=precision,
        zero=zero,
        offload=offload,
        workers=number("dataloader_num_workers", 0, 0),
        preprocessing=number("preprocessing_num_workers", None),
        rank=number("lora_rank", 8),
        eight_bit="8bit" in str(config.get("optim", "")),
        save_steps=_save_steps(config),
        states=not flag("save_only_model"),
        upcast=tuple(key for key in ("upcast_layernorm", "upcast_lmhead_output") if flag(key)),
    )


def _save_steps(config: Mapping[str, Any]) -> Optional[int]:
    """Steps between checkpoints; a fraction of all steps is not known here."""
    steps, by = config.get("save_steps", 500), config.get("save_strategy", "steps")
    whole = isinstance(steps, int) and not isinstance(steps, bool) and steps > 0
    return steps if whole and by == "steps" else None


def _zero(deepspeed: Optional[Mapping[str, Any]]) -> Any:
    """The stage of a DeepSpeed configuration, and whether it offloads."""
    if deepspeed is None:
        return None, False
    section = deepspeed.get("zero_optimization")
    section = section if isinstance(section, Mapping) else {}
    stage = section.get("stage", 0)
    places = [section.get(key) for key in ("offload_optimizer", "offload_param")]
    offload = any(isinstance(each, Mapping) and each.get("device") not in {None, "none"} for each in places)
    return (stage if stage in {0, 1, 2, 3} and not isinstance(stage, bool) else 0), offload


@dataclass(frozen=True)
class Estimate:
    """What settings cost.

    Attributes:
        tokens: of samples, without padding, per second on all GPUs.
        memory: GiB of a GPU at the peak.
        rows: of a pass.
        samples: per optimizer step, over all GPUs.
        seconds: of an optimizer step.
    """

    tokens: float
    memory: float
    rows: Rows
    samples: float
    seconds: float


@dataclass(frozen=True)
class Job:
    """What is trained, and on what machines; it stays the same while settings change.

    Attributes:
        shape: the model.
        lengths: of the data.
        cluster: the machines.
        half: the card computes in bf16, otherwise in fp16.
        media: samples have images, videos or sounds.
    """

    shape: Shape
    lengths: Lengths
    cluster: Cluster
    half: bool = True
    media: bool = False

    @property
    def takes_liger(self) -> bool:
        """Whether LLaMA-Factory applies Liger's kernels to this model."""
        return self.shape.kind not in _NO_LIGER

    @property
    def takes_packing(self) -> bool:
        """Whether samples may share sequences with the same result."""
        return not self.media and self.shape.kind not in _WINDOWS


def rows_of(job: Job, settings: Settings) -> Rows:
    """The rows of the settings' passes."""
    if settings.packing:
        return packed(job.lengths, settings.cutoff)
    return padded(job.lengths.cut(settings.cutoff), settings.batch, grouped=settings.grouped)


def setup_of(job: Job, settings: Settings) -> Setup:
    """The settings as a setup. Without DeepSpeed the trained weights have 32 bits."""
    wide = settings.zero is None and settings.precision != "pure_bf16"
    return Setup(
        settings.zero or 0,
        optimizer_at="cpu" if settings.offload else "gpu",
        checkpointing=settings.checkpointing,
        micro_batch=settings.batch,
        flash=settings.attention != "disabled",
        chunked_loss=settings.liger and job.takes_liger,
        kernels=settings.liger and job.takes_liger,
        wide=wide,
    )


def estimate(job: Job, settings: Settings) -> Estimate:
    """Estimate the speed and the memory of settings."""
    rows, cluster = rows_of(job, settings), job.cluster
    passes = settings.batch * settings.accumulation * cluster.world
    setup = setup_of(job, settings)
    typical = _training(job, settings, max(1, round(rows.width)), passes)
    seconds = speed(typical, cluster, setup).seconds + settings.accumulation * _mask(job, settings, typical)
    useful, samples = passes * rows.useful, passes * rows.samples
    widest = _training(job, settings, rows.widest, passes)
    memory = gpu_memory(widest, cluster, setup.with_(bucket=bucket(widest, cluster))).total / GIB
    if settings.packing and settings.neat and settings.attention != "fa2":
        memory += 3 * settings.batch * settings.cutoff**2 * 2 / GIB  # the mask, and its copies for the kernel
    return Estimate(useful / seconds, memory, rows, samples, seconds)


def _training(job: Job, settings: Settings, seq: int, passes: int) -> Training:
    precision = "bf16" if job.half else "fp16"
    rank, eight_bit = settings.rank, settings.eight_bit
    return Training(job.shape, settings.method, seq, passes, rank=rank, precision=precision, eight_bit=eight_bit)


def _mask(job: Job, settings: Settings, training: Training) -> float:
    """Seconds that attention takes longer per pass because packing's mask excludes the flash kernel."""
    if not (settings.packing and settings.neat) or settings.attention == "fa2":
        return 0.0
    shape = job.shape
    operations = 4.0 * shape.attention_width * training.seq * shape.layers * settings.batch * training.seq
    operations *= 4 if settings.checkpointing else 3
    slower = 1 / _MASKED - 1 / training.efficiency
    return operations * slower / (job.cluster.gpu.tflops * 1e12)
