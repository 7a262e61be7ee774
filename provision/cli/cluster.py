"""What commands about nodes share: their options, the inventory, and somebody to ask."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from provision.cli.terminal import Terminal
from provision.errors import UsageError
from provision.inventory import load, local_inventory, select
from provision.model import Inventory, Node, Notice
from provision.output import Reporter
from provision.session import Session
from provision.tasks.failed import last_failed

if TYPE_CHECKING:
    from provision.ssh.prompts import Prompts

INVENTORY = "inventory.yaml"


def on_nodes(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options that choose an inventory and some of its nodes."""
    for option in (
        click.option("--exclude", metavar="NODES", help="All but these, written like --limit."),
        click.option("--limit", metavar="NODES", help="Only these, such as 'gpu[01-04],@storage,!gpu03' or 'gpu*'."),
        click.option(
            "--inventory", "-i", "inventory_path", default=INVENTORY, show_default=True, type=click.Path(path_type=Path)
        ),
    ):
        command = option(command)
    return command


retrying = click.option("--retry-failed", is_flag=True, help="Only nodes where the last command of this name failed.")

relaying = click.option(
    "--relay",
    type=click.Choice(["on", "off"]),
    default="on",
    show_default=True,
    help="From three nodes on, nodes pass the bytes on to one another.",
)


def prompts_of(reporter: Reporter, *, accept_host_keys: bool = False) -> Prompts | None:
    """Somebody to ask; None where nobody can answer."""
    if sys.stdin.isatty() or accept_host_keys:
        return Terminal(reporter, accept_host_keys=accept_host_keys)
    return None


def session_on(
    reporter: Reporter,
    inventory: Inventory,
    nodes: Sequence[Node],
    *,
    dry_run: bool = False,
    asks_sudo: bool = True,
) -> Session:
    """The session of a command that works on these nodes."""
    return Session(
        inventory,
        nodes,
        typed=reporter.typed,
        prompts=prompts_of(reporter),
        emit=reporter,
        dry_run=dry_run,
        asks_sudo=asks_sudo,
    )


def to_work_on(
    reporter: Reporter,
    inventory: Inventory,
    command: str,
    *,
    limit: str | None,
    exclude: str | None,
    retry_failed: bool = False,
) -> tuple[Node, ...]:
    """The nodes that a command works on; none, which is said, where only failed ones are wanted and there are none.

    Args:
        reporter: who says it.
        inventory: the cluster.
        command: the command's name, as ``tasks.failed.remember_failed`` was given it.
        limit: the option ``--limit``.
        exclude: the option ``--exclude``.
        retry_failed: the option ``--retry-failed``.

    Raises:
        UsageError: see ``inventory.select``.
    """
    nodes = select(inventory, limit=limit, exclude=exclude)
    if not retry_failed:
        return nodes
    failed = last_failed(inventory, command, nodes)
    if not failed:
        among = " of those chosen" if limit is not None or exclude is not None else ""
        reporter.result({"nodes": {}}, f"the last {command} failed on no node{among}: nothing to do")
    return failed


def load_inventory(path: Path, reporter: Reporter) -> Inventory:
    """The inventory, its warnings shown."""
    inventory = load(path)
    for warning in inventory.warnings:
        reporter.warn(warning)
    return inventory


def load_or_here(path: Path, reporter: Reporter, *, nodes: int | None = None, starts: bool = False) -> Inventory:
    """The inventory; where there is no file and none was named, this machine alone, which needs no ssh.

    It is the one rule of every command that can run on this machine alone.

    Args:
        path: of the file.
        reporter: is told which it is.
        nodes: how many nodes are asked for; None: any number.
        starts: programs of the environment are to be started.

    Raises:
        UsageError: several nodes are asked for, and no inventory names them; or see ``load`` and ``local_inventory``.
    """
    named = click.get_current_context().get_parameter_source("inventory_path") is not ParameterSource.DEFAULT
    if named or path.exists():
        return load_inventory(path, reporter)
    refuse_alone(nodes)
    here = local_inventory(starts=starts)
    reporter(Notice(f"no inventory: this machine alone, with the environment {here.prefix}"))
    return here


def refuse_alone(nodes: int | None) -> None:
    """Refuse several nodes where there is no inventory.

    Raises:
        UsageError: there are several.
    """
    if nodes is not None and nodes > 1:
        raise UsageError(
            f"--nodes {nodes}: there is no {INVENTORY} in this folder, so there is this machine alone",
            hint="write one: clusterctl init NAME=ADDRESS NAME=ADDRESS; or name one: --inventory FILE",
        )
