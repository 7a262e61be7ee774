"""A training run as data: the nodes' facts, the GPUs that the run uses, and everything that a launcher needs.

A launcher (``provision.launchers``) turns a ``RunSpec`` into one plan for each node. The agent (``trainer/agent``)
executes the plan. docs/agent.md has the formats.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import PurePosixPath
from typing import Any

from provision.errors import ClusterctlError, PreflightError, UsageError
from provision.inventory.selection import fold
from provision.model import Node, Notice
from provision.run.fields import conform
from provision.run.job import Job
from trainer.agent.contract.expected import Expected
from trainer.agent.contract.plan import Copies, Plan, SaveEvery
from trainer.agent.contract.untrusted import UntrustedError, parse_object

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Facts:
    """The answer of ``agent probe`` on a node; ``trainer/agent/probe.py`` explains each field."""

    error: str | None = None
    rank: int = 0
    hostname: str = ""
    hostname_resolves: str = "address"
    python: str = ""
    master: str = ""
    master_ip: str | None = None
    master_loopback: bool | None = None
    ip: str | None = None
    interface: str | None = None
    port: int | None = None
    port_free: bool | None = None
    link_port: int | None = None
    gpus: int = 0
    cpus: int = 1
    memory_available: int | None = None
    disk_free: int = 0
    infiniband: tuple[Mapping[str, Any], ...] = ()
    hardware: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    ops: tuple[str, ...] = ()
    compilers: tuple[str, ...] = ()
    leaks: Mapping[str, str] = field(default_factory=dict)
    runs: tuple[Mapping[str, Any], ...] = ()
    boot_id: str = ""
    uid: int = 0
    clock: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Facts:
        """Parse the agent's line. Skips unknown fields.

        Raises:
            ClusterctlError: it is not the agent's line.
        """
        try:
            facts = conform(cls, parse_object(text))
            for run in facts.get("runs", ()):
                needed: dict[str, type | tuple[type, ...]] = {
                    "run": str,
                    "user": str,
                    "agent": bool,
                    "pids": list,
                    "visible": (str, type(None)),
                }
                if not all(isinstance(run.get(name, ...), kind) for name, kind in needed.items()):
                    raise UntrustedError("has an invalid run")  # noqa: TRY301 - one error for all
        except UntrustedError as error:
            raise ClusterctlError(f"the agent's answer cannot be read, it {error}: {text[:200]!r}") from error
        return cls(**facts)


@dataclass(frozen=True)
class Worker:
    """A node of the run. Its rank is its index in ``RunSpec.workers``.

    ``wanted`` is the value of ``--gpus-per-node``; ``devices`` are the GPUs that it may use (None: all). The function
    ``workers`` builds it from the user's options.
    """

    node: Node
    facts: Facts
    wanted: int | None = None
    devices: tuple[str, ...] | None = None

    @property
    def processes(self) -> int:
        """Processes to start: the requested number, else one for each usable GPU, else one."""
        if self.wanted is None and self.devices is not None:
            return len(self.devices) or 1
        return self.wanted or self.node.gpus or self.facts.gpus or 1

    @property
    def has_gpus(self) -> bool:
        """Whether its processes use GPUs."""
        return self.facts.gpus > 0 and self.devices != ()


@dataclass(frozen=True)
class RunSpec:
    """Everything that a launcher needs.

    Attributes:
        id: the run's id.
        workers: the nodes in the order of their ranks, spares last.
        prefix: the release's real path, not the symlink ``current``.
        folder: the run's folder on the nodes.
        config: ``RunFiles.config_name``.
        master: the address of rank 0.
        port: the port of the first attempt.
        progress: the trainer's log, relative to the run's folder unless absolute.
        pattern: the user's regular expression for the lines of the training; None: the known formats.
        env: the inventory's variables; the job's have precedence.
        grace: seconds between SIGTERM and SIGKILL.
        launcher: its name, or ``auto``.
        job: the user's job.
        settings: ``RunFiles.settings``.
        output: ``RunFiles.output``.
        hang_after: seconds without progress that count as a hang; None: derived from the run's pace.
        hang_policy: what a hang does, ``stop`` or ``warn``.
        restarts: how often a failed attempt restarts, the first time after ``backoff`` seconds.
        backoff: see ``restarts``.
        resuming: start from the newest complete checkpoint.
        none_ok: when resuming without a checkpoint, start from the first step.
        textfile: the folder of node_exporter's textfile collector; None: no samples are written for it.
        notify: the shell command for events of the run; None: none.
        expected: what the run is judged by; None: nothing is expected.
        spares: how many of the workers, the last ones, only replace others.
        min_nodes: the number of nodes with which the run may continue without spares; None: all.
        copies: how the agents copy checkpoints.
    """

    id: str
    workers: tuple[Worker, ...]
    prefix: PurePosixPath
    folder: PurePosixPath
    config: str
    master: str
    port: int
    progress: str | None = None
    pattern: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    grace: float = 10.0
    launcher: str = "auto"
    job: Job = field(default_factory=Job)
    settings: Mapping[str, Any] = field(default_factory=dict)
    output: str | None = None
    hang_after: float | None = None
    hang_policy: str = "stop"
    restarts: int = 0
    backoff: float = 1.0
    resuming: bool = False
    none_ok: bool = False
    textfile: str | None = None
    notify: str | None = None
    expected: Expected | None = None
    spares: int = 0
    min_nodes: int | None = None
    copies: Copies = field(default_factory=Copies)
    save: SaveEvery | None = None

    @property
    def active(self) -> tuple[Worker, ...]:
        """The workers that start the run."""
        return self.workers[: len(self.workers) - self.spares]

    @property
    def user_env(self) -> Mapping[str, str]:
        """The user's variables: those typed before the command have precedence over the inventory's."""
        return {**self.env, **self.job.env}


@dataclass(frozen=True)
class Launch:
    """One plan for each node, in the order of ``RunSpec.workers``, and notices for the user.

    The plans have places for what the agents fill in for each attempt, see ``launchers.filled``.
    """

    plans: tuple[Plan, ...]
    notices: tuple[Notice, ...] = ()


def plan_name(rank: int) -> str:
    """The plan's file in the run's folder. It has the rank because nodes may share that folder."""
    return f"plan-{rank}.json"


def new_run_id(now: datetime, config_name: str) -> str:
    """A name for a run that sorts by time and is safe in paths, environments and shells: 20261121-071500-sft-3f2a."""
    stem = re.sub(r"\.(ya?ml|json|py)$", "", config_name.rsplit("/", 1)[-1], flags=re.IGNORECASE)
    word = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:24].strip("-") or "run"
    return f"{now.astimezone(timezone.utc):%Y%m%d-%H%M%S}-{word}-{secrets.token_hex(2)}"


def world_size(plans: Sequence[Plan]) -> int:
    """The number of all ranks."""
    return sum(plan.processes for plan in plans)


# --- which nodes and GPUs --------------------------------------------------------------------------


def choose_nodes(job: Job, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes that DeepSpeed's ``--include`` and ``--exclude`` choose, in their order.

    Raises:
        UsageError: both were given, a name matches no node, or no node remains.
    """
    if job.include and job.exclude:
        raise UsageError("--include and --exclude cannot be combined", hint="give one of them")
    names = [node.name for node in nodes]
    for name in {**job.include, **job.exclude}:
        if name not in names:
            if name == "localhost":
                hint = "name a node of the inventory; for some of its GPUs set CUDA_VISIBLE_DEVICES"
            else:
                hint = f"one of {', '.join(names[:20])}"
            raise UsageError(f"{name} is not one of the chosen nodes", hint=hint)
    whole = {name for name, gpus in job.exclude.items() if not gpus}
    left = tuple(node for node in nodes if node.name not in whole and (not job.include or node.name in job.include))
    if not left:
        raise UsageError("--exclude removes all nodes", hint="exclude fewer nodes")
    return left


