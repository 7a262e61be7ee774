"""The data of fine-tuning: conversations in files, packed into rows of whole samples, with a loss on answers only.

A data set is ``FILE`` or ``FILE:WEIGHT``, or a folder with such files. Each set can hold back a share of its samples,
which are evaluated apart from those of other sets. Samples longer than a row are cut, and those without an answer in
the rest are left out.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch

from trainer.lm import chat, data, packing, records, tokenized, tokens
from trainer.lm.batch import IGNORED, Batch, Layout
from trainer.lm.errors import RefusedError
from trainer.lm.tokenized import Tokenized


@dataclass(frozen=True)
class Part:
    """Samples of a data set that fit into a row. ``lengths`` and ``targets`` are those of each sample in a row."""

    source: Tokenized
    weight: float
    numbers: Sequence[int]
    lengths: array[int]
    targets: array[int]


class Packed:
    """A ``Source``: samples of several sets, packed into rows of ``block`` tokens."""

    def __init__(
        self,
        parts: Sequence[Part],
        block: int,
        seed: int,
        epochs: int = 0,
        second: Optional[packing.Second] = None,
    ) -> None:
        weights = [each.weight for each in parts]
        self.plan = packing.Plan([each.lengths for each in parts], weights, block, seed, epochs, second)
        self._parts = list(parts)
        self._firsts = [0]
        self._targets = array("I")
        for each in parts:
            self._firsts.append(self._firsts[-1] + len(each.numbers))
            self._targets.extend(each.targets)
        self._counted: Tuple[int, int, int] = (-1, -1, 0)  # a step, its rows, and its targets

    def steps(self, epochs: int, global_batch: int) -> int:
        """See ``Source``."""
        return packing.steps(self.plan.rows(epochs), global_batch)

    def batches(self, batch: int) -> int:
        """Return the number of batches of an epoch."""
        return -(-self.plan.rows(1) // batch)

    def report(self) -> str:
        """Return a line about the packing of the first epoch."""
        epoch, padding = self.plan.epoch(0), 100 * self.plan.padding()
        facts = (len(epoch.samples), epoch.rows, self.plan.room, padding)
        return "the first epoch has %d samples in %d rows of %d tokens, %.1f %% of them padding" % facts

    def batch(self, layout: Layout, step: int, micro: int) -> Batch:
        """See ``Source``."""
        block = self.plan.room
        numbers = layout.numbers(step, micro)
        found = np.zeros((layout.batch, block), dtype=np.int64)
        targets = np.full((layout.batch, block), IGNORED, dtype=np.int64)
        ends = np.full(layout.batch * (self.plan.most + 1) + 1, layout.batch * block, dtype=np.int32)
        ends[0] = count = 0
        for row, number in enumerate(numbers):
            place = 0
            for sample in self.plan.row(number):
                length = self.plan.lengths[sample]
                source, inside = self.origin(sample)
                read, answers = source.sample(inside, length + 1)
                found[row, place : place + length] = read[:-1]
                targets[row, place : place + length] = np.where(answers[1:], read[1:], IGNORED)
                place += length
                count += 1
                ends[count] = row * block + place
            if place < block:
                count += 1
                ends[count] = (row + 1) * block
        whole = layout.count(self._targets_in(layout, step))
        return Batch(torch.from_numpy(found), torch.from_numpy(targets), torch.from_numpy(ends), whole)

    def origin(self, sample: int) -> Tuple[Tokenized, int]:
        """Return the set of a sample of the plan, and its number there."""
        number = int(np.searchsorted(self._firsts, sample, side="right")) - 1
        part = self._parts[number]
        return part.source, part.numbers[sample - self._firsts[number]]

    def _targets_in(self, layout: Layout, step: int) -> int:
        if self._counted[:2] != (step, layout.rows):
            rows = range(step * layout.rows, (step + 1) * layout.rows)
            total = sum(self._targets[sample] for row in rows for sample in self.plan.row(row))
            self._counted = (step, layout.rows, total)
        return self._counted[2]


@dataclass(frozen=True)
class FineTuningData:
    """Opened data sets: the samples for training, and those held back, by the name of their set.

    ``notes`` are lines for the log, and ``highest`` is the highest token.
    """

    block: int
    train: List[Part]
    held_back: Dict[str, Part]
    notes: List[str]
    highest: int

    def packed(self, seed: int, epochs: int = 0) -> Packed:
        """Return the source for training. Its rows are empty after ``epochs`` epochs; 0: there is no end."""
        return Packed(self.train, self.block, seed, epochs)

    def evaluations(self) -> Dict[str, Packed]:
        """Return a source for the evaluation of each set."""
        return {name: Packed([part], self.block, 0, epochs=1) for name, part in self.held_back.items()}

    def identity(self) -> List[Dict[str, object]]:
        """Identify the data sets independently of their folders, to compare them when a training is resumed."""
        return [
            {
                "name": part.source.name,
                "digest": part.source.digest,
                "weight": part.weight,
                "samples": len(part.numbers),
            }
            for part in self.train
        ]


@dataclass(frozen=True)
class Reading:
    """How data sets are read.

    Attributes:
        model: a folder with ``tokenizer.json`` and ``tokenizer_config.json``.
        block: tokens of a row.
        template: a file, or one of ``chat.BUILT_IN``; empty: the model's own.
        share: of each set, held back for evaluation.
        skips: whether wrong records are left out instead of refused.
        cache: the folder of tokens.
        workers: processes; 0: one per core.
    """

    model: Path
    block: int
    cache: Path
    template: str = ""
    share: float = 0.0
    skips: bool = False
    workers: int = 0


def cache_folder(out: Path) -> Path:
    """Return the folder of tokens: in ``$CLUSTERCTL_CACHE``, or in the folder of the training."""
    named = os.environ.get("CLUSTERCTL_CACHE")
    return Path(named) / "tokens" if named else out / "tokens"


def open_data(named: Sequence[str], evaluated: Sequence[str], reading: Reading) -> FineTuningData:
    """Open data sets for training, and ones only for evaluation.

    Raises:
        RefusedError: a file or a record is wrong, or no sample is left.
    """
    encoding = tokenized.Encoding(
        tokenizer_of(reading.model), chat.load(reading.model, reading.template), reading.skips
    )

    def tokenized_of(path: Path, name: str) -> Tokenized:
        return tokenized.prepare(records.files_of(path), name, encoding, reading.cache, reading.workers)

    return open_sets(named, evaluated, reading, encoding.template.where, tokenized_of)


def open_sets(
    named: Sequence[str],
    evaluated: Sequence[str],
    reading: Reading,
    template: str,
    tokenized_of: Callable[[Path, str], Tokenized],
) -> FineTuningData:
    """Open data sets, as ``open_data`` does. ``tokenized_of`` returns the samples of a path under a name."""
    notes: List[str] = ["conversations use %s" % template]
    train: List[Part] = []
    held_back: Dict[str, Part] = {}
    highest = 0
    for number, each in enumerate([*named, *evaluated]):
        path, weight = data.weighed(each)
        name = _unique(path.name.partition(".")[0], held_back, [part.source.name for part in train])
        source = tokenized_of(path, name)
        highest = max(highest, source.highest)
        part = _fitting(source, weight, reading.block, notes)
        if number >= len(named):
            held_back[name] = part
            continue
        kept, held = packing.held_back(len(part.numbers), reading.share, 0)
        if len(held):
            held_back[name] = _of(part, held, 1.0)
        if not len(kept):
            raise RefusedError("%s: no sample is left for training" % path, "use more records, or a smaller --val")
        train.append(_of(part, kept, weight))
    return FineTuningData(reading.block, train, held_back, notes, highest)


def check_vocabulary(opened: FineTuningData, vocab_size: int, folder: Path) -> None:
    """Compare the tokens of the data with the model's vocabulary.

    Raises:
        RefusedError: a token is outside it.
    """
    if opened.highest >= vocab_size:
        what = "the data has the token %d, but the model in %s has a vocabulary of %d"
        raise RefusedError(
            what % (opened.highest, folder, vocab_size),
            "copy the tokenizer.json that came with the model to %s" % folder,
        )


def tokenizer_of(folder: Path) -> str:
    """Return a model's ``tokenizer.json``."""
    return str(tokens.read_bpe(folder).tokenizer.to_str())


