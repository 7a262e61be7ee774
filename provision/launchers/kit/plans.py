"""The plan of a node, except the launcher's command, and notices about it."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from provision.errors import PreflightError, UsageError
from provision.launchers.kit.environment import RANKS, UNSET, caches, environment, logs
from provision.launchers.kit.network import network
from provision.launchers.kit.options import VARIABLES
from provision.launchers.kit.replaced import replaced, used
from provision.model import Notice
from provision.run import WORK, RunSpec
from trainer.agent.contract.plan import (
    CHECKPOINT,
    EVEN_SIZE,
    FIRST_RANK,
    MASTER,
    NNODES,
    NODE_RANK,
    OUTPUT,
    PLACES,
    PORT,
    SEVERAL,
    WORLD_INFO,
    Copies,
    Hang,
    Members,
    Plan,
    Resume,
)

__all__ = [
    "CHECKPOINT",
    "EVEN_SIZE",
    "FIRST_RANK",
    "MASTER",
    "NNODES",
    "NODE_RANK",
    "PORT",
    "SEVERAL",
    "WORLD_INFO",
    "Command",
    "filled",
    "first_rank",
    "node_plan",
    "notices",
    "ranks",
    "require",
    "resume",
    "split_resume_arg",
]

_LOCAL_BRIDGES = (
    "docker",
    "virbr",
    "br-",
    "cni",
    "lxcbr",
    "podman",
)  # bridges of containers, not networks between nodes


@dataclass(frozen=True)
class Command:
    """A launcher's command for one node.

    Attributes:
        argv: the command; the agent replaces ``{port}`` and the other words of ``trainer.agent.contract.plan.WORDS``.
        env: the launcher's variables; the user's have precedence.
        each_rank: the agent starts the command once for each local rank.
        slots: by node, the GPUs that DeepSpeed starts a rank on.
    """

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    each_rank: bool = False
    slots: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)


def require(spec: RunSpec, package: str) -> None:
    """Refuse nodes whose environment lacks a package.

    Raises:
        PreflightError: a node's environment lacks it.
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
    """Notices before the run starts.

    Raises:
        UsageError: restarts need the run's checkpoints, and their folder is not known.
    """
    found = [*(Notice(text) for text in spec.job.notices), *replaced(spec)]
    if not {"NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_NET"} & set(spec.user_env):
        found += network(spec).notices
    for worker in spec.workers:
        interface = worker.facts.interface or ""
        if len(spec.workers) > 1 and interface.startswith(_LOCAL_BRIDGES):
            text = f"{worker.node.name} reaches rank 0 through {interface}, which looks like a bridge for containers"
            found.append(Notice(text, "warning"))
    if ignored := [name for name in RANKS if name in spec.user_env]:
        values = used(spec, {name: VARIABLES[name] for name in ignored})
        text = f"ignored from the environment you gave: {', '.join(ignored)}; the run has {values}"
        found.append(Notice(text, "warning"))
    counts = {worker.processes for worker in spec.active}
    if len(counts) > 1:
        each = ", ".join(f"{worker.node.name} {worker.processes}" for worker in spec.active)
        found.append(Notice(f"the nodes start different numbers of processes: {each}", "warning"))
    if (spec.resuming or spec.restarts) and resume(spec) is None:
        raise UsageError(
            "where this script keeps its checkpoints is not known",
            hint="--output DIR, and --resume-arg '--resume {checkpoint}' if the script has an option for it",
        )
    _check_copies(spec)
    return tuple(found)


def _check_copies(spec: RunSpec) -> None:
    """Refuse options for copies that cannot be met.

    Raises:
        UsageError: there are too few nodes, or the checkpoints are not known.
    """
    peers, others = spec.copies.peers, len(spec.workers) - 1
    if peers and peers > others:
        raise UsageError(
            f"--copies {peers}: the run has {others} other {'node' if others == 1 else 'nodes'} for copies",
            hint=f"--copies {others}, or more nodes",
        )
    if peers and resume(spec) is None:
        raise UsageError(f"--copies {peers}: where this script keeps its checkpoints is not known", hint="--output DIR")


def ranks(spec: RunSpec, rank: int) -> str:
    """The folder for the output of a node's ranks, in the layout of torchrun's ``--log-dir``."""
    return f"{logs(spec, rank)}/ranks"


def first_rank(spec: RunSpec, rank: int) -> int:
    """The global rank of a node's first process."""
    return sum(before.processes for before in spec.workers[:rank])


def resume(spec: RunSpec) -> Resume | None:
    """How the command resumes; None if the checkpoint folder is not known.

    Raises:
        UsageError: ``--resume-arg`` is not a list of words, or has an unknown place.
    """
    output = spec.output
    if output is None and spec.job.kind == "config" and spec.progress:
        output = posixpath.dirname(spec.progress)
    if output is None:
        return None
    if spec.job.kind == "config":
        # omegaconf parses the value as YAML, so a path with special characters needs quotes. LLaMA-Factory deletes its
        # trainer_log.jsonl if it overwrites the output folder (train/callbacks.py).
        argv = [f'resume_from_checkpoint="{CHECKPOINT}"', "overwrite_output_dir=false"]
    else:
        argv = split_resume_arg(spec.job.resume_arg or "")
    known = spec.job.kind == "config" or spec.job.resume_arg is not None
    return Resume(output, tuple(argv), {"CLUSTERCTL_CHECKPOINT": CHECKPOINT}, known)


