# ruff: noqa: T201 - a program that prints
"""A training for tests of stragglers: DistributedDataParallel over gloo, a DataLoader, and little work for a core.

    torchrun … uneven.py --steps 1000 [--step 0.2] [--read FILE]

A step takes ``--step`` seconds: some computing, and a wait without a processor in place of the device's time. A file
``slow-RANK`` in the folder ``--faults`` makes the data loader of this rank sleep for the seconds in it, for each batch.
With ``--read``, every batch reads the file from its disk, past the cache.
"""

from __future__ import annotations

import argparse
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Batches(IterableDataset):
    """Batches whose making takes as long as a file says."""

    def __init__(self, given: argparse.Namespace, rank: int) -> None:
        self.fault = given.faults / f"slow-{rank}"
        self.read, self.steps = given.read, given.steps
        self.space = mmap.mmap(-1, 256 << 10)  # aligned, as reading past the cache needs

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.steps):
            if self.fault.exists():
                time.sleep(float(self.fault.read_text()))
            if self.read:
                fd = os.open(self.read, os.O_RDONLY | os.O_DIRECT)
                os.readv(fd, [self.space])
                os.close(fd)
            yield torch.randn(64)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--step", type=float, default=0.2)
    parser.add_argument("--work", type=float, default=0.02, help="seconds of a processor in a step")
    parser.add_argument("--width", type=int, default=256, help="of the model: it sends 4 * 64 * width bytes")
    parser.add_argument("--workers", type=int, default=0, help="of the data loader")
    parser.add_argument("--faults", type=Path, default=Path())
    parser.add_argument("--read", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(64, given.width))
    loader = DataLoader(Batches(given, rank), batch_size=1, num_workers=given.workers, prefetch_factor=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    device = threading.Event()
    for step, batch in enumerate(loader, 1):
        until = time.thread_time() + given.work
        while time.thread_time() < until:
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))
        device.wait(given.step - given.work)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}/{given.steps} loss {float(loss):.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
