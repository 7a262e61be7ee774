"""DeepSpeed, loaded without what it would do by itself: talk, look for MPI, compile."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from typing import Any, Iterator

import torch.distributed as dist

from trainer.gpt.errors import RefusedError
from trainer.gpt.ranks import Ranks


def load(ranks: Ranks) -> Any:
    """DeepSpeed, ready to be used by these ranks.

    Raises:
        RefusedError: it is not there.
    """
    os.environ.setdefault("DS_ACCELERATOR", ranks.device.type)
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    try:
        import deepspeed  # noqa: PLC0415 - the plain engine needs none

        theirs = importlib.import_module("deepspeed.comm.torch")  # the attribute of this name is torch itself
    except ImportError as error:
        raise RefusedError("there is no DeepSpeed here: %s" % error, "--engine plain") from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if ranks.device.type == "cpu":
        # It would compile an all-reduce over shared memory, for inference only, which most nodes cannot.
        theirs.build_shm_op = lambda: None  # type: ignore[attr-defined]
    if not dist.is_initialized():
        backend = "nccl" if ranks.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    for name, value in (("RANK", ranks.rank), ("LOCAL_RANK", ranks.local), ("WORLD_SIZE", ranks.world)):
        os.environ.setdefault(name, str(value))  # it asks these, and without them MPI
    return deepspeed


@contextlib.contextmanager
def known() -> Iterator[None]:
    """Around what relies on fields of DeepSpeed's that are its own business.

    Raises:
        RefusedError: they are not as in 0.19.
    """
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        version = importlib.import_module("deepspeed").__version__
        what = "DeepSpeed %s is not as 0.19, for which this engine is written: %s" % (version, error)
        raise RefusedError(what, "--engine plain, or an environment with DeepSpeed 0.19") from error
