"""The lengths of a data set's samples, and what padding, cutting and packing do with them.

A batch is padded to its longest sample, rounded up to a multiple of 8 (LLaMA-Factory 0.9.5, ``data/collator.py`` and
``train/sft/workflow.py``). Packing fills sequences of ``cutoff_len`` with a greedy knapsack, among 1,000 samples at a
time (``data/processor/processor_utils.py``), and drops longer samples.
"""

from __future__ import annotations

import bisect
import random
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import List, Sequence, Tuple

_MULTIPLE = 8
_GROUP = 1000  # samples that are packed together: preprocessing_batch_size
_SORTED = 50  # batches that transformers' LengthGroupedSampler sorts together
_KEPT = 1024  # results; a search asks for the same ones again
_DRAWS = 256  # batches from which padding is estimated


@dataclass(frozen=True)
class Lengths:
    """Token counts of sampled records.

    Attributes:
        tokens: of each sampled record, in the data's order, before cutting.
        total: number of records of the data, sampled or not.
        exact: counted by the model's tokenizer; otherwise estimated from bytes.
        bytes: per token of an estimate.
    """

    tokens: Tuple[int, ...]
    total: int
    exact: bool
    bytes: float = 4.0

    @property
    def sure(self) -> bool:
        """Whether every record was counted with the tokenizer, so that none can be longer than ``longest``."""
        return self.exact and len(self.tokens) >= self.total

    @property
    def mean(self) -> float:
        """Mean length."""
        return sum(self.tokens) / len(self.tokens)

    @property
    def longest(self) -> int:
        """The longest sampled record."""
        return max(self.tokens)

    def percentile(self, percent: float) -> int:
        """The length that ``percent`` of the records do not exceed."""
        return sorted(self.tokens)[min(len(self.tokens) - 1, int(len(self.tokens) * percent / 100))]

    def share_cut(self, cutoff: int) -> float:
        """Share of the records that are longer than ``cutoff``."""
        return sum(each > cutoff for each in self.tokens) / len(self.tokens)

    def cut(self, cutoff: int) -> Lengths:
        """The lengths after LLaMA-Factory has cut the records."""
        return replace(self, tokens=tuple(min(each, cutoff) for each in self.tokens))

    def scaled(self, factor: float) -> Lengths:
        """The lengths if each is so many times longer."""
        tokens = tuple(max(1, round(each * factor)) for each in self.tokens)
        return replace(self, tokens=tokens, bytes=self.bytes / factor)


@dataclass(frozen=True)
class Rows:
    """What a pass computes on average.

    Attributes:
        width: tokens of a row, with padding.
        useful: tokens of a row that belong to samples.
        samples: per row.
        widest: tokens of a row of the widest batch; it decides whether the memory suffices.
    """

    width: float
    useful: float
    samples: float
    widest: int

    @property
    def padding(self) -> float:
        """Share of the computed tokens that are padding."""
        return 1 - self.useful / self.width


@lru_cache(maxsize=_KEPT)
def padded(lengths: Lengths, batch: int, *, grouped: bool = False) -> Rows:
    """Rows of batches without packing. ``grouped``: batches hold samples of similar length."""
    drawn = random.Random(0)  # noqa: S311 - an estimate, the same every time
    batches: List[Sequence[int]] = []
    if batch == 1:
        batches = [(each,) for each in lengths.tokens]
    elif grouped:
        for _ in range(max(1, _DRAWS // _SORTED)):
            group = sorted(drawn.choices(lengths.tokens, k=_SORTED * batch), reverse=True)
            batches += [group[at : at + batch] for at in range(0, len(group), batch)]
    else:
        batches = [drawn.choices(lengths.tokens, k=batch) for _ in range(_DRAWS)]
    width = sum(map(_rounded, map(max, batches))) / len(batches)
    return Rows(max(width, lengths.mean), lengths.mean, 1.0, _rounded(lengths.longest))


@lru_cache(maxsize=_KEPT)
def packed(lengths: Lengths, cutoff: int) -> Rows:
    """Rows of packed sequences of ``cutoff`` tokens. Longer samples are cut first, as without packing."""
    room = cutoff - 1  # LLaMA-Factory keeps one position for padding
    tokens = [min(each, room) for each in lengths.tokens]
    rows = sum(_knapsacks(tokens[at : at + _GROUP], room) for at in range(0, len(tokens), _GROUP))
    return Rows(float(cutoff), sum(tokens) / rows, len(tokens) / rows, cutoff)


def _rounded(tokens: int) -> int:
    return -(-tokens // _MULTIPLE) * _MULTIPLE


def _knapsacks(tokens: Sequence[int], room: int) -> int:
    """Number of sequences that LLaMA-Factory's ``greedy_knapsack`` makes."""
    left, count = sorted(tokens), 0
    while left:
        remaining = room
        while (at := bisect.bisect(left, remaining)) > 0:
            remaining -= left.pop(at - 1)
        count += 1
    return count