def count_nodes(job: Job, count: int | None, chosen: Sequence[Node]) -> tuple[int | None, Job]:
    """How many of the chosen nodes a job uses, and the job with a notice if that differs from the typed number.

    Args:
        job: the job.
        count: ``--nodes``; it has precedence over a number in the typed command.
        chosen: the nodes that ``--limit`` and ``--exclude`` choose.

    Raises:
        UsageError: the typed command asks for more nodes than were chosen.
    """
    if job.nodes is None:
        return count, job
    typed = job.typed.get("nodes", f"{job.nodes} nodes")
    names = fold(node.name for node in chosen)
    if count is not None:
        text = f"{typed}: replaced by --nodes {count}"
        return count, job if count == job.nodes else replace(job, notices=(*job.notices, text))
    if job.nodes > len(chosen):
        have = f"there are {len(chosen)} nodes: {names}" if len(chosen) > 1 else f"there is one node: {names}"
        raise UsageError(
            f"{typed}: {have}", hint=f"to use these: --nodes {len(chosen)} before --; or add nodes to the inventory"
        )
    if job.nodes < len(chosen):
        text = (
            f"{typed}: the first {job.nodes} of {len(chosen)} nodes: {fold(node.name for node in chosen[: job.nodes])}"
        )
        job = replace(job, notices=(*job.notices, text))
    return job.nodes, job


