"""The nouns. Frozen data that everything else passes around; this file imports nothing of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol

# --- the cluster --------------------------------------------------------------------------------

LOCAL = "local"  # the address of this machine itself, which needs no ssh


@dataclass(frozen=True)
class Ssh:
    """How the nodes are reached. Paths are absolute once the inventory is loaded."""

    user: str | None = None  # None: what ssh_config or the local login name says
    port: int | None = None  # None: what ssh_config says, else 22
    key: Path | None = None  # private key; None: the agent and ssh's default keys
    known_hosts: Path = Path("known_hosts")  # the pinned host keys, beside the inventory
    timeout: float = 10.0  # seconds until a connection attempt is given up


@dataclass(frozen=True)
class Node:
    """One machine of the cluster."""

    name: str
    address: str  # host name or IP address that ssh connects to; ``LOCAL``: this machine, without ssh
    data_address: str | None = None  # address on the fast network (IPoIB, 25 GbE)
    user: str | None = None  # overrides Ssh.user
    port: int | None = None  # overrides Ssh.port
    gpus: int | None = None  # processes to start here; None: as many as the node has GPUs, 1 without any

    @property
    def train_address(self) -> str:
        """The address other nodes reach this one at during training."""
        return self.data_address or ("127.0.0.1" if self.is_local else self.address)

    @property
    def is_local(self) -> bool:
        """Whether it is the machine that this program runs on, reached without ssh."""
        return self.address == LOCAL


@dataclass(frozen=True)
class TrainDefaults:
    """The inventory's ``train:`` section: what ``clusterctl train`` uses when it is not told otherwise."""

    config: Path | None = None
    port: int | None = None  # MASTER_PORT; None: a free port is found on rank 0
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckOptions:
    """The inventory's ``checks:`` section: thresholds by check id and name, and checks that are not run."""

    limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    off: tuple[str, ...] = ()


@dataclass(frozen=True)
class CommandLine:
    """A command as the user typed it; ``provision/hints.py`` writes hints from it.

    Attributes:
        command: its name, such as ``services apply``; empty where no command line was parsed.
        options: by name, the values of each option that was typed: none for a flag, several for a repeated one.
        words: the arguments.
    """

    command: str = ""
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    words: tuple[str, ...] = ()


UNTYPED = CommandLine()  # where no command line was parsed


@dataclass(frozen=True)
class Inventory:
    """A cluster, as its inventory file describes it.

    ``prefix`` is the path by which people and jobs know the environment on every node. It is a symlink:
    the environment itself lies in ``root/releases/<12 hex digits>``.
    """

    path: Path
    prefix: PurePosixPath
    nodes: tuple[Node, ...]
    ssh: Ssh = Ssh()
    train: TrainDefaults = TrainDefaults()
    services: Mapping[str, Any] = field(default_factory=dict)  # each service's own ``Options``
    warnings: tuple[str, ...] = ()
    checks: CheckOptions = CheckOptions()
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # names of nodes, for --limit @GROUP
    base: PurePosixPath | None = None  # in place of the prefix's parent, where that is not ours
    alone: bool = False  # no file: this machine alone, whose runs are recorded beside ``path``

    @property
    def root(self) -> PurePosixPath:
        """The folder that holds ``releases/`` and ``runs/``: ``base``, else the parent of ``prefix``."""
        return self.base or self.prefix.parent


# --- a node's answer -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What a script printed and how it ended."""

    rc: int
    out: str
    err: str = ""
    seconds: float = 0.0


class Remote(Protocol):
    """The one way to a node: run a POSIX sh script there, with an optional byte stream on its stdin."""

    node: Node

    def run(
        self,
        script: str,
        *,
        stdin: Iterable[bytes] | None = None,
        on_line: Callable[[str], None] | None = None,
        deadline: float | None = None,
        root: bool = False,
    ) -> Result:
        """Run ``script`` under ``sh`` on the node.

        Args:
            script: POSIX sh; it is not subject to the login shell's quoting.
            stdin: bytes that the script's own stdin delivers; its end is the end of file.
            on_line: called with every line of stdout as it arrives (then ``Result.out`` is empty).
            deadline: seconds until the script is given up; the time in which a password is asked for does not count.
            root: run it as root: through sudo where the ssh user is another one.

        Raises:
            provision.ssh.remote.NodeUnreachable: no connection, or it broke; the reason names the cause.
            provision.ssh.remote.DeadlineExceeded: ``deadline`` seconds have passed.
            provision.ssh.remote.RootRefused: it was to run as root, which the node does not allow; the reason says why.
        """
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


