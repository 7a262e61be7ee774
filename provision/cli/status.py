"""The command that tells what the nodes are doing."""

from __future__ import annotations

from pathlib import Path

import click

from provision.cli.cluster import load_inventory, on_nodes, prompts_of
from provision.cli.options import reporting
from provision.errors import NodesFailedError
from provision.inventory import fold, select
from provision.output import Reporter
from provision.summaries.status import status_shown
from provision.tasks.status import status


@click.command("status")
@on_nodes
@reporting
def status_command(reporter: Reporter, inventory_path: Path, limit: str | None, exclude: str | None) -> None:
    """Tell of every node whether it answers, since when it is up, its release, and how its clock differs."""
    inventory = load_inventory(inventory_path, reporter)
    nodes = select(inventory, limit=limit, exclude=exclude)
    result = status(inventory, nodes, prompts=prompts_of(reporter), emit=reporter)
    reporter.result(*status_shown(result))
    if result.unreachable:
        raise NodesFailedError(
            f"no answer from {len(result.unreachable)} of {len(nodes)} nodes",
            reasons={},  # the result has said them
            hint=f"to go on without: --exclude {fold(result.unreachable)}",
        )


COMMANDS = (status_command,)
