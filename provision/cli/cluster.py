"""What commands about nodes share: their options, the inventory, and somebody to ask."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from provision.inventory import load, select
from provision.model import Inventory, Node
from provision.output import Reporter
from provision.tasks.failed import last_failed

if TYPE_CHECKING:
    from provision.ssh.prompts import Prompts

INVENTORY = "inventory.yaml"


def on_nodes(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options that choose an inventory and some of its nodes."""
    for option in (
        click.option("--exclude", metavar="NODES", help="All but these, such as gpu[03,07]."),
        click.option("--limit", metavar="NODES", help="Only these, such as gpu[01-04]."),
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


class _Terminal:
    """Asks the person at the terminal, with the progress display out of the way."""

    def __init__(self, reporter: Reporter, *, accept_host_keys: bool) -> None:
        self._reporter = reporter
        self._accept = accept_host_keys

    def confirm_host_key(self, node: Node, key_type: str, fingerprint: str) -> bool:
        """Show the fingerprint and ask, unless every new key is accepted."""
        if self._accept:
            self._reporter.warn(f"{node.name} ({node.address}): pinned {key_type} {fingerprint}")
            return True
        if not sys.stdin.isatty():
            return False
        with self._reporter.paused():
            click.echo(f"{node.name} ({node.address}) shows the host key {key_type} {fingerprint}", err=True)
            return click.confirm("Is that its key?", default=False, err=True)

    def password(self, user: str, where: str) -> str | None:
        """Ask without echo."""
        if not sys.stdin.isatty():
            return None
        with self._reporter.paused():
            answer: str = click.prompt(f"Password of {user} on {where}", hide_input=True, err=True)
            return answer

    def sudo_password(self, user: str, where: str) -> str | None:
        """Ask without echo, once for all nodes."""
        if not sys.stdin.isatty():
            return None
        with self._reporter.paused():
            answer: str = click.prompt(f"sudo password of {user} (first needed on {where})", hide_input=True, err=True)
            return answer


def prompts_of(reporter: Reporter, *, accept_host_keys: bool = False) -> Prompts | None:
    """Somebody to ask; None where nobody can answer."""
    if sys.stdin.isatty() or accept_host_keys:
        return _Terminal(reporter, accept_host_keys=accept_host_keys)
    return None


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
        command: the command's name, as ``tasks.failed.remembered`` was given it.
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
        reporter.result({"nodes": {}}, f"the last clusterctl {command} failed on no node{among}: nothing to do")
    return failed


def load_inventory(path: Path, reporter: Reporter) -> Inventory:
    """The inventory, its warnings shown."""
    inventory = load(path)
    for warning in inventory.warnings:
        reporter.warn(warning)
    return inventory
