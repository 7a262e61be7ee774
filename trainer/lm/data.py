"""Samples from memory-mapped shards of tokens, the feed of batches, and nanoGPT's data sets.

A data set is a folder that ``prepare`` or nanoGPT wrote:

===========================  ==========================================================================================
``train*.bin``, ``val*.bin``  tokens, little endian, nothing else
``meta.json``                ``dtype`` ("uint16" or "uint32"), ``vocab_size`` and the vocabulary's ``digest``
``characters.json``, …       the vocabulary (``tokens.py``)
``meta.pkl``                 nanoGPT's equivalent of ``meta.json``; without either, the tokens are GPT-2's, in uint16
===========================  ==========================================================================================

A sample is ``block + 1`` tokens from anywhere in a shard, or from one of its places without replacement. Its position
depends only on the seed and its number.
The numbers of a step depend on the step and the global batch. So one rank and many ranks see the same samples in a
step, and a resumed training sees the same samples as one that was not interrupted.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import torch

from trainer.lm import tokens
from trainer.lm.batch import Batch, Layout
from trainer.lm.errors import RefusedError

SPLITS = ("train", "val")
_LOOK = 65536  # tokens at each end of a shard to check
_FIX = "python -m trainer.lm.prepare TEXT --out DIR"


@dataclass(frozen=True)
class DataSet:
    """One data set. ``shards`` are arrays of tokens; ``digest`` is None if the vocabulary is unknown."""

    folder: Path
    weight: float
    vocab_size: int
    vocabulary: Optional[tokens.Tokens]
    digest: Optional[str]
    shards: Sequence[Any]


def mixed(numbers: Any) -> Any:
    """Map each uint64 to a pseudo-random one: SplitMix64 (https://prng.di.unimi.it/splitmix64.c)."""
    with np.errstate(over="ignore"):
        z = numbers + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def permuted(places: Any, sizes: Any, keys: Any) -> Any:
    """Map each place below its size to another one, by the permutation that its key determines. All uint64.

    It is a Feistel network on the next even number of bits. A result that is not below the size is mapped again. So a
    place of a permutation of any size is found without the others.
    """
    bits = np.maximum(1, np.ceil(np.log2(np.maximum(sizes, 2).astype(np.float64)) / 2)).astype(np.uint64)
    low = (np.uint64(1) << bits) - np.uint64(1)
    found = places.copy()
    outside = np.ones(len(found), dtype=bool)
    while outside.any():
        left, right = found >> bits, found & low
        for turn in range(4):
            with np.errstate(over="ignore"):
                left, right = right, left ^ (mixed(mixed(keys + np.uint64(turn)) ^ right) & low)
        found = np.where(outside, (left << bits) | right, found)
        outside = found >= sizes
    return found


PERIOD = 4096  # samples in which every data set has its share


class Samples:
    """The samples of one split of all data sets. ``take`` returns them by number.

    With ``once``, no sample of a set is repeated before all others of the set: a shard is divided into samples, of
    which an epoch is a permutation. Without, a sample is anywhere in a shard. With ``documents``, ``batch`` has the
    ends of documents, which the vocabulary's ``end`` follows.
    """

    def __init__(
        self, sets: Sequence[DataSet], block: int, seed: int, once: bool = False, documents: bool = False
    ) -> None:
        self.block = block
        self.once = once
        self._sets = sets
        self._seed = mixed(np.array([seed % 2**64], dtype=np.uint64))[0]
        total = sum(each.weight for each in sets)
        self._set_ends = np.cumsum([each.weight / total for each in sets])
        self._shards: List[List[Any]] = [[shard for shard in each.shards if len(shard) > block] for each in sets]
        self._ends = [np.cumsum([self._places(shard) for shard in shards]) for shards in self._shards]
        self._document_end = _end_of(sets) if documents else None
        self._slots = _slots([each.weight / total for each in sets])

    def _places(self, shard: Any) -> int:
        return (len(shard) - 1) // self.block if self.once else len(shard) - self.block

    def take(self, numbers: Sequence[int]) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return samples by number: the tokens and the next tokens, each (samples, block), int64."""
        asked = np.asarray(numbers, dtype=np.uint64)
        starts = self._permuted_places(asked) if self.once else self._random_places(asked)
        rows = np.empty((len(asked), self.block + 1), dtype=np.int64)
        for row, (each, shard, start) in enumerate(starts):
            rows[row] = self._shards[each][shard][start : start + self.block + 1]
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def _random_places(self, numbers: Any) -> Iterator[Tuple[int, int, int]]:
        keys = mixed(numbers ^ self._seed)
        chances = (keys >> np.uint64(11)).astype(np.float64) / 2**53
        sets = np.minimum(np.searchsorted(self._set_ends, chances, side="right"), len(self._set_ends) - 1)
        for each, place in zip(sets, mixed(keys)):  # noqa: B905 - Python 3.9 has no strict
            ends = self._ends[each]
            yield (int(each), *self._inside(each, int(place % np.uint64(ends[-1]))))

    def _permuted_places(self, numbers: Any) -> Iterator[Tuple[int, int, int]]:
        """Yield the set, the shard and the first token of each sample.

        Each ``PERIOD`` of numbers has as many samples of a set as its share says. A set's samples are numbered through
        all periods. This number, divided by the samples in the set, is an epoch and a place in its permutation.
        """
        turns, places = numbers // np.uint64(PERIOD), numbers % np.uint64(PERIOD)
        if len(self._slots) > 1:
            places = permuted(places, np.full(len(places), PERIOD, dtype=np.uint64), mixed(turns ^ self._seed))
        ends = np.cumsum(self._slots).astype(np.uint64)
        sets = np.searchsorted(ends, places, side="right")
        slots = np.asarray(self._slots, dtype=np.uint64)[sets]
        streams = turns * slots + places - (ends[sets] - slots)
        sizes = np.asarray([each[-1] for each in self._ends], dtype=np.uint64)[sets]
        epochs = streams // sizes
        keys = mixed(mixed(epochs) ^ mixed(self._seed ^ (sets + 1).astype(np.uint64)))
        for each, place, key in zip(sets, permuted(streams % sizes, sizes, keys), keys):  # noqa: B905
            shard, number = self._inside(each, int(place))
            spare = (len(self._shards[each][shard]) - 1) % self.block  # tokens after the last sample
            yield int(each), shard, number * self.block + int(key % np.uint64(spare + 1))

    def _inside(self, each: int, place: int) -> Tuple[int, int]:
        """Return the shard of a place in a set, and the place in this shard."""
        ends = self._ends[each]
        shard = int(np.searchsorted(ends, place, side="right"))
        return shard, place - (int(ends[shard - 1]) if shard else 0)

    @property
    def epoch(self) -> int:
        """The samples of an epoch: as many as all sets have."""
        return sum(int(ends[-1]) for ends in self._ends)

    def steps(self, epochs: int, global_batch: int) -> int:
        """See ``Source``. The last step may have samples of the next epoch."""
        return -(-epochs * self.epoch // global_batch)

    def described(self) -> str:
        """Return a line about an epoch, and how often it has each of several sets."""
        line = "an epoch has %d samples" % self.epoch
        if len(self._sets) == 1:
            return line
        seen = []
        for number, each in enumerate(self._sets):
            drawn = self.epoch * self._slots[number] / PERIOD
            seen.append("%s %.2f times" % (each.folder.name, drawn / int(self._ends[number][-1])))
        return "%s: %s" % (line, ", ".join(seen))

    def batch(self, layout: Layout, step: int, micro: int) -> Batch:
        """See ``Source``."""
        tokens, targets = self.take(layout.numbers(step, micro))
        ends = None if self._document_end is None else _document_ends(tokens.numpy(), self._document_end)
        return Batch(tokens, targets, ends, layout.count(layout.rows * self.block))


SHORT = 32  # tokens of a document: of shorter ones, a row has more ends than a batch can name, and some are joined


def _document_ends(rows: Any, end: int) -> torch.Tensor:
    """Return the ends of the documents in rows: after each end token, and at the end of each row."""
    batch, block = rows.shape
    most = max(8, block // SHORT)
    found = np.full(batch * most + 1, batch * block, dtype=np.int32)
    found[0] = count = 0
    for row, line in enumerate(rows):
        inside = np.flatnonzero(line[:-1] == end)[: most - 1] + 1
        for place in [*inside.tolist(), block]:
            count += 1
            found[count] = row * block + place
    return torch.from_numpy(found)


def _end_of(sets: Sequence[DataSet]) -> int:
    """Return the token that ends a document. nanoGPT's data without a vocabulary have GPT-2's."""
    first = sets[0]
    known = next((each.vocabulary for each in sets if each.vocabulary), None)
    found = known.end if known else tokens.GPT2 - 1 if first.vocab_size == tokens.GPT2 else None
    if found is None:
        what = "--separate-documents: the vocabulary of %s has no token that ends a document" % first.folder
        raise RefusedError(what, "python -m trainer.lm.prepare TEXT --tokens bpe --out DIR; or remove the option")
    return found


def _slots(shares: Sequence[float]) -> List[int]:
    """Divide a period among shares: the whole parts, and one more for the largest remainders. At least one each."""
    slots = [max(1, int(PERIOD * share)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda each: slots[each] - PERIOD * shares[each])
    for number in range(PERIOD - sum(slots)):
        slots[by_remainder[number % len(slots)]] += 1
    while sum(slots) > PERIOD:
        slots[slots.index(max(slots))] -= 1
    return slots


def open_sets(named: Sequence[str], split: str, block: int) -> List[DataSet]:
    """Open the data sets of a command line, each ``DIR`` or ``DIR:WEIGHT``.

    Raises:
        RefusedError: a data set does not exist or is empty, or their vocabularies differ.
    """
    sets = [_open(*weighed(each), split, block) for each in named]
    first = sets[0]
    for each in sets[1:]:
        known = each.digest and first.digest
        if each.vocab_size != first.vocab_size or (known and each.digest != first.digest):
            what = "%s and %s have different vocabularies" % (first.folder, each.folder)
            raise RefusedError(what, "prepare the second with --vocabulary %s" % first.folder)
    return sets


def with_split(named: Sequence[str], split: str) -> List[str]:
    """Return the data sets that have shards of a split."""
    return [each for each in named if _files(weighed(each)[0], split)]


def identity(sets: Sequence[DataSet]) -> List[Dict[str, Any]]:
    """Identify data sets independently of their folders: shares, vocabulary, sizes, and the ends of the shards."""
    total = sum(each.weight for each in sets)
    found = []
    for each in sets:
        digest = hashlib.sha256()
        for shard in each.shards:
            digest.update(b"%d " % len(shard))
            digest.update(shard[:_LOOK].tobytes() + shard[-_LOOK:].tobytes())
        facts = {"folder": str(each.folder), "share": round(each.weight / total, 9), "vocab_size": each.vocab_size}
        count = sum(map(len, each.shards))
        found.append({**facts, "vocabulary": each.digest, "tokens": count, "digest": digest.hexdigest()[:16]})
    return found


MOST = 1000  # the highest weight


def weighed(named: str) -> Tuple[Path, float]:
    """Return the path and the weight of ``PATH`` or ``PATH:WEIGHT``.

    Raises:
        RefusedError: the weight is not more than 0, or more than 1000.
    """
    before, _, after = named.rpartition(":")
    if not before or Path(named).exists():
        return Path(named), 1.0
    try:
        weight = float(after)
    except ValueError:
        return Path(named), 1.0
    if not 0 < weight <= MOST:
        raise RefusedError("--data %s: the weight must be more than 0 and at most %d" % (named, MOST))
    return Path(before), weight


def _files(folder: Path, split: str) -> List[Path]:
    found = [folder / (split + ".bin")] if (folder / (split + ".bin")).is_file() else []
    return found + sorted(folder.glob(split + "-*.bin"))


def _open(folder: Path, weight: float, split: str, block: int) -> DataSet:
    if not folder.is_dir():
        raise RefusedError("--data %s: no such folder" % folder, _FIX)
    kind, size, vocabulary, digest = _described(folder)
    files = _files(folder, split)
    if not files:
        raise RefusedError("%s has no %s.bin" % (folder, split), _FIX)
    shards = [_map(path, kind) for path in files]
    if max(len(shard) for shard in shards) <= block:
        longest = max(files, key=lambda path: path.stat().st_size)
        what = "%s has %d tokens, but a sample needs %d" % (longest, longest.stat().st_size // kind.itemsize, block + 1)
        raise RefusedError(what, "prepare more text, or use a smaller --block-size")
    return DataSet(folder, weight, size, vocabulary, digest, shards)


def _map(path: Path, kind: Any) -> Any:
    size = path.stat().st_size
    if size == 0:
        raise RefusedError("%s is empty" % path, _FIX)
    if size % kind.itemsize:
        raise RefusedError(
            "%s has %d bytes, not a multiple of %d, the bytes per token" % (path, size, kind.itemsize), _FIX
        )
    return np.memmap(path, dtype=kind, mode="r")


def _described(folder: Path) -> Tuple[Any, int, Optional[tokens.Tokens], Optional[str]]:
    path = folder / "meta.json"
    if path.is_file():
        try:
            meta = json.loads(path.read_text(encoding="utf-8"))
            kind, size = np.dtype({"uint16": "<u2", "uint32": "<u4"}[meta["dtype"]]), int(meta["vocab_size"])
            digest = meta.get("digest")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RefusedError("%s cannot be read: %s" % (path, error), _FIX) from error
        vocabulary = tokens.load(folder)
        if vocabulary and digest and vocabulary.digest != digest:
            what = "%s is not the vocabulary of the shards: meta.json names the digest %s, but the file's digest is %s"
            names = (folder / vocabulary.file, digest, vocabulary.digest)
            raise RefusedError(what % names, "restore the %s that was prepared with the shards" % vocabulary.file)
        return kind, size, vocabulary, digest or (vocabulary.digest if vocabulary else None)
    if (folder / "meta.pkl").is_file():
        characters = read_meta(folder / "meta.pkl")
        return np.dtype("<u2"), characters.size, characters, characters.digest
    return np.dtype("<u2"), tokens.GPT2, None, None


def check_tokens(sets: Sequence[DataSet]) -> None:
    """Check the ends of every shard for tokens outside the vocabulary.

    Raises:
        RefusedError: there is one. On a GPU it would only show up as a failed assertion in a kernel.
    """
    for each in sets:
        for shard in each.shards:
            highest = max(int(shard[:_LOOK].max()), int(shard[-_LOOK:].max()))
            if highest >= each.vocab_size:
                what = "%s contains token %d, but its vocabulary has %d tokens" % (
                    each.folder,
                    highest,
                    each.vocab_size,
                )
                raise RefusedError(what, "prepare the data again: its vocabulary and its shards do not match")


_UNPICKLING_ERRORS = (pickle.UnpicklingError, EOFError, OSError, LookupError, TypeError, ValueError, AttributeError)


# nanoGPT's meta.pkl contains a dictionary with vocab_size, itos and stoi
# (https://github.com/karpathy/nanoGPT/blob/master/data/shakespeare_char/prepare.py). These are plain Python objects. A
# pickle that refers to any class or function is refused, because unpickling it could execute code.
class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError("it refers to %s.%s" % (module, name))


def read_meta(path: Path) -> tokens.Characters:
    """Read the vocabulary of a ``meta.pkl``.

    Raises:
        RefusedError: the file is something else, or contains more than data.
    """
    try:
        with path.open("rb") as file:
            meta = _PlainUnpickler(file).load()
        letters = meta["itos"]
        characters = [letters[number] for number in range(len(letters))]
    except _UNPICKLING_ERRORS as error:
        what = "%s is not a vocabulary of nanoGPT: %s" % (path, error)
        raise RefusedError(what, "python -m trainer.lm.prepare TEXT --out DIR") from error
    if not all(isinstance(character, str) for character in characters):
        raise RefusedError("%s is not a vocabulary of nanoGPT" % path)
    return tokens.Characters(characters)
