"""torchrun on a script or a module, as ``python -m torch.distributed.run`` with a static rendezvous.

Nodes may start different numbers of processes: each torchrun reports its count to rank 0, which hands out consecutive
ranks (torch 2.13, ``elastic/agent/server/api.py``: ``_assign_worker_ranks``). LOCAL_RANK counts from 0 on every node.

A script that was typed behind ``torch.distributed.launch`` gets what that gives it, ``--local-rank N``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from provision.launchers.kit import (
    MASTER,
    NNODES,
    NODE_RANK,
    PORT,
    USE_ENV,
    Command,
    Options,
    by_name,
    names,
    parse_options,
    ranks,
)
from provision.run import Job, RunSpec

NAME = "torchrun"
ABOUT = "`python -m torch.distributed.run`, static rendezvous"
COMMANDS = (
    *("torchrun", "torch.distributed.launch"),
    *("python -m torch.distributed.run", "python -m torch.distributed.launch"),
)
KINDS = ("script", "module")
REQUIRES = ()  # every training environment has torch; the job itself fails without it
# torch 2.13, distributed/run.py
OPTIONS = Options(
    flags=names("standalone module no_python run_path use_env virtual_local_rank"),
    values=names(
        "nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf max_restarts monitor_interval start_method "
        "event_log_handler role log_dir redirects tee local_ranks_filter duplicate_stdout_filters "
        "duplicate_stderr_filters node_rank master_addr master_port local_addr logs_specs numa_binding "
        "signals_to_handle shutdown_timeout"
    ),
    short={"m": "module", "r": "redirects", "t": "tee"},
    prefix="PET_",
    used={"nnodes": "nodes", "nproc_per_node": "per_node", "module": "module", "use_env": "use_env"},
    replaced=by_name(
        {
            "node_rank": "rank",
            "master_addr": "address",
            "master_port": "port",
            "rdzv_endpoint": "endpoint",
            "rdzv_backend rdzv_id rdzv_conf local_addr": "rendezvous",
            "standalone": "nodes",
            "max_restarts": "restarts",
            "log_dir redirects tee local_ranks_filter logs_specs": "logs",
            "duplicate_stdout_filters duplicate_stderr_filters": "logs",
        }
    ),
)


def suits(job: Job) -> bool:
    """Torchrun is the default of ``launchers.choose``: it claims nothing."""
    del job
    return False


def parse(command: str, words: Sequence[str]) -> Job:
    """The job of a typed command. ``torch.distributed.launch`` gives the script ``--local-rank N``."""
    job = parse_options(NAME, OPTIONS, words)
    if not command.endswith("torch.distributed.launch"):
        return job
    kept = tuple(word for word in job.launcher_args if word != USE_ENV)
    return replace(job, launcher_args=kept, local_rank=USE_ENV not in job.launcher_args)


def options(spec: RunSpec, rank: int) -> list[str]:
    """Torchrun's options on one node."""
    return [
        *("--nnodes", NNODES, "--node-rank", NODE_RANK),
        *("--nproc-per-node", str(spec.workers[rank].processes)),
        *("--master-addr", MASTER, "--master-port", PORT),
        *("--log-dir", ranks(spec, rank), "--redirects", "3"),  # both streams of every rank into files
    ]


def command(spec: RunSpec, rank: int) -> Command:
    """The command of one node."""
    job = spec.job
    module = "torch.distributed.launch" if job.local_rank else "torch.distributed.run"
    return Command(
        [
            *(f"{spec.prefix}/bin/python", "-m", module, *options(spec, rank), *job.launcher_args),
            *(["-m"] if job.kind == "module" else []),
            *(spec.config, *job.args),
        ]
    )
