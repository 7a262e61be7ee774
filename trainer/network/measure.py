"""One rank: connects to the others, runs every operation in every size, and reports the times.

``work``, the first line of stdin: ``backend`` ("nccl" or "gloo"), ``ops`` and ``sizes`` (bytes), ``seconds`` to spend
on each, ``rounds`` of pairs of nodes and ``pair_size`` (see ``pairs``), ``counts`` (processes of each node) and
``timeout``.

Its events, one JSON object per line:

``met``      this rank has reached rank 0's store
``ready``    the ranks have communicated: ``backend``, ``torch``, ``nccl``, ``device``, ``busy`` (bytes of the GPU's
             memory in use by others)
``row``      from rank 0: ``op``, ``bytes``, ``world``, ``times`` (seconds of each iteration, of the slowest rank),
             ``wrong`` (incorrect elements, on all ranks)
``skipped``  from rank 0: ``op``, ``why`` it is not possible
``pair``     see ``pairs``
``alive``    the rank is running and has no result
``error``    why the rank fails: ``text``
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from datetime import timedelta
from typing import Any, Callable, Dict

import torch
import torch.distributed as dist
from operations import OPERATIONS, UnsupportedError
from pairs import measure_pairs
from timing import Stopwatch

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
