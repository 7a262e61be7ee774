"""The operations to measure, each with a check of its result.

A size has the meaning of S in NCCL's tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): the
bytes of the buffer; for all-gather and reduce-scatter of the buffer with the shares of all ranks. Elements are float32
and small whole numbers, so that sums are exact in any order.
"""

from __future__ import annotations

from typing import Any, Dict, List, Type

import torch
import torch.distributed as dist


class UnsupportedError(Exception):
    """This torch does not support an operation with this backend."""


def pattern(count: int, device: Any, start: int = 0) -> Any:
    """Return ``count`` numbers in which a misplaced part is visible."""
    return (torch.arange(start, start + count, dtype=torch.int32, device=device) % 31).float()


class Operation:
    """One operation in one size: call ``fill``, then ``run``, then ``wrong``."""

    def __init__(self, rank: int, world: int, size: int, device: Any) -> None:
        self.rank = rank
        self.world = world
        self.device = device
        self.share = max(1, size // 4 // world)  # elements per rank
        self.count = self.share * world

    def fill(self) -> None:
        """Fill the buffers with the input."""
        raise NotImplementedError

    def run(self) -> None:
        """Run the operation once."""
        raise NotImplementedError

    def wrong(self) -> int:
        """Return the number of incorrect elements after one ``run``."""
        raise NotImplementedError

    def _sum(self, start: int, count: int) -> Any:
        """Return the sum of all ranks' patterns, each shifted by its rank."""
        return pattern(count, self.device, start) * self.world + self.world * (self.world - 1) // 2


class AllReduce(Operation):
    """Every rank gets the sum of all."""

    def fill(self) -> None:
        """See ``Operation``."""
        self.data = pattern(self.count, self.device) + self.rank

    def run(self) -> None:
        """See ``Operation``."""
        dist.all_reduce(self.data)

    def wrong(self) -> int:
        """See ``Operation``. Resets the data to zeros: repeated sums would overflow."""
        found = int((self.data != self._sum(0, self.count)).sum())
        self.data.zero_()
        return found


class AllGather(Operation):
    """Every rank gets the share of each."""

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
    """Every rank gets its share of the sum of all."""

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
    """Every rank gets rank 0's data."""

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
    """Every rank sends to the next and receives from the previous one, at the same time."""

    def fill(self) -> None:
        """See ``Operation``."""
        if self.world < 2:
            raise UnsupportedError("there is only one process")
        self.peers = Exchange(self.rank, (self.rank + 1) % self.world, (self.rank - 1) % self.world)
        self.peers.fill(self.count, self.device)

    def run(self) -> None:
        """See ``Operation``."""
        self.peers.run()

    def wrong(self) -> int:
        """See ``Operation``."""
        return self.peers.wrong()


class Exchange:
    """One rank sends to one rank and receives from one at the same time."""

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