# --- the plan ------------------------------------------------------------------------------------

StepState = Literal["ok", "changed", "would change", "failed"]


@dataclass(frozen=True)
class Step:
    """One change to a node: ``do`` runs when ``unless`` fails. Both are POSIX sh."""

    name: str
    do: str
    unless: str = "false"
    stdin: bool = False  # ``do`` reads the bytes that the caller sends; every other step reads nothing


@dataclass(frozen=True)
class StepResult:
    """What became of a step on one node. ``detail`` is its output when it failed."""

    name: str
    state: StepState
    detail: str = ""
    seconds: float = 0.0


# --- many bytes ------------------------------------------------------------------------------------

Wire = Literal["zstd", "plain"]  # compressed for nodes that have zstd, else as they will lie there


@dataclass(frozen=True)
class Leg:
    """What a node unpacks as a whole, and never receives twice: a tar stream, or a range of one large file.

    Attributes:
        key: names it among what a node has; letters, digits and dots.
        kind: ``tar``, unpacked beside others; ``last``, a tar that is unpacked when all before it have been; or
            ``range`` of the file ``path``, from ``offset`` (a multiple of 1 MiB).
        size: bytes on the wire.
        blocks: the bytes on the wire; whether they are right is known at their end.
        path: of a range's file, relative to where legs are unpacked.
        offset: of a range, in the file.
        mode: of a range's file.
        mtime: of a range's file, in whole seconds.
        group: a node that has the group of this name has every leg of it.
    """

    key: str
    kind: Literal["tar", "range", "last"]
    size: int
    blocks: Callable[[], Iterator[bytes]]
    path: str = ""
    offset: int = 0
    mode: int = 0o644
    mtime: int = 0
    group: str = ""


# --- checks --------------------------------------------------------------------------------------

Verdict = Literal["OK", "WARN", "FAIL", "UNKNOWN", "N/A"]  # N/A: the node lacks what the check is about


@dataclass(frozen=True)
class Finding:
    """What a check says about a node."""

    check: str
    node: str
    verdict: Verdict
    observed: str
    expected: str = ""
    why: str = ""
    fix: str = ""


# --- what the core tells the outside ---------------------------------------------------------------


@dataclass(frozen=True)
class StageStarted:
    """A stage of a task begins. ``total`` bytes or items are expected when known."""

    stage: str
    title: str
    total: int | None = None
    unit: Literal["bytes", "nodes", "steps"] = "nodes"


@dataclass(frozen=True)
class Progress:
    """A stage came further: ``done`` of ``total``; ``note`` is a short present state."""

    stage: str
    done: int
    total: int | None = None
    note: str = ""


@dataclass(frozen=True)
class StageFinished:
    """A stage ended. ``states`` maps node names to a short state; equal states are folded when shown.

    ``goes_on``: it did not end, only the command that showed it; what is said of it instead.
    ``failed``: how many nodes failed, where no state says so.
    """

    stage: str
    seconds: float
    states: Mapping[str, str] = field(default_factory=dict)
    summary: str = ""
    goes_on: str = ""
    failed: int = 0


@dataclass(frozen=True)
class Found:
    """A finding that the user should see."""

    finding: Finding


@dataclass(frozen=True)
class LogLine:
    """A line of a training log, as it arrives."""

    node: str
    rank: int | None
    line: str


@dataclass(frozen=True)
class Notice:
    """One sentence for the user that is neither progress nor a finding."""

    text: str
    level: Literal["info", "warning"] = "info"


Event = StageStarted | Progress | StageFinished | Found | LogLine | Notice
Emit = Callable[[Event], None]


def ignore(event: Event) -> None:
    """An ``Emit`` for callers that want no events."""
