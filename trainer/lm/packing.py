"""Packs samples of different lengths into rows, epoch after epoch. Pure functions of the seed; needs only Python.

An epoch is a random order of all samples. ``pack`` takes a window of this order and puts each sample, the longest
first, into one of a number of rows: the emptiest, or the fullest, whichever leaves less padding in the window. The
samples that do not fit go to the next window. The rows of an epoch are then shuffled.

A row's number is its place in this endless sequence of epochs, so a step's rows depend on the seed, the step and the
global batch alone. To find a row, all earlier epochs are packed again: two seconds for a million samples.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from heapq import heappop, heapreplace
from typing import Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

WINDOW_ROWS = 64  # rows of a window
BOTH_ROWS = 256  # the same of samples with two sizes, whose mean must be that of the data in both
FULL = 0.99  # of a window's tokens: not worth a second attempt


def key_of(*parts: object) -> int:
    """Return a number determined by the parts, for ``shuffle``."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")


def shuffle(values: array[int], key: int) -> None:
    """Shuffle in place (Fisher-Yates). It uses ``random()``, whose sequence Python keeps the same across versions."""
    chance = random.Random(key).random  # noqa: S311 - not for secrets
    for last in range(len(values) - 1, 0, -1):
        other = int(chance() * (last + 1))
        values[last], values[other] = values[other], values[last]


def order(sizes: Sequence[int], weights: Sequence[float], seed: int, epoch: int) -> array[int]:
    """Return the samples of an epoch in random order.

    The samples of all sets are numbered through. A set with the weight 2 is seen twice in each epoch. One with the
    weight 0.5 is seen in every second epoch, half of it in each: no sample is repeated before all others of its set.
    """
    chosen = array("q")
    first = 0
    for number, (size, weight) in enumerate(zip(sizes, weights)):  # noqa: B905 - Python 3.9 has no strict
        start, end = (round(size * weight * each) for each in (epoch, epoch + 1))
        while size and start < end:
            turn, inside = divmod(start, size)
            stop = min(size, inside + end - start)
            if stop - inside == size:
                chosen.extend(range(first, first + size))
            else:  # part of a set: which part, depends on the set's own turns
                drawn = array("q", range(size))
                shuffle(drawn, key_of("set", seed, number, turn))
                chosen.extend(first + each for each in drawn[inside:stop])
            start += stop - inside
        first += size
    shuffle(chosen, key_of("epoch", seed, epoch))
    return chosen


Packed = Tuple[List[List[int]], List[int]]  # rows, and the samples that did not fit


@dataclass(frozen=True)
class Second:
    """A second size of each sample, and the room that a row has for it. Samples of size 0 need none."""

    sizes: Sequence[int]
    room: int


def pack(
    samples: Sequence[int],
    lengths: Sequence[int],
    room: int,
    most: int,
    count: int,
    second: Optional[Second] = None,
) -> Packed:
    """Put samples into ``count`` rows of ``room`` tokens with at most ``most`` samples each.

    ``lengths`` has the length of each sample of the data, between 1 and ``room``. Return the rows, without empty ones,
    and the samples that did not fit.
    """
    if second:
        return _pack_both(samples, lengths, room, most, count, second)
    longest_first = sorted(samples, key=lengths.__getitem__, reverse=True)
    first = _pack_emptiest(longest_first, lengths, room, most, count)
    if _fill(first, lengths) >= FULL * room:
        return first
    other = _pack_fullest(longest_first, lengths, room, most, count)
    return max(first, other, key=lambda packed: _fill(packed, lengths))


def _fill(packed: Packed, lengths: Sequence[int]) -> float:
    rows, _ = packed
    return sum(lengths[sample] for row in rows for sample in row) / len(rows)


def _pack_emptiest(longest_first: Sequence[int], lengths: Sequence[int], room: int, most: int, count: int) -> Packed:
    """Put each sample into the emptiest row: the short ones fill the gaps of all rows."""
    rows: List[List[int]] = [[] for _ in range(count)]
    emptiest = list(range(count))  # a heap of tokens x count + row
    left: List[int] = []
    for sample in longest_first:
        used = emptiest[0] if emptiest else room * count
        length = lengths[sample]
        if used // count + length > room:
            left.append(sample)
            continue
        row = rows[used % count]
        row.append(sample)
        if len(row) < most:
            heapreplace(emptiest, used + length * count)
        else:
            heappop(emptiest)
    return [row for row in rows if row], left


