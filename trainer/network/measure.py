"""One rank: meets the others, does every operation in every size, and says how long each took.

What it does (``work``, the first line of stdin): ``backend`` ("nccl" or "gloo"), ``ops`` and ``sizes`` (bytes),
``seconds`` to spend on each, ``rounds`` of pairs of nodes and ``pair_size`` (see ``pairs``), ``counts`` (processes of
each node) and ``timeout``.

Its events, one JSON object a line:

``met``      this rank reached rank 0's store
``ready``    the ranks have sent each other something: ``backend``, ``torch``, ``nccl``, ``device``, ``busy`` (bytes of
             the GPU's memory that others hold)
``row``      of rank 0: ``op``, ``bytes``, ``world``, ``times`` (seconds of each iteration, of the slowest rank),
             ``wrong`` (elements that were not what they should be, on all ranks)
``skipped``  of rank 0: ``op``, ``why`` it cannot be done
``pair``     see ``pairs``
``alive``    there is no more to say than that
``error``    why it fails: ``text``
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
from timing import Ruler

Tell = Callable[..., None]


def main(events: int) -> int:
    """Measure; ``events`` is the file descriptor that events go to."""
    work = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    lock = threading.Lock()

    def tell(event: str, **fields: Any) -> None:
        line = json.dumps(dict(fields, event=event, rank=int(os.environ["RANK"]))).encode() + b"\n"
        with lock:
            os.write(events, line)

    try:
        _measure(work, tell)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        text = "%s: %s" % (type(error).__name__, str(error).strip())
        tell("error", text=text)
        print(text, flush=True)  # noqa: T201 - the log of this rank
        return 1
    return 0


def _end_with_parent() -> None:
    """The process that started this one holds its stdin open as long as it lives."""
    while os.read(0, 4096):
        pass
    os._exit(3)


def _measure(work: Dict[str, Any], tell: Tell) -> None:
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    timeout = timedelta(seconds=work["timeout"])
    backend = work["backend"]
    device, busy = _device(backend, local)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, rank == 0, timeout)
    tell("met")
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    ruler = Ruler(device)
    ruler.sync()
    facts = {"backend": backend, "torch": torch.__version__, "host": socket.gethostname(), "busy": busy}
    if backend == "nccl":
        facts.update(nccl=".".join(map(str, torch.cuda.nccl.version())), device=torch.cuda.get_device_name(device))
    tell("ready", **facts)
    for op in work.get("ops", ()):
        for size in work["sizes"]:
            try:
                times, wrong = ruler.measure(OPERATIONS[op](rank, world, size, device), work["seconds"])
            except UnsupportedError as error:
                tell("skipped" if rank == 0 else "alive", op=op, why=str(error))
                break
            if rank == 0:
                tell("row", op=op, bytes=size // 4 // world * world * 4, world=world, times=times, wrong=wrong)
            else:
                tell("alive")
    if work.get("rounds"):
        measure_pairs(work, rank, store, ruler, tell)
    ruler.sync()
    dist.destroy_process_group()


def _device(backend: str, local: int) -> Any:
    """The device of this rank, and how many bytes of its memory are taken already."""
    if backend != "nccl":
        return torch.device("cpu"), 0
    if not torch.cuda.is_available():
        raise RuntimeError("torch %s sees no GPU here" % torch.__version__)
    if local >= torch.cuda.device_count():
        raise RuntimeError("there is no GPU for local rank %d: torch sees %d" % (local, torch.cuda.device_count()))
    torch.cuda.set_device(local)
    free, total = torch.cuda.mem_get_info()
    return torch.device("cuda", local), total - free
