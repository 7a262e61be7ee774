"""Which nodes and GPUs a job uses: what was typed, what the user's environment says, what the inventory says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from provision.errors import PreflightError, UsageError
from provision.inventory.selection import fold
from provision.model import Node
from provision.run import Facts, Worker
from provision.run.job import Job

VISIBLE = "CUDA_VISIBLE_DEVICES"


def choose_nodes(job: Job, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes that DeepSpeed's ``--include`` and ``--exclude`` leave of ``nodes``, in their order.

    Raises:
        UsageError: both were given, a name that is no node's, or none is left.
    """
    if job.include and job.exclude:
        raise UsageError("--include and --exclude exclude each other", hint="give one of them")
    names = [node.name for node in nodes]
    for name in {**job.include, **job.exclude}:
        if name not in names:
            if name == "localhost":
                hint = "name a node of the inventory; for some of its GPUs set CUDA_VISIBLE_DEVICES"
            else:
                hint = f"one of {', '.join(names[:20])}"
            raise UsageError(f"{name} is none of the chosen nodes", hint=hint)
    whole = {name for name, gpus in job.exclude.items() if not gpus}
    left = tuple(node for node in nodes if node.name not in whole and (not job.include or node.name in job.include))
    if not left:
        raise UsageError("--exclude leaves no node", hint="exclude fewer")
    return left


def count_nodes(job: Job, count: int | None, chosen: Sequence[Node]) -> tuple[int | None, Job]:
    """How many of the chosen nodes a job uses, and the job with a notice where that is not what was typed.

    Args:
        job: what is to be run.
        count: ``--nodes``; it wins over a number in the typed command.
        chosen: the nodes that ``--limit`` and ``--exclude`` leave.

    Raises:
        UsageError: the typed command asks for more nodes than there are.
    """
    if job.nodes is None:
        return count, job
    said = job.typed.get("nodes", f"{job.nodes} nodes")
    names = fold(node.name for node in chosen)
    if count is not None:
        text = f"{said}: replaced by --nodes {count}"
        return count, job if count == job.nodes else replace(job, notices=(*job.notices, text))
    if job.nodes > len(chosen):
        have = f"there are {len(chosen)} nodes: {names}" if len(chosen) > 1 else f"there is one node: {names}"
        raise UsageError(
            f"{said}: {have}", hint=f"--nodes {len(chosen)} before the -- uses these; or add nodes to the inventory"
        )
    if job.nodes < len(chosen):
        text = (
            f"{said}: the first {job.nodes} of {len(chosen)} nodes: {fold(node.name for node in chosen[: job.nodes])}"
        )
        job = replace(job, notices=(*job.notices, text))
    return job.nodes, job


def workers(
    job: Job, nodes: Sequence[Node], facts: Mapping[str, Facts], env: Mapping[str, str] | None = None
) -> tuple[Worker, ...]:
    """The nodes with what each starts.

    Args:
        job: what is to be run.
        nodes: in the order of their ranks.
        facts: by node name.
        env: the inventory's; what was typed before the command wins.

    Raises:
        UsageError: two ways of choosing GPUs at once.
        PreflightError: a node that has fewer GPUs than it is to use.
    """
    visible = {**(env or {}), **job.env}.get(VISIBLE)
    if visible is not None and (any(job.include.values()) or any(job.exclude.values())):
        raise UsageError(f"{VISIBLE} and --include or --exclude both choose GPUs", hint="give one of them")
    job = _shared(job, nodes, facts)
    made = []
    reasons = {}
    for node in nodes:
        said = facts[node.name]
        there = node.gpus or said.gpus
        devices = _devices(visible) if visible is not None else _slots(job, node, there)
        missing = [each for each in devices or () if each.isdecimal() and int(each) >= (said.gpus or there)]
        if missing and said.gpus:
            reasons[node.name] = f"has {said.gpus} GPUs, numbered from 0; there is no GPU {', '.join(missing)}"
        usable = len(devices) if devices is not None else said.gpus
        if job.per_node and said.gpus and job.per_node > usable:
            reasons[node.name] = f"can use {usable} GPUs, and {job.per_node} processes were asked for"
        if devices == () and visible is None:
            reasons[node.name] = "no GPU of it is left; exclude the whole node"
        made.append(Worker(node, said, job.per_node, devices))
    if reasons:
        raise PreflightError(
            "nodes without the GPUs that were asked for; nothing was started",
            reasons=reasons,
            hint="--gpus-per-node N with a smaller N, or other nodes",
        )
    return tuple(made)


def _shared(job: Job, nodes: Sequence[Node], facts: Mapping[str, Facts]) -> Job:
    """The job with its processes of all nodes together (accelerate's ``--num_processes``) as a number for each node."""
    if job.total is None or job.total == sum(Worker(node, facts[node.name]).processes for node in nodes):
        return job
    if job.total % len(nodes):
        raise UsageError(
            f"{job.typed.get('total', job.total)} cannot be shared by {len(nodes)} nodes equally",
            hint="leave it out for a process on each GPU, or give --gpus-per-node N",
        )
    return replace(job, per_node=job.total // len(nodes))


def visible(job: Job, nodes: Sequence[Node], env: Mapping[str, str] | None = None) -> dict[str, str]:
    """By node name the CUDA_VISIBLE_DEVICES of a run, of those nodes for which somebody chose GPUs by their numbers."""
    said = {**(env or {}), **job.env}.get(VISIBLE)
    if said is not None:
        return {node.name: said for node in nodes}
    chosen = {node.name: _slots(job, node, node.gpus or 0) for node in nodes}
    return {name: ",".join(gpus) for name, gpus in chosen.items() if gpus}


def _devices(visible: str) -> tuple[str, ...]:
    """What CUDA reads in ``CUDA_VISIBLE_DEVICES``: numbers or UUIDs, up to the first that is negative."""
    found: list[str] = []
    for each in (part.strip() for part in visible.split(",")):
        if not each or each.startswith("-"):
            break
        found.append(each)
    return tuple(found)


def _slots(job: Job, node: Node, there: int) -> tuple[str, ...] | None:
    if gpus := job.include.get(node.name):
        return gpus
    if without := job.exclude.get(node.name):
        return tuple(str(number) for number in range(there) if str(number) not in without)
    return None
