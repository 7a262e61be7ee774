"""What all launchers share: what the environment must have, what the user is told, and a plan but for its command."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from provision.errors import PreflightError, UsageError
from provision.launchers._environment import RANKS, UNSET, caches, environment, logs
from provision.launchers._network import network
from provision.launchers._replaced import replaced, used
from provision.model import Notice
from provision.run import WORK, Launch, RunSpec
from provision.run.job_options import VARIABLES

PORT = "{port}"  # the agent puts the attempt's port here
CHECKPOINT = "{checkpoint}"
_LOCAL_BRIDGES = ("docker", "virbr", "br-", "cni", "lxcbr", "podman")  # they lead to containers, not to nodes


def needs(spec: RunSpec, package: str) -> None:
    """Refuse nodes whose environment lacks a package.

    Raises:
        PreflightError: some do.
    """
    reasons = {
        worker.node.name: f"its environment has no {package}"
        for worker in spec.workers
        if worker.facts.packages and package not in worker.facts.packages
    }
    if reasons:
        raise PreflightError(
            f"the packed environment lacks {package}; nothing was started",
            reasons=reasons,
            hint=f"install {package} into the environment, then: clusterctl pack-env; clusterctl deploy; "
            "or choose another --launcher",
        )


def notices(spec: RunSpec) -> tuple[Notice, ...]:
    """What the user should know before the run starts."""
    found = [*(Notice(text) for text in spec.job.notices), *replaced(spec)]
    if not {"NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_NET"} & set(spec.user_env):
        found += network(spec).notices
    for worker in spec.workers:
        interface = worker.facts.interface or ""
        if len(spec.workers) > 1 and interface.startswith(_LOCAL_BRIDGES):
            text = f"{worker.node.name} reaches rank 0 through {interface}, which looks like a bridge for containers"
            found.append(Notice(text, "warning"))
    if ignored := [name for name in RANKS if name in spec.user_env]:
        has = used(spec, {name: VARIABLES[name] for name in ignored})
        text = f"ignored from the environment you gave: {', '.join(ignored)}; the run has {has}"
        found.append(Notice(text, "warning"))
    counts = {worker.processes for worker in spec.workers}
    if len(counts) > 1:
        each = ", ".join(f"{worker.node.name} {worker.processes}" for worker in spec.workers)
        found.append(Notice(f"the nodes start different numbers of processes: {each}", "warning"))
    if (spec.resuming or spec.restarts) and resume(spec) is None:
        raise UsageError(
            "where this script keeps its checkpoints is not known",
            hint="--output DIR, and --resume-arg '--resume {checkpoint}' if the script has an option for it",
        )
    return tuple(found)


def launched(spec: RunSpec, plans: Sequence[Mapping[str, Any]], *more: Notice) -> Launch:
    """The plans with all notices."""
    return Launch(tuple(plans), (*notices(spec), *more))


def ranks(spec: RunSpec, rank: int) -> str:
    """The folder for the output of a node's ranks, in the layout of torchrun's ``--log-dir``."""
    return f"{logs(spec, rank)}/ranks"


def resume(spec: RunSpec) -> dict[str, Any] | None:
    """How a checkpoint is handed to the command; None when nobody knows where checkpoints are."""
    output = spec.output
    if output is None and spec.job.kind == "config" and spec.progress:
        output = posixpath.dirname(spec.progress)
    if output is None:
        return None
    if spec.job.kind == "config":
        # omegaconf reads the value as YAML: in quotes a path may hold what YAML gives a meaning. LLaMA-Factory begins
        # its trainer_log.jsonl anew where it is told to overwrite the output folder (train/callbacks.py).
        argv = [f'resume_from_checkpoint="{CHECKPOINT}"', "overwrite_output_dir=false"]
    else:
        argv = shlex.split(spec.job.resume_arg or "")
        if spec.job.resume_arg and not any(CHECKPOINT in word for word in argv):
            raise UsageError(
                f"--resume-arg {spec.job.resume_arg}: it does not say where the checkpoint's path goes",
                hint="--resume-arg '--resume_from_checkpoint {checkpoint}'",
            )
    return {"output": output, "argv": argv, "env": {"CLUSTERCTL_CHECKPOINT": CHECKPOINT}}


def plan(spec: RunSpec, rank: int, argv: Sequence[str], defaults: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A node's plan; ``trainer/agent/plan.py`` explains every key."""
    worker = spec.workers[rank]
    return {
        "run": spec.id,
        "node": worker.node.name,
        "node_rank": rank,
        "nnodes": len(spec.workers),
        "processes": worker.processes,
        "argv": list(argv),
        "env": environment(spec, rank, defaults),
        "unset": list(UNSET),
        "cwd": f"{spec.folder}/{WORK}",
        "logs": logs(spec, rank),
        "rank_logs": ranks(spec, rank),
        "first_rank": first_rank(spec, rank),
        "progress": spec.progress if rank == 0 else None,  # only rank 0 writes it, and nodes may share the folder
        "private": list(caches(spec, worker)),
        "grace": spec.grace,
        "port": spec.port,
        "link": None,  # made by whoever starts the agents: it holds a secret
        "hang": {"after": spec.hang_after, "policy": spec.hang_policy},
        "resume": resume(spec),
        "resuming": spec.resuming,
        "checkpoint": "none-ok" if spec.none_ok else None,
        "restarts": spec.restarts,
        "backoff": spec.backoff,
        "prefix": str(spec.prefix),
    }


def first_rank(spec: RunSpec, rank: int) -> int:
    """The global rank of a node's first process."""
    return sum(before.processes for before in spec.workers[:rank])
