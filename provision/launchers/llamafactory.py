"""LLaMA-Factory: ``llamafactory-cli train CONFIG`` on every node, without ``llamafactory-cli``.

Its launcher (0.9.5, ``llamafactory/launcher.py``) builds a torchrun command as one string and splits it at spaces, so
that a path with a space breaks it, and a signal to it does not reach torchrun. This starts the same torchrun on the
same file, whose ``__main__`` is the training; ``-m`` finds it wherever the release keeps it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from provision.errors import UsageError
from provision.launchers import UNSET, caches, environment, notices, refuse
from provision.run import WORK, Launch

if TYPE_CHECKING:
    from provision.run import RunSpec

_TRUE = ("1", "y", "true")  # llamafactory.extras.misc.is_env_enabled
# What llamafactory-cli sets unless OPTIM_TORCH is off.
_OPTIMIZED = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}


def launch(spec: RunSpec) -> Launch:
    """One plan for each node.

    Raises:
        PreflightError: a node that cannot take part.
        UsageError: the user's environment asks for what is not supported.
    """
    if spec.env.get("USE_V1", "0").lower() in _TRUE:
        raise UsageError("USE_V1: LLaMA-Factory's v1 trainers are not supported", hint="take USE_V1 out of train.env")
    refuse(spec)
    return Launch(tuple(_plan(spec, rank) for rank in range(len(spec.workers))), notices(spec))


def _plan(spec: RunSpec, rank: int) -> dict[str, Any]:
    worker = spec.workers[rank]
    logs = f"{spec.folder}/logs/node{rank}"
    defaults = {"FORCE_TORCHRUN": "1"}
    if spec.env.get("OPTIM_TORCH", "1").lower() in _TRUE:
        defaults |= _OPTIMIZED
    torchrun = [
        *("--nnodes", str(len(spec.workers)), "--node-rank", str(rank)),
        *("--nproc-per-node", str(worker.processes)),
        *("--master-addr", spec.master, "--master-port", str(spec.port)),
        *("--log-dir", f"{logs}/ranks", "--redirects", "3"),  # both streams of every rank into files
    ]
    return {
        "run": spec.id,
        "node": worker.node.name,
        "node_rank": rank,
        "nnodes": len(spec.workers),
        "argv": [
            *(f"{spec.prefix}/bin/python", "-m", "torch.distributed.run", *torchrun),
            *("-m", "llamafactory.launcher", spec.config),
        ],
        "env": environment(spec, rank, defaults),
        "unset": list(UNSET),
        "cwd": f"{spec.folder}/{WORK}",
        "logs": logs,
        "rank_logs": f"{logs}/ranks",
        "first_rank": sum(before.processes for before in spec.workers[:rank]),
        "progress": spec.progress if rank == 0 else None,  # only rank 0 writes it, and nodes may share the folder
        "private": list(caches(spec, worker)),
        "grace": spec.grace,
    }
