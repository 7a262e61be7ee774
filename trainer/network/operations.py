"""The operations that are measured, each with a check of its result.

A size is what NCCL's own tests call S (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): the bytes
of the buffer, which for all-gather and reduce-scatter is the one that holds the share of every rank. Elements are
float32 and small whole numbers, so that sums are exact in whatever order they are made.
"""

from __future__ import annotations

from typing import Any, Dict, List, Type

import torch
import torch.distributed as dist


class UnsupportedError(Exception):
    """This torch cannot do an operation with this backend."""


def pattern(count: int, device: Any, start: int = 0) -> Any:
    """``count`` numbers that do not look alike where a piece is out of its place."""
    return (torch.arange(start, start + count, dtype=torch.int32, device=device) % 31).float()


class Operation:
    """One operation in one size: ``fill``, then ``run``, then ``wrong``."""

    def __init__(self, rank: int, world: int, size: int, device: Any) -> None:
        self.rank = rank
        self.world = world
        self.device = device
        self.share = max(1, size // 4 // world)  # elements of one rank, where each has its own
        self.count = self.share * world

    def fill(self) -> None:
        """Give the buffers what ``wrong`` expects to come of it."""
        raise NotImplementedError

    def run(self) -> None:
        """Do it once."""
        raise NotImplementedError

    def wrong(self) -> int:
        """How many elements are not as they should be, after one ``run``."""
        raise NotImplementedError

    def _sum(self, start: int, count: int) -> Any:
        """What the patterns of all ranks add up to, each of which is raised by its rank."""
        return pattern(count, self.device, start) * self.world + self.world * (self.world - 1) // 2


class AllReduce(Operation):
    """Everyone gets the sum of all."""

    def fill(self) -> None:
        """See ``Operation``."""
        self.data = pattern(self.count, self.device) + self.rank

    def run(self) -> None:
        """See ``Operation``."""
        dist.all_reduce(self.data)

    def wrong(self) -> int:
        """See ``Operation``. What is left are zeros: sums of sums would grow beyond all bounds."""
        found = int((self.data != self._sum(0, self.count)).sum())
        self.data.zero_()
        return found


class AllGather(Operation):
    """Everyone gets the share of each."""

    def fill(self) -> None:
        """See ``Operation``."""
        self.mine = pattern(self.share, self.device) + self.rank
        self.data = torch.full((self.count,), -1.0, device=self.device)

    def run(self) -> None:
        """See ``Operation``."""
        dist.all_gather_into_tensor(self.data, self.mine)

    def wrong(self) -> int:
        """See ``Operation``."""
        shares = self.data.view(self.world, self.share)
        first = pattern(self.share, self.device)
        return sum(int((shares[rank] != first + rank).sum()) for rank in range(self.world))


class ReduceScatter(Operation):
    """Everyone gets its share of the sum of all."""

    def fill(self) -> None:
        """See ``Operation``."""
        self.data = pattern(self.count, self.device) + self.rank
        self.mine = torch.full((self.share,), -1.0, device=self.device)

    def run(self) -> None:
        """See ``Operation``."""
        dist.reduce_scatter_tensor(self.mine, self.data)

    def wrong(self) -> int:
        """See ``Operation``."""
        return int((self.mine != self._sum(self.rank * self.share, self.share)).sum())


class Broadcast(Operation):
    """Everyone gets what rank 0 has."""

    def fill(self) -> None:
        """See ``Operation``."""
        self.data = pattern(self.count, self.device) + self.rank

    def run(self) -> None:
        """See ``Operation``."""
        dist.broadcast(self.data, 0)

    def wrong(self) -> int:
        """See ``Operation``."""
        return int((self.data != pattern(self.count, self.device)).sum())


class SendRecv(Operation):
    """Everyone sends to the next rank and receives from the one before, both at once."""

    def fill(self) -> None:
        """See ``Operation``."""
        if self.world < 2:
            raise UnsupportedError("there is nobody to send to: one process")
        self.peers = Exchange(self.rank, (self.rank + 1) % self.world, (self.rank - 1) % self.world)
        self.peers.fill(self.count, self.device)

    def run(self) -> None:
        """See ``Operation``."""
        self.peers.run()

    def wrong(self) -> int:
        """See ``Operation``."""
        return self.peers.wrong()


class Exchange:
    """One rank sends to another and receives from one at the same time."""

    def __init__(self, rank: int, to: int, source: int) -> None:
        self.rank = rank
        self.to = to
        self.source = source

    def fill(self, count: int, device: Any) -> None:
        """See ``Operation``."""
        self.expected = pattern(count, device) + self.source
        self.sent = pattern(count, device) + self.rank
        self.received = torch.full((count,), -1.0, device=device)

    def run(self) -> None:
        """See ``Operation``."""
        both: List[Any] = [
            dist.P2POp(dist.isend, self.sent, self.to),
            dist.P2POp(dist.irecv, self.received, self.source),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    def wrong(self) -> int:
        """See ``Operation``."""
        return int((self.received != self.expected).sum())


OPERATIONS: Dict[str, Type[Operation]] = {
    "all_reduce": AllReduce,
    "all_gather": AllGather,
    "reduce_scatter": ReduceScatter,
    "broadcast": Broadcast,
    "sendrecv": SendRecv,
}