def workers(
    job: Job, nodes: Sequence[Node], facts: Mapping[str, Facts], env: Mapping[str, str] | None = None
) -> tuple[Worker, ...]:
    """The run's nodes with their processes and GPUs.

    Args:
        job: the job.
        nodes: in the order of their ranks.
        facts: by node name.
        env: the inventory's variables; the job's have precedence.

    Raises:
        UsageError: two options choose GPUs.
        PreflightError: a node has fewer GPUs than requested.
    """
    visible = {**(env or {}), **job.env}.get(VISIBLE)
    if visible is not None and (any(job.include.values()) or any(job.exclude.values())):
        raise UsageError(f"{VISIBLE} and --include or --exclude both choose GPUs", hint="give one of them")
    job = _shared(job, nodes, facts)
    found = []
    reasons = {}
    for node in nodes:
        gpus = facts[node.name].gpus
        expected = node.gpus or gpus
        devices = _devices(visible) if visible is not None else _slots(job, node, expected)
        missing = [each for each in devices or () if each.isdecimal() and int(each) >= (gpus or expected)]
        if missing and gpus:
            reasons[node.name] = f"has {gpus} GPUs, numbered from 0; GPU {', '.join(missing)} does not exist"
        usable = len(devices) if devices is not None else gpus
        if job.per_node and gpus and job.per_node > usable:
            reasons[node.name] = f"can use {usable} GPUs, but {job.per_node} processes were requested"
        if devices == () and visible is None:
            reasons[node.name] = "all its GPUs are excluded; exclude the node instead"
        found.append(Worker(node, facts[node.name], job.per_node, devices))
    if reasons:
        raise PreflightError(
            "nodes lack the requested GPUs; nothing was started",
            reasons=reasons,
            hint="--gpus-per-node N with a smaller N, or other nodes",
        )
    return tuple(found)


def _shared(job: Job, nodes: Sequence[Node], facts: Mapping[str, Facts]) -> Job:
    """The job with its total of processes (accelerate's ``--num_processes``) as a number for each node."""
    if job.total is None or job.total == sum(Worker(node, facts[node.name]).processes for node in nodes):
        return job
    if job.total % len(nodes):
        raise UsageError(
            f"{job.typed.get('total', job.total)} cannot be divided equally among {len(nodes)} nodes",
            hint="omit it for a process on each GPU, or give --gpus-per-node N",
        )
    return replace(job, per_node=job.total // len(nodes))


def visible(job: Job, nodes: Sequence[Node], env: Mapping[str, str] | None = None) -> dict[str, str]:
    """By node name, the CUDA_VISIBLE_DEVICES of a run, for nodes whose GPUs the user chose by number."""
    value = {**(env or {}), **job.env}.get(VISIBLE)
    if value is not None:
        return {node.name: value for node in nodes}
    chosen = {node.name: _slots(job, node, node.gpus or 0) for node in nodes}
    return {name: ",".join(gpus) for name, gpus in chosen.items() if gpus}


def _devices(visible: str) -> tuple[str, ...]:
    """The devices that CUDA reads in ``CUDA_VISIBLE_DEVICES``: numbers or UUIDs, up to the first negative one."""
    found: list[str] = []
    for each in (part.strip() for part in visible.split(",")):
        if not each or each.startswith("-"):
            break
        found.append(each)
    return tuple(found)


def _slots(job: Job, node: Node, count: int) -> tuple[str, ...] | None:
    if gpus := job.include.get(node.name):
        return gpus
    if without := job.exclude.get(node.name):
        return tuple(str(number) for number in range(count) if str(number) not in without)
    return None
