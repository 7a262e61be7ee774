"""``clusterctl monitor``. Textual is imported only here and in ``monitor_app.py``, when the command runs."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from provision.cli.cluster import Selection, on_nodes
from provision.cli.language import speaking
from provision.cli.options import SECONDS, importing, number, reporting
from provision.errors import UsageError
from provision.output import Reporter
from provision.session import Session
from provision.summaries.words import Say

if TYPE_CHECKING:
    from provision.cli.monitor_app import Monitor
    from provision.output_text import Line
    from provision.tasks.watch import Watch

RUNS = 200  # in the list of runs


@click.command("monitor")
@on_nodes
@number("--every", type=SECONDS, default=2.0, show_default=True, metavar="SECONDS", help="Time between two refreshes.")
@speaking
@click.option(
    "--picture",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the screen into an SVG file, and exit. Needs no terminal.",
)
@click.option("--size", default="120x40", show_default=True, metavar="SIZE", help="Columns and rows of the picture.")
@click.option("--press", default="", metavar="KEYS", help="Keys to press before the picture, such as 'g e'.")
@click.argument("run", required=False)
@reporting
def monitor_command(
    reporter: Reporter,
    selection: Selection,
    run: str | None,
    every: float,
    picture: Path | None,
    size: str,
    press: str,
    say: Say,
) -> None:
    """Watch a run on the whole screen: nodes, GPUs, loss, throughput, log and events.

    RUN is a run's id or part of it. The default is the newest run. The key ? shows the keys. Quitting does not stop
    the run.
    """
    columns_rows = _size(size)
    if picture is None:
        refuse_without_screen(run, as_json=bool(click.get_current_context().params.get("as_json")))
    with importing():
        import provision.cli.monitor_app  # noqa: PLC0415 - it takes a moment, in which Ctrl-C works
        import provision.tasks.diagnose  # noqa: F401, PLC0415
        from provision.cli.monitor_picture import draw  # noqa: PLC0415
        from provision.tasks.watch import watch  # noqa: PLC0415

    with selection.session_or_here(reporter) as session:
        watched = watch(session, run, every)
        # The screen belongs to the program from here on: nothing prints, and nothing can be asked.
        quiet = Session(session.inventory, session.nodes, typed=session.typed, connections=session.connections)
        another: str | None = watched.run.id
        if picture is not None:
            screen, another = _screen(watched, quiet, every, say), None
            with watched:
                draw(screen, watched, picture, columns_rows, press)
        while another:
            screen = _screen(watched, quiet, every, say)
            with watched:
                another = screen.run()
            if another:
                watched = watch(quiet, another, every)
    if screen.return_code:  # an unexpected error: textual has printed it
        click.get_current_context().exit(screen.return_code)


def _size(text: str) -> tuple[int, int]:
    """``120x40``: columns and rows of a picture."""
    if not re.fullmatch(r"[1-9][0-9]{0,2}x[1-9][0-9]{0,2}", text):
        raise UsageError(f"--size is COLUMNSxROWS, such as 120x40, not {text[:40]}")
    columns, _, rows = text.partition("x")
    return int(columns), int(rows)


def _screen(watched: Watch, quiet: Session, every: float, say: Say) -> Monitor:
    """The screen of one run."""
    from provision.cli.monitor_app import Actions, Monitor  # noqa: PLC0415 - only this command needs them
    from provision.summaries.diagnosis import diagnosis_output  # noqa: PLC0415
    from provision.summaries.monitor import run_line  # noqa: PLC0415
    from provision.summaries.runs import save_output, stop_output  # noqa: PLC0415
    from provision.tasks.diagnose import diagnose  # noqa: PLC0415
    from provision.tasks.runs import find_all, stop  # noqa: PLC0415
    from provision.tasks.save import save_run  # noqa: PLC0415

    watched.session = quiet
    run = watched.run.id

    def runs() -> list[tuple[str, Line]]:
        newest = sorted(find_all(quiet).runs.values(), key=lambda each: (each.live, each.id), reverse=True)
        return [(each.id, run_line(each, run, say)) for each in newest[:RUNS]]

    actions = Actions(
        stop=lambda saves: stop_output(stop(quiet, run, save=saves))[1],
        save=lambda: save_output(save_run(quiet, run))[1],
        diagnose=lambda: diagnosis_output(diagnose(quiet, run))[1],
        runs=runs,
    )
    return Monitor(watched.view, actions, every, say)


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