def split_resume_arg(text: str) -> list[str]:
    """The words of ``--resume-arg``.

    Raises:
        UsageError: a quote is not closed, or a word has an unknown place in braces.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--resume-arg {text}: {error}", hint="--resume-arg '--resume {checkpoint}'") from None
    unknown = [each for word in words for each in re.findall(r"\{[a-z_]*\}", word) if each not in PLACES]
    if unknown:
        raise UsageError(
            f"--resume-arg {text}: {unknown[0]} is not one of {', '.join(PLACES)}",
            hint="--resume-arg '--resume_from_checkpoint {checkpoint}'",
        )
    return words


def node_plan(spec: RunSpec, rank: int, launcher: str, command: Command, resumes: Resume | None) -> Plan:
    """A node's plan."""
    worker = spec.workers[rank]
    return Plan(
        run=spec.id,
        node=worker.node.name,
        argv=tuple(
            to_memory(command.argv, resumes, config=spec.job.kind == "config") if spec.copies.memory else command.argv
        ),
        env=environment(spec, rank, command.env),
        launcher=launcher,
        each_rank=command.each_rank,
        node_rank=rank,
        nnodes=len(spec.active),
        processes=worker.processes,
        first_rank=first_rank(spec, rank) if rank < len(spec.active) else 0,
        slots=dict(command.slots),
        min_nodes=spec.min_nodes,
        unset=UNSET,
        cwd=f"{spec.folder}/{WORK}",
        logs=logs(spec, rank),
        rank_logs=ranks(spec, rank),
        progress=spec.progress,
        pattern=spec.pattern,
        private=caches(spec, worker),
        grace=spec.grace,
        port=spec.port,
        hang=Hang(spec.hang_after, spec.hang_policy),
        resume=resumes,
        resuming=spec.resuming,
        none_ok=spec.none_ok,
        restarts=spec.restarts,
        backoff=spec.backoff,
        prefix=str(spec.prefix),
        textfile=spec.textfile,
        notify=spec.notify,
        expected=spec.expected,
        copies=None if resumes is None else spec.copies,
        save=spec.save,
    )


def filled(plans: Sequence[Plan], interfaces: Mapping[str, str | None]) -> list[Plan]:
    """The plans of the nodes that start a run, with what the agents fill in for the first attempt.

    Args:
        plans: in the order of the nodes, spares last.
        interfaces: by node, the interface to rank 0.
    """
    active = plans[: plans[0].nnodes]
    members = Members(tuple(plan.node for plan in active), tuple(plan.processes for plan in active))
    return [plan.for_attempt(members, interface=interfaces.get(plan.node)) for plan in active]


def to_memory(argv: Sequence[str], resumes: Resume | None, *, config: bool) -> list[str]:
    """The command with a place for the folder in RAM, where it names its output folder.

    Args:
        argv: the command.
        resumes: how it resumes; None: its output folder is not known.
        config: it trains by a config of LLaMA-Factory, which takes further values.

    Raises:
        UsageError: it does not name it.
    """
    if resumes is not None and config:
        return [*argv, f"output_dir={OUTPUT}"]
    folder = None if resumes is None else posixpath.normpath(resumes.output)
    found = []
    for word in argv:
        name, equals, value = word.rpartition("=")
        same = posixpath.normpath(posixpath.join(WORK, value)) == folder and (not equals or name.startswith("-"))
        found.append(f"{name}{equals}{OUTPUT}" if same else word)
    if found == list(argv):
        raise UsageError(
            "--save-to memory needs the option by which the program gets its output folder, and the command has none",
            hint="add it after --, such as: clusterctl train --save-to memory SCRIPT -- --output_dir out",
        )
    return found


def saving_to(plan: Plan, folder: str, *, memory: bool) -> Plan:
    """The plan of a run that resumes and saves to memory, or to the disk.

    Args:
        plan: the plan before.
        folder: the run's folder on the nodes.
        memory: whether it saves to memory.

    Raises:
        UsageError: the command does not name its output folder.
    """
    copies = plan.copies or Copies()
    if copies.memory == memory or plan.resume is None:
        return plan
    if memory:
        config = f'resume_from_checkpoint="{CHECKPOINT}"' in plan.resume.argv
        argv = to_memory(plan.argv, plan.resume, config=config)
    else:
        argv = [word.replace(OUTPUT, posixpath.join(folder, plan.resume.output)) for word in plan.argv]
    return plan._replace(argv=tuple(argv), copies=copies._replace(memory=memory))