def _pack_fullest(longest_first: Sequence[int], lengths: Sequence[int], room: int, most: int, count: int) -> Packed:
    """Put each sample into the fullest row that has room for it (best fit): better where few samples fill a row."""
    rows: List[List[int]] = []
    by_room: Dict[int, List[int]] = {}  # the numbers of rows by the room left in them
    rooms = 0  # bit n: there is a row with room for n tokens
    left: List[int] = []
    for sample in longest_first:
        length = lengths[sample]
        fitting = rooms >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1
            numbers = by_room[free]
            number = numbers.pop()
            if not numbers:
                rooms &= ~(1 << free)
        elif len(rows) < count:
            free, number = room, len(rows)
            rows.append([])
        else:
            left.append(sample)
            continue
        rows[number].append(sample)
        free -= length
        if free and len(rows[number]) < most:
            by_room.setdefault(free, []).append(number)
            rooms |= 1 << free
    return rows, left


def _pack_both(
    samples: Sequence[int], lengths: Sequence[int], room: int, most: int, count: int, second: Second
) -> Packed:
    """Put samples into rows that have room for both sizes, in the one of three ways that leaves least padding.

    A sample goes into the row whose free rooms are most alike to its sizes in proportion, into the emptiest, or into
    the fullest.
    """
    sizes, other = second.sizes, second.room

    def share(sample: int) -> int:
        return max(lengths[sample] * other, sizes[sample] * room)

    longest_first = sorted(samples, key=share, reverse=True)
    found: List[Packed] = []
    for sign, emptiest in ((-1, False), (1, True), (1, False)):
        found.append(_pack_nearest(longest_first, lengths, room, most, count, second, sign, emptiest))
        if _fill(found[-1], lengths) >= FULL * room:
            break
    return max(found, key=lambda packed: _fill(packed, lengths))


def _pack_nearest(
    longest_first: Sequence[int],
    lengths: Sequence[int],
    room: int,
    most: int,
    count: int,
    second: Second,
    sign: int,
    emptiest: bool,
) -> Packed:
    """Put each sample into the row with room for it whose key is nearest to the sample's.

    A key is the free tokens of a row plus ``sign`` x its free second room, both in units of 1 / (room x second.room) of
    a row. A sample's key is the same of its sizes, or that of an empty row if samples go into the ``emptiest``.
    """
    sizes, other = second.sizes, second.room
    rows: List[List[int]] = [[] for _ in range(count)]
    empty = room * other + sign * other * room
    free = [(empty, row, room, other) for row in range(count)]  # in ascending order
    left: List[int] = []
    for sample in longest_first:
        length, size = lengths[sample], sizes[sample]
        key = length * other + sign * size * room
        high = bisect_left(free, (empty if emptiest else key,))
        low = high - 1
        while low >= 0 or high < len(free):
            if high == len(free) or (low >= 0 and key - free[low][0] < free[high][0] - key):
                place, low = low, low - 1
            else:
                place, high = high, high + 1
            _, row, free_tokens, free_other = free[place]
            if free_tokens >= length and free_other >= size:
                break
        else:
            left.append(sample)
            continue
        del free[place]
        rows[row].append(sample)
        free_tokens, free_other = free_tokens - length, free_other - size
        if free_tokens and len(rows[row]) < most:
            insort(free, (free_tokens * other + sign * free_other * room, row, free_tokens, free_other))
    return [row for row in rows if row], left


def most_per_row(lengths: Sequence[int], room: int) -> int:
    """Return the largest number of samples in a row: a quarter more than a row has on average, and 8."""
    mean = max(1.0, sum(lengths) / max(1, len(lengths)))
    return min(room, int(1.25 * room / mean) + 8)


@dataclass(frozen=True)
class Epoch:
    """The rows of an epoch: row ``n`` has the samples from ``ends[n - 1]`` to ``ends[n]``."""

    samples: array[int]
    ends: array[int]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.ends)

    def row(self, number: int) -> Sequence[int]:
        """Return the samples of a row."""
        return self.samples[self.ends[number - 1] if number else 0 : self.ends[number]]


def pack_epoch(
    samples: Sequence[int], lengths: Sequence[int], room: int, most: int, key: int, second: Optional[Second] = None
) -> Epoch:
    """Pack the samples of an epoch, in their order, and shuffle the rows."""
    rows: List[List[int]] = []
    for window in _windows(samples, lengths, room, most, second):
        rows += window
    places = array("q", range(len(rows)))
    shuffle(places, key)
    packed, ends = array("q"), array("q")
    for place in places:
        packed.extend(rows[place])
        ends.append(len(packed))
    return Epoch(packed, ends)


