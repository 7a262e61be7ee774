"""The training that the options of ``clusterctl train`` mean: the same for the command line and for Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from provision.errors import UsageError
from provision.inventory import select
from provision.model import Inventory, Node
from provision.run import Job, node_history
from provision.run.spec import count_nodes
from provision.slurm import Options, check_options, read_allocation
from provision.tasks.bundles import parse_size
from provision.tasks.gate import GateOptions
from provision.tasks.notify import read_notify
from provision.tasks.resume_arg import AskResume
from provision.tasks.slurm import On
from provision.tasks.start import Following
from provision.tasks.train import (
    LOST_AFTER,
    LOST_AFTER_WITH_SPARES,
    ZERO_CHOICES,
    Policy,
    Training,
    active_nodes,
)
from trainer.agent.contract.plan import COPIES, SPACE, Copies
from trainer.bounds import Bound

Warn = Callable[[str], None]

HANG_CHOICES = ("stop", "warn")
SAVE_CHOICES = ("disk", "memory")
ON_CHOICES = ("ssh", "slurm")
_NODES = Bound(low=1, high=1_000_000)
_INDEX = Bound(low=0, high=1_000_000)
_SECONDS = Bound(above=0, high=10_000_000)
BOUNDS: Mapping[str, Bound] = {
    "nodes": _NODES,
    "gpus_per_node": _NODES,
    "restarts": _INDEX,
    "copies": Bound(low=0, high=COPIES),
    "lost_after": _SECONDS,
    "hang_after": _SECONDS,
    "spares": _INDEX,
    "min_nodes": _NODES,
    "minutes": Bound(low=1, high=240),
}
"""The ranges of the numbers that Python passes, as on the command line."""
_CHOICES: Mapping[str, Sequence[str]] = {
    "zero": ZERO_CHOICES,
    "on_hang": HANG_CHOICES,
    "save_to": SAVE_CHOICES,
    "on": ON_CHOICES,
}


def check_values(**values: Any) -> None:
    """Refuse numbers and words that the command line would refuse.

    Raises:
        UsageError: a value cannot be used.
    """
    for name, value in values.items():
        if value is None:
            continue
        if name in BOUNDS:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(f"{name}={str(value)[:60]!r}: not a number", hint=f"{name}: {BOUNDS[name]}")
            if problem := BOUNDS[name].problem(value):
                raise UsageError(f"{name} {problem}", hint=f"{name}: {BOUNDS[name]}")
        elif value not in _CHOICES[name]:
            raise UsageError(f"{name}={str(value)[:60]!r}: there is no such choice", hint=", ".join(_CHOICES[name]))


def asked_training(
    inventory: Inventory,
    nodes: Sequence[Node],
    job: Job,
    words: tuple[str, ...],
    *,
    count: int | None,
    env: Mapping[str, str],
    warn: Warn,
    module: str | None = None,
    name: str | None = None,
    zero: str | None = None,
    pattern: str | None = None,
    restarts: int = 0,
    lost_after: float | None = None,
    hang_after: float | None = None,
    on_hang: str = "stop",
    notify: str | None = None,
    expected: str | None = None,
    following: Following | None = None,
    exclude_bad: bool = False,
    force: bool = False,
    copies: int | None = None,
    copies_space: str | None = None,
    copies_rate: str | None = None,
    save_to: str = "disk",
    save_every: str | None = None,
    ask_resume: AskResume | None = None,
    spares: int = 0,
    min_nodes: int | None = None,
) -> tuple[Inventory, tuple[Node, ...], Training]:
    """The training that options mean, its nodes, and the inventory with its variables.

    Raises:
        UsageError: an option cannot be used.
    """
    wanted, job = count_nodes(job, count, nodes)
    if twice := [each for each in env if job.env.get(each, env[each]) != env[each]]:
        warn(f"--env {', '.join(twice)}: overridden by the value in the command after --")
    inventory = replace(inventory, train=replace(inventory.train, env={**inventory.train.env, **env}))
    asked = Training(
        job=job,
        words=(*(("-m", module) if module else ()), *words),
        name=name,
        zero=zero,
        pattern=pattern,
        policy=Policy(
            restarts,
            lost_after if lost_after is not None else LOST_AFTER_WITH_SPARES if spares else LOST_AFTER,
            hang_after,
            on_hang,
            Copies(copies, size(copies_space), size(copies_rate) or None, memory=save_to == "memory"),
        ),
        gate=GateOptions(exclude_bad=exclude_bad, force=force, asked=wanted),
        following=following or Following(),
        notify=read_notify(notify),
        expected=expected,
        save_every=save_every,
        ask_resume=ask_resume,
        spares=spares,
        min_nodes=min_nodes,
    )
    if wanted is not None and wanted + spares > len(nodes):
        have = f"{wanted} nodes and {spares} spares are {wanted + spares}; there are {len(nodes)}"
        raise UsageError(f"--spares {spares}: {have}", hint="fewer --nodes or --spares, or more nodes in the inventory")
    chosen = tuple(nodes[: None if wanted is None else wanted + spares])
    active_nodes(chosen, spares, min_nodes)
    return inventory, chosen, asked


def without_excluded(inventory: Inventory, limit: str | None, exclude: str | None, warn: Warn) -> str | None:
    """``exclude`` with the nodes that ``clusterctl nodes`` excludes, with a warning about each of them.

    Raises:
        UsageError: the list of excluded nodes cannot be used.
    """
    if inventory.alone:
        return exclude
    names = [node.name for node in select(inventory, limit=limit, exclude=exclude)]
    gone = node_history.skipped(inventory.path, names)
    for text in gone.values():
        warn(text)
    return ",".join(filter(None, (exclude, *gone))) or None


def size(text: str | None) -> int | None:
    """A size in bytes; None without one."""
    return None if text is None else min(SPACE, parse_size(text))


def read_on(inventory: Inventory, starter: str | None, options: Options) -> On | None:
    """How Slurm starts the run; None without Slurm.

    Raises:
        UsageError: the options cannot be combined or used.
    """
    if options != Options() and starter != "slurm":
        raise UsageError("--partition, --time, --account and --sbatch-arg are for Slurm", hint="add --on slurm")
    if starter == "slurm":
        if inventory.alone:
            raise UsageError(
                "--on slurm: there is no inventory of the cluster's nodes", hint="clusterctl init NAME=ADDRESS …"
            )
        check_options(options)
        return On(options)
    allocation = read_allocation(os.environ) if starter is None and not inventory.alone else None
    return None if allocation is None else On(allocation=allocation)


def refuse_with_slurm(*, dry_run: bool, exclude_bad: bool) -> None:
    """Refuse what a job cannot do.

    Raises:
        UsageError: an option was given that needs other nodes than the job's, or none.
    """
    if dry_run:
        raise UsageError("--dry-run: what a Slurm job starts depends on its nodes", hint="add --on ssh")
    if exclude_bad:
        raise UsageError("--exclude-bad: a Slurm job uses all of its nodes", hint="name the bad ones: --exclude NODES")
