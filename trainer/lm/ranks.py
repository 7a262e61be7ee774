"""The processes of a training: this process's rank, and what all ranks agree on.

``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` have torchrun's meaning. Without them
there is one process, which needs no network.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainer.lm.errors import RefusedError

# torch 2.13 renamed these functions.
all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

TIMEOUT = timedelta(minutes=30)  # ranks may wait for rank 0 to write a large checkpoint to a slow disk


@dataclass(frozen=True)
class Ranks:
    """This process among all ranks."""

    rank: int
    local: int
    world: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the output."""
        return self.rank == 0

    @property
    def is_first_here(self) -> bool:
        """Whether this is the first rank on its node."""
        return self.local == 0

    def gather(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return a row of numbers for each rank, shape (world, n), on the device, without waiting for the GPU."""
        if self.world == 1:
            return numbers.detach().unsqueeze(0)
        rows = torch.empty(self.world, numbers.numel(), dtype=numbers.dtype, device=numbers.device)
        all_gather(rows.view(-1), numbers.detach().contiguous())
        return rows

    def all(self, mine: bool) -> bool:
        """Whether ``mine`` is true on every rank. Also a barrier."""
        flag = torch.tensor([1.0 if mine else 0.0], device=self.device)
        return bool(self.gather(flag).min().item())

    def join_alone(self) -> None:
        """Form a group of this rank alone, for libraries that need a group, if there are no other ranks."""
        if not dist.is_initialized():
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def join(device: str) -> Ranks:
    """Connect to the other ranks.

    Raises:
        RefusedError: the device is not available.
    """
    rank, local, world = (int(os.environ.get(name) or default) for name, default in _NAMES)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        if not torch.cuda.is_available():
            raise RefusedError("--device cuda: torch %s sees no GPU here" % torch.__version__, "--device cpu")
        if local >= torch.cuda.device_count():
            what = "no GPU for local rank %d: torch sees %d" % (local, torch.cuda.device_count())
            raise RefusedError(what, "torchrun --nproc-per-node %d" % torch.cuda.device_count())
        torch.cuda.set_device(local)
    where = torch.device(device, local) if device == "cuda" else torch.device("cpu")
    if world > 1 and not dist.is_initialized():
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            what = "WORLD_SIZE is %d, but %s is not set" % (world, " and ".join(missing))
            raise RefusedError(what, "start it with torchrun, or unset WORLD_SIZE")
        named = {"device_id": where} if device == "cuda" else {}
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=TIMEOUT, **named)
    return Ranks(rank, local, world, where)


def leave() -> None:
    """Disconnect from the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


_NAMES = (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
