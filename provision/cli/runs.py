"""``clusterctl status``, ``save`` and ``stop``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from provision.cli.cluster import Selection, no_answer, on_nodes
from provision.cli.options import SECONDS, number, reporting
from provision.errors import InterruptedByUser, NodesFailedError, UsageError
from provision.inventory import fold
from provision.output import Reporter
from provision.output_text import Line
from provision.summaries.runs import run_output, save_output, stop_output
from provision.summaries.status import status_output
from provision.tasks.runs import RunStatus, run_status, stop
from provision.tasks.save import save_run
from provision.tasks.status import Status, status

if TYPE_CHECKING:
    from provision.run.found import Run
    from provision.session import Session

_QUESTIONS = {"stop": "Stop it on every node?", "save": "Save a checkpoint and continue?"}
WATCH = 2.0  # seconds between two refreshes of status --watch


@click.command("status")
@on_nodes
@number(
    "--watch",
    type=SECONDS,
    is_flag=False,
    flag_value=WATCH,
    metavar="[SECONDS]",
    help=f"Show it again after these seconds, {WATCH:g} without a number, until the run ends or Ctrl-C.",
)
@click.argument("run", required=False)
@reporting
def status_command(reporter: Reporter, selection: Selection, run: str | None, watch: float | None) -> None:
    """Show nodes, their releases and clocks, and all runs.

    With RUN, a run's id or part of it, shows what each node of that run is doing.
    """
    if watch is not None and click.get_current_context().params.get("as_json"):
        raise UsageError("--watch and --json cannot be used together", hint="run status --json again and again")
    with selection.session_or_here(reporter) as session:
        found = _show_status(reporter, session, run)
        try:
            while watch is not None and not (isinstance(found, RunStatus) and found.run.ended):
                time.sleep(watch)
                try:
                    found = _show_status(reporter, session, run, again=True)
                except NodesFailedError as error:  # the network may come back
                    reporter.warn(str(error))
        except KeyboardInterrupt:
            return
    if found.unreachable:
        raise no_answer(session, found.unreachable, shown=True)


def _show_status(reporter: Reporter, session: Session, run: str | None, *, again: bool = False) -> Status | RunStatus:
    """Ask and show; ``again``: in place of the last one on a terminal, below it elsewhere."""
    found = status(session) if run is None else run_status(session, run)
    now = time.time()
    if again:
        click.clear()  # does nothing where stdout is no terminal
        reporter.show([Line(time.strftime("%H:%M:%S", time.localtime(now)), "dim")])
    reporter.result(*(run_output(found, now) if isinstance(found, RunStatus) else status_output(found, now)))
    return found


@click.command("save")
@on_nodes
@click.option("--yes", is_flag=True, help="Do not ask. As root, also for runs of other users.")
@click.argument("run", required=False)
@reporting
def save_command(reporter: Reporter, selection: Selection, run: str | None, *, yes: bool) -> None:
    """Let a running trainer save a checkpoint and continue.

    Only trainer.lm and trainer.vlm can; others only save while they stop (stop --save). RUN is a run's id or part of
    it. The default is the only running run, after a confirmation.
    """
    with selection.session_or_here(reporter) as session:
        result = save_run(session, run, others_too=yes, ask=None if yes else ask_which_run(reporter, "save"))
    reporter.result(*save_output(result))


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


def ask_which_run(reporter: Reporter, what: str = "stop") -> Callable[[Sequence[Run]], Run] | None:
    """A prompt for the run to stop or save, with a confirmation; None without a terminal."""
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
                if click.confirm(_QUESTIONS[what], default=False, err=True):
                    return runs[0]
            else:
                typed = click.prompt(f"Which one to {what}? [1-{len(runs)}]", default="", show_default=False, err=True)
                if typed.strip().isascii() and typed.strip().isdigit() and 1 <= int(typed) <= len(runs):
                    return runs[int(typed) - 1]
        raise InterruptedByUser("nothing was stopped" if what == "stop" else "nothing was done")

    return ask
