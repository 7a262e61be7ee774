"""A training run as data: what the nodes said, what is to be started on them, and what it takes along.

A launcher (``provision.launchers``) turns a ``RunSpec`` into one plan for each node; the agent (``trainer/agent``)
carries a plan out. ``docs/concepts.md``, "A training run", has the formats.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from provision.errors import ClusterctlError
from provision.run.config import travel
from provision.run.luggage import LIMIT, WORK, Entry, Travel, tar_stream

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import PurePosixPath

    from provision.model import Node, Notice

__all__ = [
    "LIMIT",
    "WORK",
    "Entry",
    "Facts",
    "Launch",
    "RunSpec",
    "Travel",
    "Worker",
    "new_run_id",
    "plan_name",
    "tar_stream",
    "travel",
]


@dataclass(frozen=True)
class Facts:
    """What ``agent probe`` said about a node; ``trainer/agent/probe.py`` explains each."""

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
    gpus: int = 0
    cpus: int = 1
    memory_available: int | None = None
    disk_free: int = 0
    infiniband: tuple[Mapping[str, Any], ...] = ()
    leaks: Mapping[str, str] = field(default_factory=dict)
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
            said = json.loads(text)
            said["infiniband"] = tuple(said.get("infiniband", ()))
        except (ValueError, TypeError, AttributeError) as error:
            raise ClusterctlError(f"the agent's answer cannot be read: {text[:200]!r}") from error
        known = {each.name for each in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in said.items() if name in known})


@dataclass(frozen=True)
class Worker:
    """A node that takes part. Its rank is its place in ``RunSpec.workers``."""

    node: Node
    facts: Facts

    @property
    def processes(self) -> int:
        """Processes to start: what the inventory says, else one for each GPU, else one."""
        return self.node.gpus or self.facts.gpus or 1


@dataclass(frozen=True)
class RunSpec:
    """Everything that a launcher needs to know.

    ``prefix`` is the release's own path (not the symlink ``current``), ``folder`` the run's on the nodes.
    """

    id: str
    workers: tuple[Worker, ...]
    prefix: PurePosixPath
    folder: PurePosixPath
    config: str  # relative to job/
    master: str
    port: int
    progress: str | None = None  # the trainer's log, relative to the run's folder unless absolute
    env: Mapping[str, str] = field(default_factory=dict)  # the user's
    grace: float = 10.0


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
