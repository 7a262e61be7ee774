"""Times operations. On a GPU it uses the GPU's clock, so that nothing waits between iterations."""

from __future__ import annotations

import time
from typing import Any, Callable, List, Tuple

import torch
import torch.distributed as dist
from operations import Operation, UnsupportedError

LEAST = 5  # iterations, for a median and a spread
MOST = 200


def iterations(seconds: float, each: float) -> int:
    """Return how many iterations of ``each`` seconds fill ``seconds``."""
    return max(LEAST, min(MOST, int(seconds / max(each, 1e-9))))


class Stopwatch:
    """Times operations of all ranks. Every rank calls the same methods in the same order."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def sync(self) -> None:
        """Wait for all ranks."""
        self.agree([0.0])

    def agree(self, numbers: List[float], op: Any = dist.ReduceOp.MAX) -> List[float]:
        """Reduce each number over all ranks, by default to its maximum."""
        shared = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, op)
        return [float(number) for number in shared.tolist()]

    def measure(self, operation: Operation, seconds: float) -> Tuple[List[float], int]:
        """Return the seconds of every iteration, of the slowest rank, and the number of wrong elements.

        Raises:
            UnsupportedError: this torch does not support the operation; raised on every rank.
        """
        operation.fill()
        try:
            operation.run()
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            if not means_unsupported(error):
                raise
            raise UnsupportedError(str(error).strip().splitlines()[0]) from error
        wrong = int(self.agree([operation.wrong()], dist.ReduceOp.SUM)[0])
        self.sync()
        count = iterations(seconds, self.agree(self.times(operation.run, 1))[0])
        self.sync()
        return self.agree(self.times(operation.run, count)), wrong

    def times(self, run: Callable[[], None], count: int) -> List[float]:
        """Return the seconds of ``count`` consecutive iterations on this rank."""
        if self.device.type != "cuda":
            marks = [time.perf_counter()]
            for _ in range(count):
                run()
                marks.append(time.perf_counter())
            return [marks[index + 1] - marks[index] for index in range(count)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        torch.cuda.synchronize(self.device)
        return [events[index].elapsed_time(events[index + 1]) / 1e3 for index in range(count)]


def means_unsupported(error: Exception) -> bool:
    """Whether an error means that the backend lacks the operation, rather than that it failed."""
    text = str(error).lower()
    lacking = ("not support", "unsupported", "not implemented", "no attribute")
    return isinstance(error, (AttributeError, NotImplementedError)) or any(each in text for each in lacking)
