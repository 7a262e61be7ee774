"""torchrun on a script or a module, as ``python -m torch.distributed.run`` with a static rendezvous.

Nodes may start different numbers of processes: each agent tells its count to rank 0, which hands out consecutive ranks
(torch 2.13, ``elastic/agent/server/api.py``: ``_assign_worker_ranks``). LOCAL_RANK counts from 0 on every node.

A script that was typed behind ``torch.distributed.launch`` gets what that gives it, ``--local-rank N``.
"""

from __future__ import annotations

from typing import Any

from provision.launchers._plans import PORT, launched, plan, ranks
from provision.run import Launch, RunSpec


def launch(spec: RunSpec) -> Launch:
    """One plan for each node."""
    return launched(spec, [_plan(spec, rank) for rank in range(len(spec.workers))])


def options(spec: RunSpec, rank: int) -> list[str]:
    """Torchrun's options on one node."""
    return [
        *("--nnodes", str(len(spec.workers)), "--node-rank", str(rank)),
        *("--nproc-per-node", str(spec.workers[rank].processes)),
        *("--master-addr", spec.master, "--master-port", PORT),
        *("--log-dir", ranks(spec, rank), "--redirects", "3"),  # both streams of every rank into files
    ]


def _plan(spec: RunSpec, rank: int) -> dict[str, Any]:
    job = spec.job
    module = "torch.distributed.launch" if job.local_rank else "torch.distributed.run"
    argv = [
        *(f"{spec.prefix}/bin/python", "-m", module, *options(spec, rank), *job.launcher_args),
        *(["-m"] if job.kind == "module" else []),
        *(spec.config, *job.args),
    ]
    return plan(spec, rank, argv)
