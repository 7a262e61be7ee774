"""Loads DeepSpeed without its log output, its search for MPI, and its compilation at import."""

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
    """Import DeepSpeed and prepare it for these ranks.

    Raises:
        RefusedError: it is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", ranks.device.type)
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    try:
        import deepspeed  # noqa: PLC0415 - the plain engine does not need it

        theirs = importlib.import_module("deepspeed.comm.torch")  # the attribute of this name is torch itself
    except ImportError as error:
        raise RefusedError("DeepSpeed is not installed: %s" % error, "use --engine plain") from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if ranks.device.type == "cpu":
        # It would compile an all-reduce over shared memory for inference, which most nodes cannot compile.
        theirs.build_shm_op = lambda: None  # type: ignore[attr-defined]
    if not dist.is_initialized():
        backend = "nccl" if ranks.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    for name, value in (("RANK", ranks.rank), ("LOCAL_RANK", ranks.local), ("WORLD_SIZE", ranks.world)):
        os.environ.setdefault(name, str(value))  # without these it asks MPI
    return deepspeed


@contextlib.contextmanager
def known() -> Iterator[None]:
    """Wrap code that uses private fields of DeepSpeed.

    Raises:
        RefusedError: they differ from those of 0.19.
    """
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        version = importlib.import_module("deepspeed").__version__
        what = "DeepSpeed %s differs from 0.19, which this engine needs: %s" % (version, error)
        raise RefusedError(what, "use --engine plain, or an environment with DeepSpeed 0.19") from error
