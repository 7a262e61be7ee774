"""``clusterctl run``."""

from __future__ import annotations

from pathlib import Path

import click

from provision.cli.cluster import load_or_here, on_nodes, retrying, session_on, to_work_on
from provision.cli.options import SECONDS, number, reporting
from provision.output import Reporter
from provision.summaries.nodes import command_output, command_rows
from provision.tasks.command import run_command
from provision.tasks.failed import remember_failed


# Everything after the first word of CMD belongs to it, options too, so the `--` is optional.
@click.command("run", context_settings={"allow_interspersed_args": False})
@on_nodes
@retrying
@click.option("--root", is_flag=True, help="Run it as root, with sudo if the ssh user is not root.")
@number("--deadline", metavar="SECONDS", type=SECONDS, help="Time limit of each node.")
@click.argument("words", nargs=-1, required=True, metavar="CMD...", type=click.UNPROCESSED)
@reporting
def run_on_nodes(
    reporter: Reporter,
    inventory_path: Path,
    limit: str | None,
    exclude: str | None,
    words: tuple[str, ...],
    deadline: float | None,
    *,
    root: bool,
    retry_failed: bool,
) -> None:
    """Run a command on every node.

    Nodes with the same output are shown together. CMD is a program with its arguments, or one quoted sh command line.
    """
    inventory = load_or_here(inventory_path, reporter)
    nodes = to_work_on(reporter, inventory, "run", limit=limit, exclude=exclude, retry_failed=retry_failed)
    if not nodes:
        return
    with remember_failed(inventory, "run", nodes):
        with session_on(reporter, inventory, nodes) as session:
            result = run_command(session, words, root=root, deadline=deadline)
        reporter.show(command_rows(result))
        reporter.result(*command_output(result))
        result.raise_failed()


COMMANDS = (run_on_nodes,)