def _windows(
    samples: Sequence[int], lengths: Sequence[int], room: int, most: int, second: Optional[Second]
) -> Iterator[List[List[int]]]:
    waiting: List[int] = []
    total = 0
    count = BOTH_ROWS if second else WINDOW_ROWS
    for sample in samples:
        waiting.append(sample)
        total += lengths[sample]
        if total >= count * room:
            rows, waiting = pack(waiting, lengths, room, most, count, second)
            total = sum(map(lengths.__getitem__, waiting))
            yield rows
    while waiting:
        rows, waiting = pack(waiting, lengths, room, most, -(-total // room), second)
        total = sum(map(lengths.__getitem__, waiting))
        yield rows


class Plan:
    """The rows of all epochs, by number. After ``epochs`` epochs the rows are empty; 0: there is no end."""

    def __init__(
        self,
        sets: Sequence[Sequence[int]],
        weights: Sequence[float],
        room: int,
        seed: int,
        epochs: int = 0,
        second: Optional[Second] = None,
    ) -> None:
        self.lengths = array("I")
        for each in sets:
            self.lengths.extend(each)
        if max(self.lengths, default=0) > room or min(self.lengths, default=1) < 1:
            raise ValueError("a sample must have between 1 and %d tokens" % room)
        if second and max(second.sizes, default=0) > second.room:
            raise ValueError("a sample must have a second size of %d at most" % second.room)
        self.room = room
        self.second = second
        self.most = most_per_row(self.lengths, room)
        self.epochs = epochs
        self._sizes = [len(each) for each in sets]
        self._weights = list(weights)
        self._seed = seed
        self._first: List[int] = [0]  # the first row of each epoch known so far
        self._packed: Dict[int, Epoch] = {}  # the two newest

    def epoch(self, number: int) -> Epoch:
        """Return the rows of an epoch."""
        if number not in self._packed:
            chosen = order(self._sizes, self._weights, self._seed, number)
            key = key_of("rows", self._seed, number)
            while len(self._packed) > 1:
                del self._packed[min(self._packed)]
            self._packed[number] = pack_epoch(chosen, self.lengths, self.room, self.most, key, self.second)
        return self._packed[number]

    def place(self, row: int) -> Tuple[int, int]:
        """Return a row's epoch and its number there. The epoch is ``epochs`` after the last row."""
        while row >= self._first[-1] and not (self.epochs and len(self._first) > self.epochs):
            found = self.epoch(len(self._first) - 1).rows
            if not found:
                return 0, 0  # no samples at all
            self._first.append(self._first[-1] + found)
        number = bisect_right(self._first, row) - 1
        return number, row - self._first[number]

    def row(self, number: int) -> Sequence[int]:
        """Return the samples of a row."""
        epoch, place = self.place(number)
        if (self.epochs and epoch >= self.epochs) or not self.lengths:
            return ()
        return self.epoch(epoch).row(place)

    def rows(self, epochs: int) -> int:
        """Return the number of rows in the first epochs."""
        while len(self._first) <= epochs:
            self._first.append(self._first[-1] + self.epoch(len(self._first) - 1).rows)
        return self._first[epochs]

    def padding(self, epoch: int = 0) -> float:
        """Return the share of an epoch's tokens that are padding."""
        return self._padding(epoch, self.lengths, self.room)

    def padding_of_second(self, epoch: int = 0) -> float:
        """Return the share of an epoch's room for second sizes that is padding."""
        return self._padding(epoch, self.second.sizes, self.second.room) if self.second else 0.0

    def _padding(self, epoch: int, sizes: Sequence[int], room: int) -> float:
        packed = self.epoch(epoch)
        return 1 - sum(map(sizes.__getitem__, packed.samples)) / max(1, packed.rows * room)


def steps(rows: int, global_batch: int) -> int:
    """Return the number of steps for a number of rows. The last step may have empty rows."""
    return -(-rows // global_batch)


def held_back(size: int, share: float, seed: int) -> Tuple[array[int], array[int]]:
    """Divide the samples of a set into those for training and those for evaluation, both in ascending order."""
    places = array("q", range(size))
    shuffle(places, key_of("held back", seed))
    count = min(size, round(size * share))
    return _ascending(places[count:]), _ascending(places[:count])


def _ascending(values: Iterable[int]) -> array[int]:
    return array("q", sorted(values))
