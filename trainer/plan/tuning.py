"""Candidates that ``plan --tune`` measures, what their logs say, and which one is kept. Pure.

Each candidate trains about the same samples from the same start, so that losses can be compared. A candidate's loss is
the mean of the second half of its steps. It is within noise of the configuration's own if they differ by at most three
standard errors of that difference, or 1 %.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any, Iterator, List, Optional, Sequence, Tuple

from trainer.plan.factory import Job, Settings, estimate, rows_of
from trainer.plan.faster import NEAR, alternatives, choose
from trainer.plan.findings import Faster

MOST = 6  # candidates
_FULL = 0.95  # of a GPU's memory that a measured candidate may fill by the estimate
_TIGHT = 1.05  # of a GPU's memory: the estimate may be too high
_ERRORS = 3.0  # standard errors
_SAME = 0.01  # of the loss
_EQUAL = 1e-6  # of a number of epochs
_MISSED = 1.2  # how much more than planned the samples per step may differ
_WARM = 0.2  # of the steps, which are not timed
_LINES = 100_000  # of a log


@dataclass(frozen=True)
class Candidate:
    """Settings to measure.

    Attributes:
        name: what they are.
        settings: the settings.
    """

    name: str
    settings: Settings


@dataclass(frozen=True)
class Row:
    """One line of LLaMA-Factory's ``trainer_log.jsonl``.

    Attributes:
        step: its number.
        epoch: epochs so far.
        seconds: so far.
        loss: of the step.
        memory: GiB at the peak so far; 0 if unknown.
        tokens: so far, with padding; 0 if they are not counted.
    """

    step: int
    epoch: float
    seconds: float
    loss: float
    memory: float = 0.0
    tokens: float = 0.0


@dataclass(frozen=True)
class Measured:
    """A measured candidate.

    Attributes:
        candidate: the settings.
        tokens: of samples, without padding, per second on all GPUs.
        epochs: of the data per second.
        loss: mean of the second half.
        error: its standard error.
        memory: GiB of rank 0's GPU at the peak; 0 if unknown.
        steps: that were measured.
        until: epochs that it trained.
        share: epochs per step.
        width: tokens per step, with padding; 0 if unknown.
        dropped: why it is not kept; empty if it may be.
    """

    candidate: Candidate
    tokens: float = 0.0
    epochs: float = 0.0
    loss: float = math.nan
    error: float = 0.0
    memory: float = 0.0
    steps: int = 0
    until: float = 0.0
    share: float = 0.0
    width: float = 0.0
    dropped: str = ""


def candidates(
    job: Job, found: Faster, *, liger: bool = True, fa2: bool = False, deepspeed: bool = False, most: int = MOST
) -> List[Candidate]:
    """Choose what to measure: the configuration, the recommendation, and its best neighbours by the estimate.

    Args:
        job: what is trained.
        found: the recommendation.
        liger: the release has liger-kernel.
        fa2: the release has flash-attn.
        deepspeed: the release has DeepSpeed.
        most: the number of candidates.
    """
    base, best = found.base, found.best
    chosen = [Candidate("as it is", base)]
    if best != base:
        chosen.append(Candidate("recommended", best))
    if deepspeed and best.zero is None and best.method == "full" and best.precision in {"bf16", "fp16"}:
        sharded = choose(job, base.with_(zero=1), liger=liger, fa2=fa2, room=_FULL)
        chosen.append(Candidate(f"ZeRO-1, {_name(sharded)}", sharded))
    known = [estimate(job, each.settings).memory for each in chosen[:1]]
    limit = max(_TIGHT * job.cluster.usable, known[0])
    others = [
        (estimate(job, each), each)
        for each in alternatives(job, base, liger=liger, fa2=fa2)
        if _near(each, best) and all(each != one.settings for one in chosen)
    ]
    others = [each for each in others if each[0].memory <= limit]
    seen: List[Tuple[Any, ...]] = []
    for _, settings in sorted(others, key=lambda each: -each[0].tokens):
        kind = (settings.checkpointing, settings.packing, settings.batch * settings.accumulation, settings.batch > 1)
        if kind not in seen and len(chosen) < most:
            seen.append(kind)
            chosen.append(Candidate(_name(settings), settings))
    return chosen[:most]


def _near(settings: Settings, best: Settings) -> bool:
    return (settings.attention, settings.liger, settings.zero) == (best.attention, best.liger, best.zero)


def _name(settings: Settings) -> str:
    rows = f"{settings.batch} x {settings.accumulation}"
    packing = f" packed to {settings.cutoff}" if settings.packing else " grouped by length" if settings.grouped else ""
    return f"{rows}{packing}{', checkpointing' if settings.checkpointing else ''}"


def rows_of_log(text: str) -> List[Row]:
    """Read ``trainer_log.jsonl``. With counted tokens the time is their number by their rate: it is exact."""
    return list(_rows(text))


def _rows(text: str) -> Iterator[Row]:
    for line in text.splitlines()[:_LINES]:
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(row, dict) or not _number(row.get("loss")) or not isinstance(row.get("current_steps"), int):
            continue
        total, rate = row.get("total_tokens"), row.get("throughput")
        seconds = total / rate if _number(total) and _number(rate) and rate else _clock(str(row.get("elapsed_time")))
        epoch = row["epoch"] if _number(row.get("epoch")) else 0.0
        memory = row["vram_reserved"] if _number(row.get("vram_reserved")) else 0.0
        counted = float(row["total_tokens"]) if _number(total) else 0.0
        yield Row(row["current_steps"], float(epoch), float(seconds), float(row["loss"]), float(memory), counted)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _clock(text: str) -> float:
    """Seconds of 1:02:03."""
    parts = text.rpartition(" ")[2].split(":")
    if not all(part.isdigit() for part in parts):
        return 0.0
    return float(sum(int(part) * 60**power for power, part in enumerate(reversed(parts))))


def measured(candidate: Candidate, rows: Sequence[Row], tokens: float, *, until: Optional[float] = None) -> Measured:
    """Summarize a candidate's log.

    Args:
        candidate: the settings.
        rows: of the log.
        tokens: of one epoch, without padding.
        until: epochs that all candidates have trained; later steps count only for the speed.
    """
    rows = [row for row in rows if math.isfinite(row.loss)]
    first = rows[min(len(rows) - 1, max(1, int(len(rows) * _WARM)))] if rows else None
    if first is None or rows[-1].seconds <= first.seconds:
        return Measured(candidate, steps=len(rows), dropped="it did not take enough steps to be timed")
    last = rows[-1]
    epochs = (last.epoch - first.epoch) / (last.seconds - first.seconds)
    same = [row for row in rows if until is None or row.epoch <= until * (1 + _EQUAL)] or list(rows[:1])
    half = [row.loss for row in same[len(same) // 2 :]]
    mean = sum(half) / len(half)
    spread = math.sqrt(sum((each - mean) ** 2 for each in half) / max(1, len(half) - 1))
    memory = max(row.memory for row in rows)
    error, share = spread / math.sqrt(len(half)), last.epoch / last.step
    figures = (epochs * tokens, epochs, mean, error, memory)
    return Measured(candidate, *figures, len(rows), last.epoch, share, last.tokens / last.step)


def corrected(job: Job, base: Measured) -> Job:
    """Scale lengths that are only estimated, so that the measured configuration has the tokens that it really has."""
    rows = rows_of(job, base.candidate.settings)
    settings = base.candidate.settings
    expected = rows.width * settings.batch * settings.accumulation * job.cluster.world
    if job.lengths.exact or not base.width or settings.packing:
        return job
    return replace(job, lengths=job.lengths.scaled(base.width / expected))


def judged(results: Sequence[Measured]) -> List[Measured]:
    """Drop the candidates that do not train as the first, which is the configuration as it is.

    Their steps have other numbers of samples, if lengths were only estimated, or their losses differ.
    """
    base = results[0]
    found = []
    for each in results:
        why = each.dropped or ("" if base.dropped else _differs(base, each))
        found.append(replace(each, dropped=why))
    return found


def _differs(base: Measured, other: Measured) -> str:
    """Why a candidate does not train as the first does; empty if it does."""
    if base.share and abs(other.share / base.share - 1) > _MISSED * NEAR:
        return f"its steps have {other.share / base.share:.2f} times the samples"
    limit = max(_ERRORS * math.hypot(base.error, other.error), _SAME * abs(base.loss))
    if abs(other.loss - base.loss) <= limit:
        return ""
    return f"its loss {other.loss:.4f} differs from {base.loss:.4f} by more than {limit:.4f}"


def fastest(results: Sequence[Measured]) -> Optional[Measured]:
    """Return the fastest candidate that was not dropped."""
    return max((each for each in results if not each.dropped), key=lambda each: each.epochs, default=None)
