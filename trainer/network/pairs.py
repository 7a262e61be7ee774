"""Pairs of nodes: in every round each node exchanges data with one other, all pairs of a round at once.

``rounds`` lists the rounds; a round lists its pairs of node numbers. Processes of a pair are matched by local rank, and
both send and receive at the same time. They agree on the number of iterations through the store, so a pair never waits
for another pair.

The process of the pair's first node emits the event ``pair``: ``a``, ``b`` (node numbers), ``local``, ``bytes`` (in
each direction), ``times`` and ``wrong``.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

from operations import Exchange
from timing import Stopwatch, iterations


def partner(counts: List[int], pairs: List[List[int]], rank: int) -> Optional[Tuple[int, int, int, int]]:
    """A rank's exchange in a round: (first node, second node, local rank, partner's rank); None: it is idle."""
    node, local = locate(counts, rank)
    for a, b in pairs:
        if node in (a, b) and local < min(counts[a], counts[b]):
            return a, b, local, sum(counts[: b if node == a else a]) + local
    return None


def locate(counts: List[int], rank: int) -> Tuple[int, int]:
    """Return the node of a rank, and its local rank."""
    for node, count in enumerate(counts):
        if rank < count:
            return node, rank
        rank -= count
    raise ValueError("no such rank")


def measure_pairs(work: Dict[str, Any], rank: int, store: Any, stopwatch: Stopwatch, emit: Callable[..., None]) -> None:
    """Run every round."""
    count = work["pair_size"] // 4
    for number, pairs in enumerate(work["rounds"]):
        found = partner(work["counts"], pairs, rank)
        if found is not None:
            a, b, local, other = found
            exchange = Exchange(rank, other, other)
            exchange.fill(count, stopwatch.device)
            exchange.run()  # connects
            wrong = exchange.wrong()
            key = "round/%d/%d/%d" % (number, a, local)
            if rank < other:
                each = stopwatch.times(exchange.run, 1)[0]
                store.set(key, str(iterations(work["seconds"], each)))
            else:
                stopwatch.times(exchange.run, 1)
            times = stopwatch.times(exchange.run, int(store.get(key)))
            if rank < other:
                emit("pair", a=a, b=b, local=local, bytes=count * 4, times=times, wrong=wrong)
        stopwatch.sync()
        emit("alive")
