"""The plan of a training on a cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterator, Optional, Tuple

from trainer.plan.inputs import GIB, Cluster, Training, accumulation, check
from trainer.plan.ladder import Ladder, ladder, no_cures
from trainer.plan.memory import loading_memory
from trainer.plan.saves import describe, saves
from trainer.plan.search import Option, chunks, nearest, pick, survey
from trainer.plan.shape import PlanError


@dataclass(frozen=True)
class Plan:
    """A plan.

    Attributes:
        training: what to train.
        cluster: the machines.
        options: the best setup of every stage and offload.
        best: the recommended one; None if nothing fits.
        why: sentences that explain it.
        rate: the learning rate.
        ladder: what to change when memory runs out.
        no_cures: advice that does not save memory, and what it does instead.
        advice: sentences about packing, attention and the like.
    """

    training: Training
    cluster: Cluster
    options: Tuple[Option, ...]
    best: Optional[Option]
    why: Tuple[str, ...]
    rate: Rate
    ladder: Ladder
    no_cures: Tuple[Tuple[str, str], ...]
    advice: Tuple[str, ...]


def plan(training: Training, cluster: Cluster, *, overlap: bool = False, liger: Optional[bool] = None) -> Plan:
    """Plan a training.

    Args:
        training: what to train.
        cluster: the machines.
        overlap: stages 1 and 2 reduce gradients during the backward pass (``overlap_comm``).
        liger: compute the loss in chunks (``enable_liger_kernel``); None: if LLaMA-Factory can.

    Raises:
        PlanError: the training cannot be planned: a batch is not divisible, or a number is invalid.
    """
    check(training, cluster)
    if liger and not chunks(training):
        raise PlanError(
            f"--liger: Liger cannot compute the loss of {training.shape.name} in chunks with --for {training.program}",
            hint="remove --liger",
        )
    chunked_loss = chunks(training) if liger is None else liger
    options = survey(training, cluster, overlap=overlap, chunked_loss=chunked_loss)
    best = pick(options)
    return Plan(
        training,
        cluster,
        options,
        best,
        tuple(_why(options, best, cluster.usable)),
        rate(training),
        ladder(training, cluster, nearest(options).setup, "the closest to fitting" if best is None else "the pick"),
        no_cures(training, cluster),
        tuple(_advice(training, cluster, best)),
    )


def _why(options: Tuple[Option, ...], best: Optional[Option], usable: float) -> Iterator[str]:
    """Explain the choice: what does not fit before it, and what the next best options lose."""
    if best is None:
        near = nearest(options)
        yield f"nothing fits; {near.setup.name} is the closest: {near.why_not}"
        if near.memory.total / GIB <= usable:
            yield "use more nodes, adapters (--method lora, qlora), or nodes with more memory"
        else:
            yield "use more nodes, adapters (--method lora, qlora), or the changes below"
        return
    for each in options[: options.index(best)]:
        if not each.fits:
            yield f"{each.setup.name} {'does not fit' if each.lacks else 'is not supported'}: {each.why_not}"
    others = [each for each in options if each.fits and each is not best]
    for each in sorted(others, key=lambda each: -each.speed.tokens)[:2]:
        yield f"{each.setup.name} reaches {each.speed.tokens / best.speed.tokens:.0%} of its speed: {_loss(each, best)}"


def _loss(other: Option, best: Option) -> str:
    """Explain where an option loses time."""
    parts = {
        f"it waits {other.speed.waiting:.2f} s per step for the network": other.speed.waiting - best.speed.waiting,
        f"its optimizer takes {other.speed.optimizer:.2f} s": other.speed.optimizer - best.speed.optimizer,
        _slower(other, best): other.speed.compute - best.speed.compute,
    }
    what, seconds = max(parts.items(), key=lambda item: item[1])
    return what if seconds > 1e-3 else "about as fast, but more complicated"


def _slower(other: Option, best: Option) -> str:
    if other.setup.checkpointing and not best.setup.checkpointing:
        return "it computes activations twice"
    return "its passes take longer because of DeepSpeed's work on every block"


def _advice(training: Training, cluster: Cluster, best: Optional[Option]) -> Iterator[str]:
    shape, seq = training.shape, training.seq
    if training.method != "pretrain":
        yield (
            f"packing: samples shorter than {seq} tokens are padded, which wastes computation; "
            "with `packing: true` and `neat_packing: true` samples share a sequence without attending to each other"
        )
    scores = 5.0 * shape.heads * seq * seq / GIB
    yield (
        f"FlashAttention: without it each block keeps {scores:.2f} GiB per sample; torch's sdpa includes it"
        f"{'' if cluster.gpu.bf16 else ' (here as memory-efficient attention: flash needs Ampere)'}, "
        "fa2 needs the package flash-attn"
    )
    if best is not None and best.setup.chunked_loss:
        yield (
            "the loss in chunks comes from Liger (enable_liger_kernel: true) and needs the package liger-kernel in the "
            "environment; --no-liger plans without it"
        )
    if best is not None and (loading := loading_memory(training, cluster, best.setup)):
        yield (
            f"loading: in stage 3 each of the {cluster.gpus} processes of a node reads the whole checkpoint into its "
            f"memory, {loading / GIB:.0f} GiB together"
        )
    if training.eight_bit:
        yield "8-bit Adam (optim: adamw_bnb_8bit) needs bitsandbytes in the environment, and may change the loss"
    if not cluster.gpu.bf16:
        yield f"{cluster.gpu.name} does not support bf16: use fp16 with a dynamic loss scale; watch for skipped steps"
    if cluster.cores is None:
        yield "--cores N sets preprocessing_num_workers to half of a node's cores (clusterctl run nproc shows them)"
    if best is not None:
        yield describe(saves(training, cluster), cluster)
    if best is not None and best.setup.micro_batch > 1 and accumulation(training, cluster, best.setup) == 1:
        yield "no accumulation needed: every pass is an optimizer step"


# For pretraining: parameters, rate, tokens per batch. GPT-3, arXiv 2005.14165, table 2.1.
_GPT3 = (
    (125e6, 6e-4, 0.5e6),
    (350e6, 3e-4, 0.5e6),
    (760e6, 2.5e-4, 0.5e6),
    (1.3e9, 2e-4, 1e6),
    (2.7e9, 1.6e-4, 1e6),
    (6.7e9, 1.2e-4, 2e6),
    (13e9, 1e-4, 2e6),
    (175e9, 0.6e-4, 3.2e6),
)


_FAR = 8.0  # times the batch


@dataclass(frozen=True)
class Rate:
    """A published learning rate, and the rates that follow for the planned batch.

    Attributes:
        base: the published rate.
        batch: its batch.
        unit: of the batch: ``tokens`` for pretraining, ``samples`` for fine-tuning.
        source: the publication.
        linear: scaled with the batch, for SGD (Goyal et al., arXiv 1706.02677).
        root: scaled with the square root of the batch, for Adam (Malladi et al., arXiv 2205.10287).
    """

    base: float
    batch: float
    unit: str
    source: str
    linear: float
    root: float

    @property
    def far(self) -> bool:
        """Whether the batch is too far from the published one for the rules to hold."""
        return not 1 / _FAR <= self.linear / self.base <= _FAR


def rate(training: Training) -> Rate:
    """Return the rate for a training's global batch."""
    base, batch, unit, source = _known(training)
    factor = (training.tokens if unit == "tokens" else training.global_batch) / batch
    return Rate(base, batch, unit, source, base * factor, base * math.sqrt(factor))


def _known(training: Training) -> Tuple[float, float, str, str]:
    size = training.shape.parameters
    if training.method == "pretrain":
        _, base, tokens = min(_GPT3, key=lambda row: abs(math.log(row[0] / size)))
        return base, tokens, "tokens", "GPT-3, arXiv 2005.14165, table 2.1"
    if training.method == "full":
        return 2e-5, 64.0, "samples", "Llama 2's fine-tuning, arXiv 2307.09288, section 3.1"
    # 7B and 13B: 2e-4, 33B and 65B: 1e-4. At 16 samples for all data sets; above 13B only for OASST1.
    if size < 20e9:
        return 2e-4, 16.0, "samples", "QLoRA, arXiv 2305.14314, table 9"
    return 1e-4, 16.0, "samples", "QLoRA, arXiv 2305.14314, table 9"
