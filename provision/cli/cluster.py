"""What commands on nodes share: options, inventory, prompts and session."""

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
    """Adds the options that select an inventory and nodes."""
    for option in (
        click.option("--exclude", metavar="NODES", help="Skip these nodes (same syntax as --limit)."),
        click.option("--limit", metavar="NODES", help="Only these nodes, e.g. 'gpu[01-04],@storage,!gpu03'."),
        click.option(
            "--inventory",
            "-i",
            "inventory_path",
            default=INVENTORY,
            show_default=True,
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="Cluster inventory.",
        ),
    ):
        command = option(command)
    return command


retrying = click.option("--retry-failed", is_flag=True, help="Only nodes where this command failed last time.")

relaying = click.option(
    "--relay",
    type=click.Choice(["on", "off"]),
    default="on",
    show_default=True,
    help="Let nodes copy from one another.",
)


def prompts_of(reporter: Reporter, *, accept_host_keys: bool = False) -> Prompts | None:
    """The prompts of the terminal; None if there is no terminal and every host key must be known."""
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
    """The nodes that a command works on; empty, with a message, if ``--retry-failed`` finds no failed node.

    Args:
        reporter: prints the message.
        inventory: the cluster.
        command: the name under which ``tasks.failed.remember_failed`` records failures.
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
        among = " of the selected nodes" if limit is not None or exclude is not None else ""
        reporter.result({"nodes": {}}, f"nothing to retry: the last {command} failed on none{among or ' of the nodes'}")
    return failed


def load_inventory(path: Path, reporter: Reporter) -> Inventory:
    """Loads the inventory and prints its warnings."""
    inventory = load(path)
    for warning in inventory.warnings:
        reporter.warn(warning)
    return inventory


def load_or_here(path: Path, reporter: Reporter, *, nodes: int | None = None, starts: bool = False) -> Inventory:
    """Loads the inventory. Without ``--inventory`` and without the default file, it is this machine alone, without ssh.

    Every command that can run on this machine alone uses this function.

    Args:
        path: the inventory file.
        reporter: prints a notice if it is this machine alone.
        nodes: the number of nodes requested; None: any number.
        starts: whether the command starts programs of the environment.

    Raises:
        UsageError: several nodes are requested without an inventory; or see ``load`` and ``local_inventory``.
    """
    named = click.get_current_context().get_parameter_source("inventory_path") is not ParameterSource.DEFAULT
    if named or path.exists():
        return load_inventory(path, reporter)
    refuse_alone(nodes)
    here = local_inventory(starts=starts)
    reporter(Notice(f"no inventory: using this machine alone, with the environment {here.prefix}"))
    return here


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
