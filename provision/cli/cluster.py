"""What commands on nodes share: the options that select nodes, their session, its prompts, and ``--retry-failed``.

Worker threads ask, while Ctrl-C reaches the main thread. So no read of a prompt blocks: an interrupt ends the question
and restores the terminal's echo.

``--retry-failed`` reads the file ``.clusterctl-failed.json`` next to the inventory: a JSON object that maps the
inventory's file name to commands, and each command to names of nodes that it did not finish. An empty file is deleted.
If the folder is not writable, nothing is remembered, and the command does not fail.
"""

from __future__ import annotations

import json
import os
import select as selecting
import signal
import sys
import tempfile
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from provision.errors import InterruptedByUser, NodesError, NodesFailedError, UsageError
from provision.inventory import load, local_inventory, select
from provision.model import Emit, Inventory, Node, Notice
from provision.output import Reporter
from provision.session import Session

if TYPE_CHECKING:
    from provision.ssh.prompts import Prompts

INVENTORY = "inventory.yaml"
FAILED = ".clusterctl-failed.json"

_Failures = dict[str, dict[str, list[str]]]


@dataclass(frozen=True)
class Selection:
    """What the options ``--inventory``, ``--limit`` and ``--exclude`` select."""

    path: Path
    limit: str | None
    exclude: str | None

    def load_or_here(self, reporter: Reporter, *, nodes: int | None = None, starts: bool = False) -> Inventory:
        """Loads the inventory. Without ``--inventory`` and without the default file, it is this machine alone.

        Every command that can run on this machine alone, without ssh, uses this function.

        Args:
            reporter: prints a notice if it is this machine alone.
            nodes: the number of nodes requested; None: any number.
            starts: whether the command starts programs of the environment.

        Raises:
            UsageError: several nodes are requested without an inventory; or see ``load`` and ``local_inventory``.
        """
        named = click.get_current_context().get_parameter_source("inventory_path") is not ParameterSource.DEFAULT
        if named or self.path.exists():
            return load_inventory(self.path, reporter)
        refuse_alone(nodes)
        here = local_inventory(starts=starts)
        reporter(Notice(f"no inventory: using this machine alone, with the environment {here.prefix}"))
        return here

    def nodes(self, inventory: Inventory, count: int | None = None) -> tuple[Node, ...]:
        """The selected nodes, or the first ``count`` of them.

        Raises:
            UsageError: see ``inventory.select``.
        """
        return select(inventory, limit=self.limit, exclude=self.exclude, count=count)

    def nodes_for(
        self, reporter: Reporter, inventory: Inventory, command: str, *, retry_failed: bool
    ) -> tuple[Node, ...]:
        """The selected nodes, with ``--retry-failed`` only those that the last ``command`` did not finish.

        Empty, with a message, if there are none.

        Raises:
            UsageError: see ``inventory.select``.
        """
        nodes = self.nodes(inventory)
        if not retry_failed:
            return nodes
        failed = last_failed(inventory, command, nodes)
        if not failed:
            among = " of the selected nodes" if self.limit is not None or self.exclude is not None else " of the nodes"
            reporter.result({"nodes": {}}, f"nothing to retry: the last {command} failed on none{among}")
        return failed

    def session(self, reporter: Reporter, *, dry_run: bool = False) -> Session:
        """The session of a command on the selected nodes of the inventory."""
        inventory = load_inventory(self.path, reporter)
        return session_on(reporter, inventory, self.nodes(inventory), dry_run=dry_run)

    def session_or_here(self, reporter: Reporter, *, starts: bool = False, asks_sudo: bool = True) -> Session:
        """The session of a command that can also run on this machine alone; see ``load_or_here``."""
        inventory = self.load_or_here(reporter, starts=starts)
        return session_on(reporter, inventory, self.nodes(inventory), asks_sudo=asks_sudo)


