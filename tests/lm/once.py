"""Run by the rehearsal environment's Python: samples that are seen once per epoch. Prints JSON objects."""

import json
import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from trainer.lm import data
from trainer.lm.batch import Layout
from trainer.lm.data import DataSet, Samples

BLOCK = 8
drawn = random.Random(1)


def tell(name, **found):
    sys.stdout.write(json.dumps({"name": name, **found}) + "\n")


# Every size has a permutation, which the key changes.
wrong, orders = 0, set()
for size in [*range(1, 40), 64, 100, 1000, 4097]:
    for key in (1, 2):
        places = np.arange(size, dtype=np.uint64)
        same = (np.full(size, number, dtype=np.uint64) for number in (size, key))
        found = data.permuted(places, *same).tolist()
        wrong += sorted(found) != list(range(size))
        if size == 1000:
            orders.add(tuple(found))
            moved = sum(each != place for place, each in enumerate(found))
tell("permuted", wrong=wrong, orders=len(orders), moved=moved)


def data_set(lengths, weight, first):
    """Shards of numbers, each once."""
    shards = []
    for length in lengths:
        shards.append(np.arange(first, first + length, dtype="<u4"))
        first += length
    return DataSet(Path("x"), weight, 1 << 30, None, None, shards)


one = [data_set([100, 57, 9, 8], 1.0, 0)]
samples = Samples(one, BLOCK, 3, once=True)
count = 12 + 7 + 1
epochs = []
for epoch in range(3):
    tokens, targets = samples.take(range(epoch * count, (epoch + 1) * count))
    assert (targets == tokens + 1).all()
    epochs.append(tokens.flatten().tolist())
again = Samples(one, BLOCK, 3, once=True).take(range(count, 2 * count))[0].flatten().tolist()
tell(
    "epochs",
    repeated=[max(Counter(each).values()) for each in epochs],
    seen=[len(each) for each in epochs],
    same=epochs[1] == again,
    orders=len({tuple(each) for each in epochs}),
)

several = [data_set([8001], 0.7, 0), data_set([803], 0.25, 1_000_000), data_set([4001], 0.05, 2_000_000)]
samples = Samples(several, BLOCK, 3, once=True)
tokens, _ = samples.take(range(3 * data.PERIOD))
firsts = tokens[:, 0].tolist()
shares = [sum(low <= first < low + 1_000_000 for first in firsts) / len(firsts) for low in (0, 1_000_000, 2_000_000)]
of_last = [first for first in firsts if first >= 2_000_000]
tell("shares", shares=shares, repeated=max(Counter(of_last[:400]).values()), seen=len(of_last))

layouts = [[Layout(rank, world, 2, 4 // world) for rank in range(world)] for world in (1, 2, 4)]
steps = [
    [
        [row for layout in ranks for row in samples.batch(layout, step, micro).tokens.tolist()]
        for step in range(20)
        for micro in range(2)
    ]
    for ranks in layouts
]
tell("ranks", same=steps[0] == steps[1] == steps[2])


class Vocabulary:
    end = 0


text = np.array([0 if drawn.random() < 0.2 else 5 for _ in range(5000)], dtype="<u2")
documents = Samples([DataSet(Path("x"), 1.0, 10, Vocabulary(), None, [text])], 64, 3, documents=True)
lengths, problems = set(), 0
for step in range(30):
    batch = documents.batch(Layout(0, 1, 1, 3), step, 0)
    ends, line = batch.ends.tolist(), batch.tokens.flatten().tolist()
    lengths.add(len(ends))
    problems += ends != sorted(ends) or ends[0] != 0 or ends[-1] != 3 * 64 or not {64, 128} <= set(ends)
    problems += any(line[end - 1] != 0 for end in ends[1:] if end % 64)
tell("documents", lengths=len(lengths), problems=problems)
