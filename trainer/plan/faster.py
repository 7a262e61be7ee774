"""Faster settings for a LLaMA-Factory configuration: same data, same samples per optimizer step, and every reason.

The search changes only what leaves the loss equal within noise. ``findings.py`` explains its result.
"""

from __future__ import annotations

import math
from typing import Iterator, List, Optional

from trainer.plan.factory import Estimate, Job, Settings, estimate, rows_of
from trainer.plan.findings import Faster, explain
from trainer.plan.shape import PlanError

ROOM = 0.88  # of a GPU's memory that an estimate may fill
NEAR = 0.25  # how far the samples per step may be from the configuration's
_EQUAL = 0.03  # of the speed; fewer changes win
_MOST = 64  # samples or sequences per pass
_MORE = 0.002  # of the tokens that longer sequences may add
_UNSEEN = 2  # times the longest counted sample, for samples that were not counted
_ROWS = 8  # packed sequences per pass
_PACKED = 16384  # longest packed sequence that is tried


def faster(job: Job, base: Settings, *, liger: bool = True, fa2: bool = False) -> Faster:
    """Find faster settings.

    Args:
        job: what is trained.
        base: the settings as they are.
        liger: the release has liger-kernel.
        fa2: the release has flash-attn.

    Raises:
        PlanError: the data has no samples.
    """
    if not job.lengths.tokens:
        raise PlanError("the data has no samples")
    return explain(job, base, choose(job, base, liger=liger, fa2=fa2), liger=liger, fa2=fa2)


def choose(job: Job, base: Settings, *, liger: bool, fa2: bool, room: float = ROOM) -> Settings:
    """Return the settings with the highest estimated speed that fit; among nearly equal ones those nearest to base.

    ``room`` is the part of a GPU's memory that they may fill.
    """
    found = [(each, estimate(job, each)) for each in alternatives(job, base, liger=liger, fa2=fa2)]
    fitting = [(each, cost) for each, cost in found if cost.memory <= room * job.cluster.usable]
    if not fitting:
        return base
    wanted = found[0][1].samples
    best = max(_worth(cost, wanted) for _, cost in fitting)
    equal = [(each, cost) for each, cost in fitting if _worth(cost, wanted) >= (1 - _EQUAL) * best]
    return min(equal, key=lambda one: (one[0] != base, _differences(base, one[0]), one[1].memory))[0]


def _worth(cost: Estimate, samples: float) -> float:
    """The speed, less for settings with another number of samples per step."""
    return cost.tokens / (1 + abs(cost.samples / samples - 1))


def alternatives(job: Job, base: Settings, *, liger: bool, fa2: bool) -> Iterator[Settings]:
    """Yield every setting that keeps the data and about the samples per step. The first one is ``base``."""
    yield base
    attention = base.attention
    if attention == "disabled" and job.shape.kind != "gemma2":
        attention = "sdpa"
    if fa2 and job.takes_packing:
        attention = "fa2"
    better = base.with_(attention=attention, liger=base.liger or (liger and job.takes_liger and base.stage == "sft"))
    for zero in _stages(job, base):
        for checkpointing in sorted({base.checkpointing, False}):
            same = better.with_(zero=zero, checkpointing=checkpointing)
            yield from _batches(job, base, same)
            if base.stage == "sft" and job.takes_packing:
                yield from _packings(job, base, same)


def _stages(job: Job, base: Settings) -> List[Optional[int]]:
    """DeepSpeed's stages that shard less than the configuration's, which costs less communication."""
    if not base.zero or base.offload:
        return [base.zero]
    lower: List[Optional[int]] = [each for each in (1, 2, 3) if each <= base.zero]
    return [1] if job.cluster.world == 1 else lower


def _batches(job: Job, base: Settings, same: Settings) -> Iterator[Settings]:
    """Divide the samples of a step into passes in other ways.

    transformers' batches of similar lengths come in the order of their lengths, 50 at a time. That is worse than random
    batches, so they are only used for samples that cannot be packed.
    """
    share = base.batch * base.accumulation
    for batch in range(1, min(share, _MOST) + 1):
        if share % batch == 0:
            grouped = same.grouped or (batch > 1 and not same.packing and not job.takes_packing)
            yield same.with_(batch=batch, accumulation=share // batch, grouped=grouped)


def _packings(job: Job, base: Settings, same: Settings) -> Iterator[Settings]:
    """Pack samples into sequences, with about as many samples per step.

    If the configuration cuts samples, the sequences keep its length, so that the same tokens are trained; longer ones
    are used if that adds almost no tokens. Shorter sequences must hold every sample, also those that were not counted.
    """
    target = estimate(job, base).samples / job.cluster.world  # samples of a GPU per step
    longest = job.lengths.longest + 1
    least = longest if job.lengths.sure else min(base.cutoff, _UNSEEN * longest if job.lengths.exact else base.cutoff)
    least = base.cutoff if longest > base.cutoff else least
    mean = job.lengths.cut(base.cutoff).mean
    for rows in range(1, min(_MOST, max(1, int(target))) + 1):  # every sequence has a sample at least
        ideal = target * mean / rows
        sizes = {base.cutoff} if base.neat else {base.cutoff, _rounded(ideal), _rounded(ideal * 1.04)}
        for cutoff in sorted(size for size in sizes if least <= size <= max(_PACKED, base.cutoff)):
            if cutoff > base.cutoff and job.lengths.cut(cutoff).mean > (1 + _MORE) * mean:
                continue
            one = same.with_(packing=True, neat=True, cutoff=cutoff, batch=1, accumulation=rows, grouped=False)
            if abs(rows * rows_of(job, one).samples / target - 1) <= NEAR:
                for batch in (each for each in range(1, min(rows, _ROWS) + 1) if rows % each == 0):
                    yield one.with_(batch=batch, accumulation=rows // batch)


def _rounded(tokens: float) -> int:
    return max(64, math.ceil(tokens / 64) * 64)


def _differences(base: Settings, other: Settings) -> int:
    names = ("packing", "checkpointing", "liger", "attention", "grouped", "zero", "batch", "accumulation")
    return sum(getattr(base, name) != getattr(other, name) for name in names)
