"""The plan: everything that there is to say about a training on a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, Optional, Tuple

from trainer.plan.errors import PlanError
from trainer.plan.ladder import Ladder, ladder, no_cures
from trainer.plan.rates import Rate, rate
from trainer.plan.search import Option, chunks, nearest, pick, survey
from trainer.plan.wish import GIB, Cluster, Training, accumulation, check


@dataclass(frozen=True)
class Plan:
    """A plan.

    Attributes:
        training: what is trained.
        cluster: on what.
        options: the best of every stage and offload.
        best: the one to take; None: nothing fits.
        why: sentences about it.
        rate: the learning rate.
        ladder: for a full GPU.
        no_cures: what does not help a full GPU, and what it does instead.
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
        training: what is trained.
        cluster: on what.
        overlap: stages 1 and 2 reduce gradients while others are computed (``overlap_comm``).
        liger: the loss is computed in pieces (``enable_liger_kernel``); None: where LLaMA-Factory can.

    Raises:
        PlanError: it cannot be planned: a batch that does not divide, a number that is none.
    """
    check(training, cluster)
    if liger and not chunks(training):
        raise PlanError(
            f"--liger: Liger computes no loss of {training.shape.name} in pieces with --for {training.program}",
            hint="clusterctl plan without --liger",
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
        ladder(training, cluster, nearest(options).setup, "nearest to fitting" if best is None else "the pick"),
        no_cures(training, cluster),
        tuple(_advice(training, cluster, best)),
    )


def _why(options: Tuple[Option, ...], best: Optional[Option], usable: float) -> Iterator[str]:
    """Why the best is the best: what does not fit below it, and what the next ones lose."""
    if best is None:
        near = nearest(options)
        yield f"nothing fits; {near.setup.name} comes nearest: {near.why_not}"
        if near.memory.total / GIB <= usable:
            yield "more nodes, adapters (--method lora, qlora), or nodes with more memory; the ladder is about GPUs"
        else:
            yield "more nodes, adapters (--method lora, qlora), or what the ladder below still has"
        return
    for each in options[: options.index(best)]:
        if not each.fits:
            yield f"{each.setup.name} {'does not fit' if each.lacks else 'is not planned'}: {each.why_not}"
    others = [each for each in options if each.fits and each is not best]
    for each in sorted(others, key=lambda each: -each.speed.tokens)[:2]:
        yield f"{each.setup.name} gets {each.speed.tokens / best.speed.tokens:.0%} of it: {_loss(each, best)}"


def _loss(other: Option, best: Option) -> str:
    """What an option loses its time with."""
    parts = {
        f"{other.speed.waiting:.2f} s a step wait for the network": other.speed.waiting - best.speed.waiting,
        f"{other.speed.optimizer:.2f} s for the optimizer and its copies": other.speed.optimizer - best.speed.optimizer,
        _slower(other, best): other.speed.compute - best.speed.compute,
    }
    what, seconds = max(parts.items(), key=lambda item: item[1])
    return what if seconds > 1e-3 else "about as fast, and more complicated"


def _slower(other: Option, best: Option) -> str:
    if other.setup.checkpointing and not best.setup.checkpointing:
        return "it has to compute activations twice"
    return "its passes take longer, for DeepSpeed's own work on every block"


def _advice(training: Training, cluster: Cluster, best: Optional[Option]) -> Iterator[str]:
    shape, seq = training.shape, training.seq
    if training.method != "pretrain":
        yield (
            f"packing: a sample shorter than {seq} tokens is filled up with padding that is computed and thrown away; "
            "with `packing: true` and `neat_packing: true` samples share a sequence and do not see one another"
        )
    scores = 5.0 * shape.heads * seq * seq / GIB
    yield (
        f"FlashAttention: without it each block keeps {scores:.2f} GiB a sample; torch's sdpa has it"
        f"{'' if cluster.gpu.bf16 else ' (here as memory-efficient attention: flash needs Ampere)'}, "
        "fa2 needs the package flash-attn"
    )
    if best is not None and best.setup.chunked_loss:
        yield (
            "the loss in pieces is Liger's (enable_liger_kernel: true), which needs the package liger-kernel in the "
            "environment; --no-liger plans without it"
        )
    if not cluster.gpu.bf16:
        yield f"{cluster.gpu.name} has no bf16: fp16 with a dynamic loss scale; watch for skipped steps"
    if cluster.cores is None:
        yield "--cores N writes preprocessing_num_workers: half of a node's cores (clusterctl run nproc)"
    if best is not None and best.setup.micro_batch > 1 and accumulation(training, cluster, best.setup) == 1:
        yield "no accumulation is needed: every pass is an optimizer step"
