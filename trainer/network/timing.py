"""How long an operation takes: on a GPU by the GPU's own clock, so that nothing waits between the iterations."""

from __future__ import annotations

import time
from typing import Any, Callable, List, Tuple

import torch
import torch.distributed as dist
from operations import Operation, UnsupportedError

LEAST = 5  # iterations, for a median and a spread
MOST = 200


def iterations(seconds: float, each: float) -> int:
    """How many iterations fill ``seconds``, when one takes ``each``."""
    return max(LEAST, min(MOST, int(seconds / max(each, 1e-9))))


class Ruler:
    """Measures operations of all ranks; every rank calls the same methods in the same order."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def sync(self) -> None:
        """Wait for all ranks."""
        self.agree([0.0])

    def agree(self, numbers: List[float], op: Any = dist.ReduceOp.MAX) -> List[float]:
        """The numbers of the rank with the largest ones; each of them on its own."""
        shared = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, op)
        return [float(number) for number in shared.tolist()]

    def measure(self, operation: Operation, seconds: float) -> Tuple[List[float], int]:
        """The seconds of every iteration, of the slowest rank; and how many elements came out wrong.

        Raises:
            UnsupportedError: this torch cannot do it; on every rank alike.
        """
        operation.fill()
        try:
            operation.run()
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            if not says_unsupported(error):
                raise
            raise UnsupportedError(str(error).strip().splitlines()[0]) from error
        wrong = int(self.agree([operation.wrong()], dist.ReduceOp.SUM)[0])
        self.sync()
        count = iterations(seconds, self.agree(self.times(operation.run, 1))[0])
        self.sync()
        return self.agree(self.times(operation.run, count)), wrong

    def times(self, run: Callable[[], None], count: int) -> List[float]:
        """The seconds of ``count`` iterations on this rank, one after the other."""
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


def says_unsupported(error: Exception) -> bool:
    """Whether an error means "not with this backend" rather than "it failed"."""
    text = str(error).lower()
    lacking = ("not support", "unsupported", "not implemented", "no attribute")
    return isinstance(error, (AttributeError, NotImplementedError)) or any(each in text for each in lacking)
