"""A training run as data: what the nodes said, what is to be started on them, and what it takes along.

A launcher (``provision.launchers``) turns a ``RunSpec`` into one plan for each node; the agent (``trainer/agent``)
carries a plan out. ``docs/agent.md``, has the formats.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from provision.errors import ClusterctlError
from provision.run.config import travel
from provision.run.fields import conform
from provision.run.job import LAUNCHERS, Job, choose, from_words
from provision.run.job_code import pack
from provision.run.luggage import LIMIT, WORK, Entry, Travel, tar_stream
from trainer.untrusted import UntrustedError, parse_object

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import PurePosixPath

    from provision.model import Node, Notice

__all__ = [
    "LAUNCHERS",
    "LIMIT",
    "WORK",
    "Entry",
    "Facts",
    "Job",
    "Launch",
    "RunSpec",
    "Travel",
    "Worker",
    "choose",
    "from_words",
    "new_run_id",
    "pack",
    "plan_name",
    "tar_stream",
    "travel",
]


@dataclass(frozen=True)
class Facts:
    """What ``agent probe`` said about a node; ``trainer/agent/node/probe.py`` explains each."""

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
    packages: tuple[str, ...] = ()
    leaks: Mapping[str, str] = field(default_factory=dict)
    runs: tuple[Mapping[str, Any], ...] = ()
    boot_id: str = ""
    uid: int = 0
    clock: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Facts:
        """Read the agent's line. Fields that are not known here are left out.

        Raises:
            ClusterctlError: it is not the agent's line.
        """
        try:
            said = conform(cls, parse_object(text))
            for run in said.get("runs", ()):
                needed: dict[str, type | tuple[type, ...]] = {
                    "run": str,
                    "user": str,
                    "agent": bool,
                    "pids": list,
                    "visible": (str, type(None)),
                }
                if not all(isinstance(run.get(name, ...), kind) for name, kind in needed.items()):
                    raise UntrustedError("has a run that is none")  # noqa: TRY301 - one place says it
        except UntrustedError as error:
            raise ClusterctlError(f"the agent's answer cannot be read, it {error}: {text[:200]!r}") from error
        return cls(**said)


@dataclass(frozen=True)
class Worker:
    """A node that takes part. Its rank is its place in ``RunSpec.workers``.

    ``wanted`` is what ``--gpus-per-node`` says, ``devices`` are the GPUs that it is limited to (None: all).
    ``job_nodes.workers`` makes it of what the user gave.
    """

    node: Node
    facts: Facts
    wanted: int | None = None
    devices: tuple[str, ...] | None = None

    @property
    def processes(self) -> int:
        """Processes to start: what was asked for, else one for each GPU that may be used, else one."""
        if self.wanted is None and self.devices is not None:
            return len(self.devices) or 1
        return self.wanted or self.node.gpus or self.facts.gpus or 1

    @property
    def has_gpus(self) -> bool:
        """Whether its processes have GPUs."""
        return self.facts.gpus > 0 and self.devices != ()


@dataclass(frozen=True)
class RunSpec:
    """Everything that a launcher needs to know.

    Attributes:
        id: the run's.
        workers: the nodes in the order of their ranks.
        prefix: the release's own path (not the symlink ``current``).
        folder: the run's on the nodes.
        config: ``Travel.config_name``.
        master: the address of rank 0, ``port`` the first attempt's.
        progress: the trainer's log, relative to the run's folder unless absolute.
        env: the inventory's; the job's own wins.
        grace: seconds between SIGTERM and SIGKILL.
        launcher: its name, or ``auto``.
        job: what the user gave.
        settings: ``Travel.settings``.
        output: ``Travel.output``.
        hang_after: seconds without progress that count as a hang; None: the run's own pace tells.
        hang_policy: what a hang does, ``stop`` or ``warn``.
        restarts: how often a failed attempt is begun again, the first time after ``backoff`` seconds.
        resuming: begin from the newest complete checkpoint.
        none_ok: when resuming, begin from the start if there is none.
    """

    id: str
    workers: tuple[Worker, ...]
    prefix: PurePosixPath
    folder: PurePosixPath
    config: str
    master: str
    port: int
    progress: str | None = None
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

    @property
    def user_env(self) -> Mapping[str, str]:
        """The user's variables: what was typed before the command wins over the inventory's."""
        return {**self.env, **self.job.env}


@dataclass(frozen=True)
class Launch:
    """One plan for each node, in the order of ``RunSpec.workers``, and what the user should know about them."""

    plans: tuple[Mapping[str, Any], ...]
    notices: tuple[Notice, ...] = ()


def plan_name(rank: int) -> str:
    """The plan's file in the run's folder. The rank is in it because nodes may share that folder."""
    return f"plan-{rank}.json"


def new_run_id(now: datetime, config_name: str) -> str:
    """A name for a run that sorts by time and is safe in paths, environments and shells: 20261121-071500-sft-3f2a."""
    stem = re.sub(r"\.(ya?ml|json|py)$", "", config_name.rsplit("/", 1)[-1], flags=re.IGNORECASE)
    word = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:24].strip("-") or "run"
    return f"{now.astimezone(timezone.utc):%Y%m%d-%H%M%S}-{word}-{secrets.token_hex(2)}"
