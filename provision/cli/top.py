"""``clusterctl top``. Textual is imported only here and in ``top_app.py``, when the command runs."""

from __future__ import annotations

import os
import shutil
import sys

import click

from provision.cli.cluster import Selection, no_answer, on_nodes
from provision.cli.language import speaking
from provision.cli.options import SECONDS, importing, number, reporting
from provision.output import Reporter
from provision.session import Session
from provision.summaries.words import Say


@click.command("top")
@on_nodes
@number("--every", type=SECONDS, default=2.0, show_default=True, metavar="SECONDS", help="Time between two samples.")
@click.option("--once", is_flag=True, help="Print one snapshot. The default without a terminal, and with --json.")
@speaking
@reporting
def top_command(reporter: Reporter, selection: Selection, every: float, *, once: bool, say: Say) -> None:
    """Watch nodes, with or without a run: GPUs, load, memory, network, and who uses the GPUs.

    The key g shows single GPUs, processes and the network. Nodes need no release, only Python 3.8 or newer.
    """
    once = once or bool(click.get_current_context().params.get("as_json")) or not has_screen()
    with importing():
        from provision.summaries.top import UNLIMITED, top_output  # noqa: PLC0415 - only this command needs them
        from provision.tasks.top import Top, connect, snapshot  # noqa: PLC0415

        if not once:
            from provision.cli.top_app import TopScreen  # noqa: PLC0415 - it takes a moment

    with selection.session_or_here(reporter) as session:
        if once:
            view, unreachable = snapshot(session)
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else UNLIMITED
            reporter.result(*top_output(view, unreachable, width, say))
            if unreachable:
                raise no_answer(session, unreachable, shown=True)
            return
        connect(session)
        quiet = Session(session.inventory, session.nodes, typed=session.typed, connections=session.connections)
        with Top(quiet, every) as top:
            screen = TopScreen(top.view, every, say)
            screen.run()
    if screen.return_code:  # an unexpected error: textual has printed it
        click.get_current_context().exit(screen.return_code)


def has_screen() -> bool:
    """Whether there is a terminal that can be drawn on."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in {"dumb", ""}
