"""The command that runs any other."""

from __future__ import annotations

from pathlib import Path

import click

from provision import summaries
from provision.cli.cluster import load_or_here, on_nodes, retrying, session_on, to_work_on
from provision.cli.numbers import SECONDS, number
from provision.cli.options import reporting
from provision.output import Reporter
from provision.tasks.command import run_command
from provision.tasks.failed import remember_failed


# What stands behind the first word of CMD belongs to it, options too: the `--` may be left out.
@click.command("run", context_settings={"allow_interspersed_args": False})
@on_nodes
@retrying
@click.option("--root", is_flag=True, help="Run it as root, through sudo where the ssh user is another one.")
@number("--deadline", metavar="SECONDS", type=SECONDS, help="For each node.")
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
    """Run a command on every node; equal answers are shown once.

    CMD is a program and its arguments, which reach it as they are. A CMD of one word is a line of sh:
    clusterctl run 'cat /proc/loadavg | cut -c1-4'
    """
    inventory = load_or_here(inventory_path, reporter)
    nodes = to_work_on(reporter, inventory, "run", limit=limit, exclude=exclude, retry_failed=retry_failed)
    if not nodes:
        return
    with remember_failed(inventory, "run", nodes):
        with session_on(reporter, inventory, nodes) as session:
            result = run_command(session, words, root=root, deadline=deadline)
        reporter.show(summaries.ran_rows(result))
        reporter.result(*summaries.ran(result))
        result.raise_failed()


COMMANDS = (run_on_nodes,)
