"""The data types that all of clusterctl shares. They are frozen; this module imports no other module of clusterctl."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol

# --- the cluster --------------------------------------------------------------------------------

LOCAL = "local"  # the address of this machine itself, which needs no ssh


@dataclass(frozen=True)
class Node:
    """One machine of the cluster."""

    name: str
    address: str  # host name or IP address that ssh connects to; ``LOCAL``: this machine, without ssh
    data_address: str | None = None  # address on the fast network (IPoIB, 25 GbE)
    user: str | None = None  # overrides Ssh.user
    port: int | None = None  # overrides Ssh.port
    gpus: int | None = None  # processes to start on this node; None: one per GPU, or one if it has none

    @property
    def train_address(self) -> str:
        """The address at which other nodes reach this one during training."""
        return self.data_address or ("127.0.0.1" if self.is_local else self.address)

    @property
    def is_local(self) -> bool:
        """Whether the node is this machine, which needs no ssh."""
        return self.address == LOCAL


@dataclass(frozen=True)
class Ssh:
    """How ssh reaches the nodes. Paths are absolute once the inventory is loaded."""

    user: str | None = None  # None: ssh_config's, else the local login name
    port: int | None = None  # None: ssh_config's, else 22
    key: Path | None = None  # private key; None: the agent and ssh's default keys
    known_hosts: Path = Path("known_hosts")  # the pinned host keys, next to the inventory
    timeout: float = 10.0  # seconds until a connection attempt fails
    jump_hosts: tuple[Node, ...] = ()  # any one of them leads to every node; empty: ssh_config's


@dataclass(frozen=True)
class TrainDefaults:
    """The inventory's ``train:`` section: the defaults of ``clusterctl train``."""

    config: Path | None = None
    port: int | None = None  # MASTER_PORT; None: a free port is found on rank 0
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckOptions:
    """The inventory's ``checks:`` section: thresholds by check id and name, and the checks to skip."""

    limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    off: tuple[str, ...] = ()


@dataclass(frozen=True)
class CommandLine:
    """A command as the user typed it; ``provision/hints.py`` writes hints from it.

    Attributes:
        command: its name, such as ``services apply``; empty where no command line was parsed.
        options: by name, the values of each typed option: none for a flag, several for a repeated one.
        words: the arguments.
        separated: how many of the arguments were typed after ``--``; None without ``--``.
    """

    command: str = ""
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    separated: int | None = field(default=None, compare=False)


UNTYPED = CommandLine()  # where no command line was parsed


@dataclass(frozen=True)
class Inventory:
    """A cluster as its inventory file describes it.

    ``prefix`` is the path of the environment on every node. It is a symlink to the current release,
    ``root/releases/<12 hex digits>``.
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
    base: PurePosixPath | None = None  # replaces the prefix's parent as ``root``
    textfile: PurePosixPath | None = None  # on every node, the folder of node_exporter's textfile collector
    notify: str | None = None  # the shell command for events of a run
    alone: bool = False  # there is no inventory file: this machine is the only node

    @property
    def root(self) -> PurePosixPath:
        """The folder that contains ``releases/`` and ``runs/``: ``base``, else the parent of ``prefix``."""
        return self.base or self.prefix.parent


# --- a node's answer -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """A script's output and exit status."""

    rc: int
    out: str
    err: str = ""
    seconds: float = 0.0


class Remote(Protocol):
    """Runs POSIX sh scripts on one node, with an optional byte stream on their stdin. Nothing else reaches a node."""

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
            script: POSIX sh; the login shell never parses it.
            stdin: bytes for the script's stdin.
            on_line: called with every line of stdout as it arrives; ``Result.out`` is then empty.
            deadline: seconds until the script times out, without the time that the user takes to type a password.
            root: run the script as root, through sudo if the ssh user is not root.

        Raises:
            provision.ssh.remote.NodeUnreachable: the connection failed or broke; the reason names the cause.
            provision.ssh.remote.DeadlineExceeded: the script took longer than ``deadline``.
            provision.ssh.remote.RootRefused: the node does not allow root; the reason says why.
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
    stdin: bool = False  # whether ``do`` reads the bytes that the caller sends


@dataclass(frozen=True)
class StepResult:
    """The result of a step on one node. ``detail`` is the output of a failed step."""

    name: str
    state: StepState
    detail: str = ""
    seconds: float = 0.0


# --- transfers -------------------------------------------------------------------------------------

Wire = Literal["zstd", "plain"]  # compressed for nodes that have zstd, else as they are unpacked


@dataclass(frozen=True)
class Part:
    """The unit of a transfer that a node unpacks as a whole and never receives twice: a tar, or a range of a file.

    Attributes:
        key: identifies the part on a node; letters, digits and dots.
        kind: ``tar``, unpacked in parallel with others; ``last``, a tar that is unpacked after all others; or ``range``
            of the file ``path``, from ``offset`` (a multiple of 1 MiB).
        size: bytes on the wire.
        blocks: the bytes on the wire; the iterator raises at the end if they are damaged.
        path: the range's file, relative to the folder where parts are unpacked.
        offset: the start of the range in the file.
        mode: the mode of the range's file.
        mtime: the time of the range's file, in whole seconds.
        group: a node that has this key has every part of the group.
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
    """A check's verdict about a node."""

    check: str
    node: str
    verdict: Verdict
    observed: str
    expected: str = ""
    why: str = ""
    fix: str = ""


# --- events ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageStarted:
    """A stage of a task starts. ``total`` is the expected number of bytes or items, if known."""

    stage: str
    title: str
    total: int | None = None
    unit: Literal["bytes", "nodes", "steps"] = "nodes"


@dataclass(frozen=True)
class Progress:
    """A stage has progressed to ``done`` of ``total``; ``note`` is a short current state."""

    stage: str
    done: int
    total: int | None = None
    note: str = ""


@dataclass(frozen=True)
class StageFinished:
    """A stage has finished. ``states`` maps node names to a short state; equal states are folded when shown.

    ``running``: the message for a stage that is still running after the command stops showing it.
    ``failed``: the number of failed nodes, for stages without ``states``.
    """

    stage: str
    seconds: float
    states: Mapping[str, str] = field(default_factory=dict)
    summary: str = ""
    running: str = ""
    failed: int = 0


@dataclass(frozen=True)
class Found:
    """A finding that the user should see."""

    finding: Finding


@dataclass(frozen=True)
class LogLine:
    """A line of a training log."""

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
