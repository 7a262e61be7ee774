"""Pairs of nodes: in every round each node exchanges with one other, all pairs of a round at once.

``rounds`` lists the rounds; a round lists its pairs of node numbers. The processes of a pair are paired by their local
ranks, both send and receive at the same time, and how many iterations they do is agreed through the store: nothing
that other pairs do at that time is waited for.

The event ``pair`` is told by the process of the pair's first node: ``a``, ``b`` (node numbers), ``local``, ``bytes``
(in each direction), ``times`` and ``wrong``.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

from operations import Exchange
from timing import Ruler, iterations


def partner(counts: List[int], pairs: List[List[int]], rank: int) -> Optional[Tuple[int, int, int, int]]:
    """Whom a rank exchanges with in a round: (first node, second node, local rank, partner's rank); None: it rests."""
    node, local = place(counts, rank)
    for a, b in pairs:
        if node in (a, b) and local < min(counts[a], counts[b]):
            return a, b, local, sum(counts[: b if node == a else a]) + local
    return None


def place(counts: List[int], rank: int) -> Tuple[int, int]:
    """The node that a rank is on, and its local rank."""
    for node, count in enumerate(counts):
        if rank < count:
            return node, rank
        rank -= count
    raise ValueError("there is no such rank")


def measure_pairs(work: Dict[str, Any], rank: int, store: Any, ruler: Ruler, tell: Callable[..., None]) -> None:
    """Do every round."""
    count = work["pair_size"] // 4
    for number, pairs in enumerate(work["rounds"]):
        found = partner(work["counts"], pairs, rank)
        if found is not None:
            a, b, local, other = found
            exchange = Exchange(rank, other, other)
            exchange.fill(count, ruler.device)
            exchange.run()  # connects
            wrong = exchange.wrong()
            key = "round/%d/%d/%d" % (number, a, local)
            if rank < other:
                each = ruler.times(exchange.run, 1)[0]
                store.set(key, str(iterations(work["seconds"], each)))
            else:
                ruler.times(exchange.run, 1)
            times = ruler.times(exchange.run, int(store.get(key)))
            if rank < other:
                tell("pair", a=a, b=b, local=local, bytes=count * 4, times=times, wrong=wrong)
        ruler.sync()
        tell("alive")