def _unique(name: str, held_back: Dict[str, Part], others: Sequence[str]) -> str:
    taken = {*held_back, *others}
    return next(each for each in (name, *("%s-%d" % (name, n) for n in range(2, len(taken) + 3))) if each not in taken)


def _fitting(source: Tokenized, weight: float, block: int, notes: List[str]) -> Part:
    """Return the samples of a set that have an answer in their first ``block`` + 1 tokens."""
    whole, targets = source.counts
    cut = source.cut(block + 1)
    lengths = cut - 1
    long = np.flatnonzero(cut < whole)
    for number in long:
        targets[number] = int(source.sample(int(number), int(cut[number]))[1][1:].sum())
    kept = np.flatnonzero((targets > 0) & (lengths > 0))
    name, every = source.name, len(lengths)
    if not len(kept):
        raise RefusedError("%s has no sample with an answer in its first %d tokens" % (name, block + 1))
    notes.append("%s: %d samples, %d tokens, %d of them in answers" % (name, len(kept), lengths.sum(), targets.sum()))
    if len(long):
        notes.append("%s: %d of %d samples are longer than %d tokens and are cut" % (name, len(long), every, block + 1))
    if len(kept) < every:
        notes.append("%s: %d samples have no answer in the rest and are left out" % (name, every - len(kept)))
    if source.changed:
        notes.append("%s: %d answers without loss: the template changes them" % (name, source.changed))
    if source.skipped:
        notes.append("%s: %d records skipped; the first: %s" % (name, source.skipped, source.problem))
    as_array = [array("I", each[kept].astype("u4").tolist()) for each in (lengths, targets)]
    return Part(source, weight, array("q", kept.tolist()), *as_array)


def _of(part: Part, chosen: Sequence[int], weight: float) -> Part:
    numbers = array("q", [part.numbers[each] for each in chosen])
    lengths, targets = (array("I", [values[each] for each in chosen]) for values in (part.lengths, part.targets))
    return Part(part.source, weight, numbers, lengths, targets)
