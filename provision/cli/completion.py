"""``clusterctl completion``, and completion of nodes, runs and releases.

Completion never prompts and never shows an error. A list that cannot be read is empty.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

import click
from click.shell_completion import CompletionItem, get_completion_class

from provision.cli.cluster import INVENTORY
from provision.cli.options import reporting
from provision.errors import ClusterctlError
from provision.inventory import load
from provision.model import Inventory
from provision.output import Reporter
from provision.run import record

VARIABLE = "_CLUSTERCTL_COMPLETE"  # the shell script sets it to ask for completions
PATIENCE = 3  # seconds that the nodes have to list their releases
ASKED = 4  # nodes whose releases are listed

INSTALL = {
    "bash": "source <(clusterctl completion bash)",
    "zsh": "source <(clusterctl completion zsh)",
    "fish": "clusterctl completion fish | source",
}


@click.command("completion")
@click.argument("shell", type=click.Choice(sorted(INSTALL)))
@reporting
def completion_command(reporter: Reporter, shell: str) -> None:
    """Print a shell completion script.

    It completes commands, options, nodes, runs and releases. Add the line of the example to the shell's start-up file:
    ~/.bashrc, ~/.zshrc (after compinit) or ~/.config/fish/config.fish. For fish, use:
    clusterctl completion fish | source
    """
    found = get_completion_class(shell)
    assert found is not None, shell
    command = click.get_current_context().find_root().command
    script = found(command, {}, "clusterctl", VARIABLE)
    text = script.source_template % script.source_vars()
    reporter.result({"shell": shell, "script": text}, text)


class _Named(click.types.StringParamType):
    """Text that names a node, run or release of the inventory, with completion."""

    def __init__(self, names: Callable[[Inventory], Iterable[str]], *, several: bool = False) -> None:
        self._names = names
        self._several = several

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        del param
        path = Path(ctx.params.get("inventory_path") or INVENTORY)
        try:
            names = list(self._names(load(path)))
        except (ClusterctlError, OSError):
            return []
        done = incomplete[: incomplete.rfind(",") + 1] if self._several else ""
        return [CompletionItem(done + name) for name in names if name.startswith(incomplete[len(done) :])]


def _nodes(inventory: Inventory) -> Iterable[str]:
    yield from (node.name for node in inventory.nodes)
    yield from (f"@{group}" for group in inventory.groups)


def _runs(inventory: Inventory) -> Iterable[str]:
    """The runs that this machine has records of, newest first."""
    return sorted(record.kept(inventory.path), reverse=True)


def _releases(inventory: Inventory) -> Iterable[str]:
    """The releases on the first nodes that answer within ``PATIENCE``."""
    from provision.session import Session  # noqa: PLC0415 - ssh takes a moment to import
    from provision.tasks.releases import releases  # noqa: PLC0415

    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(PATIENCE)
    with Session(inventory, inventory.nodes[:ASKED]) as session:
        found = releases(session).ok
    signal.alarm(0)
    return sorted({name for node in found.values() for name in node.complete})


def _give_up(_number: int, _frame: FrameType | None) -> None:
    os._exit(0)


NODES = _Named(_nodes, several=True)
RUN = _Named(_runs)
RELEASE = _Named(_releases)
TYPES = {
    **dict.fromkeys(("limit", "exclude", "node"), NODES),
    **dict.fromkeys(("run", "runs", "good", "bad"), RUN),
    **dict.fromkeys(("to", "release"), RELEASE),
}


def complete(command: click.Command) -> None:
    """Complete nodes, runs and releases in a command's parameters."""
    if any(param.name == "inventory_path" for param in command.params):
        for param in command.params:
            if param.name in TYPES and isinstance(param.type, click.types.StringParamType):
                param.type = TYPES[param.name]
