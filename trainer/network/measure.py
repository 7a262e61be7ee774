"""One rank: connects to the others, runs every operation in every size, and reports the times.

``work``, the first line of stdin: ``backend`` ("nccl" or "gloo"), ``ops`` and ``sizes`` (bytes), ``seconds`` to spend
on each, ``rounds`` of pairs of nodes and ``pair_size``, ``counts`` (processes of each node) and ``timeout``.

Its events, one JSON object per line:

``met``      this rank has reached rank 0's store
``ready``    the ranks have communicated: ``backend``, ``torch``, ``nccl``, ``device``, ``busy`` (bytes of the GPU's
             memory in use by others)
``row``      from rank 0: ``op``, ``bytes``, ``world``, ``times`` (seconds of each iteration, of the slowest rank),
             ``wrong`` (incorrect elements, on all ranks)
``skipped``  from rank 0: ``op``, ``why`` it is not possible
``pair``     from the process of the pair's first node: ``a``, ``b`` (node numbers), ``local``, ``bytes`` (in each
             direction), ``times`` and ``wrong``
``alive``    the rank is running and has no result
``error``    why the rank fails: ``text``

In every round of pairs each node exchanges data with one other, all pairs of a round at once. ``rounds`` lists the
rounds; a round lists its pairs of node numbers. Processes of a pair are matched by local rank, and both send and
receive at the same time. They agree on the number of iterations through the store, so a pair never waits for another
pair.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
from operations import OPERATIONS, Exchange, Operation, UnsupportedError

Emit = Callable[..., None]


def main(events: int) -> int:
    """Measure. ``events`` is the file descriptor for events."""
    work = json.loads(sys.stdin.readline())
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    lock = threading.Lock()

    def emit(event: str, **fields: Any) -> None:
        line = json.dumps(dict(fields, event=event, rank=int(os.environ["RANK"]))).encode() + b"\n"
        with lock:
            os.write(events, line)

    try:
        _measure(work, emit)
    except Exception as error:  # noqa: BLE001 - every error is reported
        text = "%s: %s" % (type(error).__name__, str(error).strip())
        emit("error", text=text)
        print(text, flush=True)  # noqa: T201 - the log of this rank
        return 1
    return 0


def _exit_with_parent() -> None:
    """Exit when stdin ends: the parent holds it open as long as it runs."""
    while os.read(0, 4096):
        pass
    os._exit(3)


def _measure(work: Dict[str, Any], emit: Emit) -> None:
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    timeout = timedelta(seconds=work["timeout"])
    backend = work["backend"]
    device, busy = _device(backend, local)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, rank == 0, timeout)
    emit("met")
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    stopwatch = Stopwatch(device)
    stopwatch.sync()
    facts = {"backend": backend, "torch": torch.__version__, "host": socket.gethostname(), "busy": busy}
    if backend == "nccl":
        facts.update(nccl=".".join(map(str, torch.cuda.nccl.version())), device=torch.cuda.get_device_name(device))
    emit("ready", **facts)
    for op in work.get("ops", ()):
        for size in work["sizes"]:
            try:
                times, wrong = stopwatch.measure(OPERATIONS[op](rank, world, size, device), work["seconds"])
            except UnsupportedError as error:
                emit("skipped" if rank == 0 else "alive", op=op, why=str(error))
                break
            if rank == 0:
                emit("row", op=op, bytes=size // 4 // world * world * 4, world=world, times=times, wrong=wrong)
            else:
                emit("alive")
    if work.get("rounds"):
        measure_pairs(work, rank, store, stopwatch, emit)
    stopwatch.sync()
    dist.destroy_process_group()


def _device(backend: str, local: int) -> Any:
    """Return the device of this rank, and the bytes of its memory that are in use."""
    if backend != "nccl":
        return torch.device("cpu"), 0
    if not torch.cuda.is_available():
        raise RuntimeError("torch %s sees no GPU here" % torch.__version__)
    if local >= torch.cuda.device_count():
        raise RuntimeError("no GPU for local rank %d: torch sees %d" % (local, torch.cuda.device_count()))
    torch.cuda.set_device(local)
    free, total = torch.cuda.mem_get_info()
    return torch.device("cuda", local), total - free


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
