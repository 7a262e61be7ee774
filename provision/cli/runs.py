"""``clusterctl status`` and ``stop``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from provision.cli.cluster import Selection, no_answer, on_nodes
from provision.cli.options import reporting
from provision.errors import InterruptedByUser
from provision.inventory import fold
from provision.output import Reporter
from provision.summaries.runs import run_output, stop_output
from provision.summaries.status import status_output
from provision.tasks.runs import RunStatus, run_status, status, stop

if TYPE_CHECKING:
    from provision.run.found import Run


@click.command("status")
@on_nodes
@click.argument("run", required=False)
@reporting
def status_command(reporter: Reporter, selection: Selection, run: str | None) -> None:
    """Show nodes, their releases and clocks, and all runs.

    With RUN, a run's id or part of it, shows what each node of that run is doing.
    """
    with selection.session_or_here(reporter) as session:
        found = status(session) if run is None else run_status(session, run)
    now = time.time()
    reporter.result(*(run_output(found, now) if isinstance(found, RunStatus) else status_output(found, now)))
    if found.unreachable:
        raise no_answer(session, found.unreachable, shown=True)


@click.command("stop")
@on_nodes
@click.option("--save", is_flag=True, help="Save a checkpoint first.")
@click.option("--yes", is_flag=True, help="Do not ask. As root, also stop runs of other users.")
@click.argument("run", required=False)
@reporting
def stop_command(
    reporter: Reporter,
    selection: Selection,
    run: str | None,
    *,
    save: bool,
    yes: bool,
) -> None:
    """Stop a run on all its nodes.

    Verifies that no process, port or GPU memory of the run is left. RUN is a run's id or part of it. The default is
    the only running run, after a confirmation.
    """
    with selection.session_or_here(reporter) as session:
        result = stop(session, run, save=save, others_too=yes, ask=None if yes else ask_which_run(reporter))
    reporter.result(*stop_output(result))
    result.raise_failed()


def ask_which_run(reporter: Reporter) -> Callable[[Sequence[Run]], Run] | None:
    """A prompt for the run to stop, with a confirmation; None without a terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None

    def ask(runs: Sequence[Run]) -> Run:
        with reporter.paused():
            for number, run in enumerate(runs, 1):
                step = run.head.number("step")
                at = "" if step is None else f", step {step:.0f}"
                head = f"{number}  " if len(runs) > 1 else ""
                click.echo(f"{head}{run.id}  on {fold(run.nodes)}, of {run.owner}{at}", err=True)
            if len(runs) == 1:
                if click.confirm("Stop it on every node?", default=False, err=True):
                    return runs[0]
            else:
                typed = click.prompt(f"Which one to stop? [1-{len(runs)}]", default="", show_default=False, err=True)
                if typed.strip().isascii() and typed.strip().isdigit() and 1 <= int(typed) <= len(runs):
                    return runs[int(typed) - 1]
        raise InterruptedByUser("nothing was stopped")

    return ask
