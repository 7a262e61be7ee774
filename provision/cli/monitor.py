"""``clusterctl monitor``. Textual is imported only here and in ``monitor_app.py``, when the command runs."""

from __future__ import annotations

import os
import sys

import click

from provision.cli.cluster import Selection, on_nodes
from provision.cli.options import SECONDS, importing, number, reporting
from provision.errors import UsageError
from provision.output import Reporter
from provision.session import Session


@click.command("monitor")
@on_nodes
@number("--every", type=SECONDS, default=2.0, show_default=True, metavar="SECONDS", help="Time between two refreshes.")
@click.argument("run", required=False)
@reporting
def monitor_command(reporter: Reporter, selection: Selection, run: str | None, every: float) -> None:
    """Watch a run on the whole screen: nodes, GPUs, loss, throughput, log and events.

    RUN is a run's id or part of it. The default is the newest run. The key ? shows the keys. Quitting does not stop
    the run.
    """
    refuse_without_screen(run, as_json=bool(click.get_current_context().params.get("as_json")))
    with importing():
        from provision.cli.monitor_app import Monitor  # noqa: PLC0415
        from provision.summaries.diagnosis import diagnosis_output  # noqa: PLC0415
        from provision.summaries.runs import stop_output  # noqa: PLC0415
        from provision.tasks.diagnose import diagnose  # noqa: PLC0415
        from provision.tasks.runs import stop  # noqa: PLC0415
        from provision.tasks.watch import watch  # noqa: PLC0415

    with selection.session_or_here(reporter) as session:
        watched = watch(session, run, every)
        # The screen belongs to the program from here on: nothing prints, and nothing can be asked.
        quiet = Session(session.inventory, session.nodes, typed=session.typed, connections=session.connections)
        watched.session = quiet
        with watched:
            screen = Monitor(
                watched.view,
                lambda save: stop_output(stop(quiet, watched.run.id, save=save))[1],
                lambda: diagnosis_output(diagnose(quiet, watched.run.id))[1],
                every,
            )
            screen.run()
    if screen.return_code:  # an unexpected error: textual has printed it
        click.get_current_context().exit(screen.return_code)


def refuse_without_screen(run: str | None, *, as_json: bool) -> None:
    """Refuse a terminal that cannot be drawn on.

    Raises:
        UsageError: with the command for such a terminal.
    """
    hint = f"clusterctl status {run} --watch" if run else "clusterctl status --watch"
    if as_json:
        raise UsageError("monitor draws on a screen and has no --json", hint=f"{hint} --json".replace(" --watch", ""))
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("monitor needs a terminal", hint=hint)
    if os.environ.get("TERM", "dumb") in {"dumb", ""}:
        raise UsageError("monitor cannot draw on a terminal without cursor movement (TERM=dumb)", hint=hint)