def on_nodes(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that select an inventory and nodes. The command receives them as ``selection``."""

    @click.option(
        "--inventory",
        "-i",
        "inventory_path",
        default=INVENTORY,
        show_default=True,
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Cluster inventory.",
    )
    @click.option("--limit", metavar="NODES", help="Only these nodes, e.g. 'gpu[01-04],@storage,!gpu03'.")
    @click.option("--exclude", metavar="NODES", help="Skip these nodes (same syntax as --limit).")
    @wraps(command)
    def wrapped(*args: Any, inventory_path: Path, limit: str | None, exclude: str | None, **kwargs: Any) -> None:
        command(*args, selection=Selection(inventory_path, limit, exclude), **kwargs)

    return wrapped


retrying = click.option("--retry-failed", is_flag=True, help="Only nodes where this command failed last time.")

writing_scripts = click.option(
    "--scripts",
    "-O",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="With --dry-run: write the scripts to this directory.",
)

relaying = click.option(
    "--relay",
    type=click.Choice(["on", "off"]),
    default="on",
    show_default=True,
    help="Let nodes copy from one another.",
)


def load_inventory(path: Path, reporter: Reporter) -> Inventory:
    """Loads the inventory and prints its warnings."""
    inventory = load(path)
    for warning in inventory.warnings:
        reporter.warn(warning)
    return inventory


def session_on(
    reporter: Reporter,
    inventory: Inventory,
    nodes: Sequence[Node],
    *,
    dry_run: bool = False,
    asks_sudo: bool = True,
    emit: Emit | None = None,
) -> Session:
    """The session of a command that works on these nodes. ``emit`` receives its events; None: the reporter."""
    return Session(
        inventory,
        nodes,
        typed=reporter.typed,
        prompts=prompts_of(reporter),
        emit=emit or reporter,
        dry_run=dry_run,
        asks_sudo=asks_sudo,
    )


def no_answer(session: Session, silent: Mapping[str, str], *, shown: bool = False) -> NodesFailedError:
    """The error for nodes that did not answer, each with its reason; without the reasons if the result shows them."""
    return NodesFailedError(
        f"no answer from {len(silent)} of {len(session.nodes)} nodes",
        reasons={} if shown else silent,
        hint=session.without(silent, len(session.nodes)),
    )


def refuse_alone(nodes: int | None) -> None:
    """Refuse several nodes without an inventory.

    Raises:
        UsageError: more than one node is requested.
    """
    if nodes is not None and nodes > 1:
        raise UsageError(
            f"--nodes {nodes}: no {INVENTORY} in this directory, so only this machine can be used",
            hint="write one: clusterctl init NAME=ADDRESS NAME=ADDRESS; or use one: --inventory FILE",
        )


def prompts_of(reporter: Reporter, *, accept_host_keys: bool = False) -> Prompts | None:
    """The prompts of the terminal; None if there is no terminal and every host key must be known."""
    if sys.stdin.isatty() or accept_host_keys:
        return Terminal(reporter, accept_host_keys=accept_host_keys)
    return None


class Terminal:
    """Asks at the terminal, with the progress display paused; implements ``ssh.prompts.Prompts``.

    Create it in the main thread. Without a terminal every answer is no, or None.
    """

    def __init__(self, reporter: Reporter, *, accept_host_keys: bool) -> None:
        self._reporter = reporter
        self._accept = accept_host_keys
        self._woken, self._wake = os.pipe()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._leave_on(number)

    def confirm_host_key(self, node: Node, key_type: str, fingerprint: str) -> bool:
        """Show the fingerprint and ask, unless every new key is accepted."""
        if self._accept:
            self._reporter.warn(f"{node.name} ({node.address}): pinned {key_type} {fingerprint}")
            return True
        if not sys.stdin.isatty():
            return False
        with self._reporter.paused():
            click.echo(f"{node.name} ({node.address}) has the host key {key_type} {fingerprint}", err=True)
            while True:
                answer = self._answer("Trust this key? [y/N]: ")
                word = (answer or "").strip().lower()
                if word in {"y", "yes"}:
                    return True
                if word in {"", "n", "no"}:
                    return False
                click.echo("Please answer yes or no.", err=True)

    def password(self, user: str, where: str) -> str | None:
        """Ask without echo."""
        return self._secret(f"Password of {user} on {where}: ")

    def sudo_password(self, user: str, where: str) -> str | None:
        """Ask without echo, once for all nodes."""
        return self._secret(f"sudo password of {user} (first needed on {where}): ")

    def _secret(self, question: str) -> str | None:
        if not sys.stdin.isatty():
            return None
        with self._reporter.paused(), _unseen(sys.stdin.fileno()):
            answer = self._answer(question)
            click.echo(err=True)  # the user's own newline was not shown
        return answer or None

    def _answer(self, question: str) -> str | None:
        """A line of text; None at the end of the input or after an interrupt."""
        click.echo(question, nl=False, err=True)
        typed = b""
        while not typed.endswith(b"\n"):
            ready, _, _ = selecting.select([sys.stdin.fileno(), self._woken], [], [])
            if self._woken in ready:
                return None
            part = os.read(sys.stdin.fileno(), 4096)
            if not part:
                return None
            typed += part
        return typed[:-1].decode(sys.stdin.encoding or "utf-8", "surrogateescape")

    def _leave_on(self, number: signal.Signals) -> None:
        """Ends the question when a signal arrives, then calls the previous handler."""
        before: Any = signal.getsignal(number)
        if callable(before):

            def leave(received: int, frame: FrameType | None) -> None:
                os.write(self._wake, b".")
                before(received, frame)

            signal.signal(number, leave)


@contextmanager
def _unseen(terminal: int) -> Iterator[None]:
    """Turns echo off and drops text typed before."""
    before = termios.tcgetattr(terminal)
    hidden = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(terminal, termios.TCSAFLUSH, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def last_failed(inventory: Inventory, command: str, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes that the last ``command`` did not finish."""
    names = set(_load(inventory.path).get(inventory.path.name, {}).get(command, ()))
    return tuple(node for node in nodes if node.name in names)


@contextmanager
def remember_failed(
    inventory: Inventory, command: str, nodes: Sequence[Node], *, dry_run: bool = False
) -> Iterator[None]:
    """Remember the nodes that the command in this block does not finish.

    After Ctrl-C, or an error before any node was finished, these are all of ``nodes``. An error that is not about nodes
    (a wrong argument, a damaged bundle) does not change the file, and neither does a dry run. The entries of other
    nodes stay.
    """
    try:
        yield
    except (NodesError, InterruptedByUser, KeyboardInterrupt) as error:
        if not dry_run:
            _update(inventory, command, nodes, unfinished(error, nodes))
        raise
    if not dry_run:
        _update(inventory, command, nodes, ())


def unfinished(error: BaseException, nodes: Sequence[Node]) -> tuple[str, ...]:
    """The names of the nodes that are not finished after a command ended with ``error``."""
    if isinstance(error, NodesFailedError) and not error.nothing_done:
        return tuple(node.name for node in nodes if node.name in error.reasons)
    return tuple(node.name for node in nodes)


def _update(inventory: Inventory, command: str, nodes: Sequence[Node], failed: Sequence[str]) -> None:
    path = inventory.path
    kept = _load(path)
    before = json.dumps(kept)
    commands = kept.pop(path.name, {})
    others = {node.name for node in inventory.nodes} - {node.name for node in nodes}
    names = sorted({*others.intersection(commands.get(command, ())), *failed})
    commands = {key: value for key, value in {**commands, command: names}.items() if value}
    if commands:
        kept[path.name] = commands
    if json.dumps(kept) == before:
        return
    with suppress(OSError):
        if kept:
            _write(path.with_name(FAILED), kept)
        else:
            path.with_name(FAILED).unlink(missing_ok=True)


def _write(path: Path, kept: Mapping[str, object]) -> None:
    handle, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(kept, file, indent=1)
            file.write("\n")
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise


def _load(inventory: Path) -> _Failures:
    """The file's content; empty if the file does not exist or is not clusterctl's."""
    try:
        data = json.loads(inventory.with_name(FAILED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(data, dict):
        return {}
    return {
        str(file): {
            str(key): [str(name) for name in names] for key, names in commands.items() if isinstance(names, list)
        }
        for file, commands in data.items()
        if isinstance(commands, dict)
    }
