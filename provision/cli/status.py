"""``clusterctl status``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from provision.cli.cluster import load_or_here, on_nodes, session_on
from provision.cli.options import reporting
from provision.errors import NodesFailedError
from provision.inventory import select
from provision.output import Reporter
from provision.summaries.runs import run_output
from provision.summaries.status import status_output
from provision.tasks.runs import run_status, status


@click.command("status")
@on_nodes
@click.argument("run", required=False)
@reporting
def status_command(
    reporter: Reporter, inventory_path: Path, limit: str | None, exclude: str | None, run: str | None
) -> None:
    """Show nodes, their releases and clocks, and all runs.

    With RUN, a run's id or part of it, shows what each node of that run is doing.
    """
    inventory = load_or_here(inventory_path, reporter)
    nodes = select(inventory, limit=limit, exclude=exclude)
    if run is not None:
        with session_on(reporter, inventory, nodes) as session:
            one = run_status(session, run)
        reporter.result(*run_output(one, time.time()))
        unreachable = one.unreachable
    else:
        with session_on(reporter, inventory, nodes) as session:
            result = status(session)
        reporter.result(*status_output(result, time.time()))
        unreachable = result.unreachable
    if unreachable:
        raise NodesFailedError(
            f"no answer from {len(unreachable)} of {len(nodes)} nodes",
            reasons={},  # the result shows them
            hint=session.without(unreachable, len(nodes)),
        )


COMMANDS = (status_command,)
