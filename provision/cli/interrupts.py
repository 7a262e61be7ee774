"""Whoever follows a run at a terminal: what Ctrl-C is to do, and what becomes of a run whose terminal goes away."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import click

from provision.errors import InterruptedByUser
from provision.inventory import fold
from provision.tasks.attach import Ask, Choice, HungUp

if TYPE_CHECKING:
    from provision.output import Reporter
    from provision.run.found import Run

_QUESTION = "[d]etach and let it run, [s]top it on every node, or [c]ontinue? "
_CHOICES: dict[str, Choice] = {"d": "detach", "s": "stop", "c": "continue"}


def asking(reporter: Reporter) -> Ask | None:
    """Asks the person at the terminal what Ctrl-C is to do; None where nobody can answer. Another Ctrl-C is: stop."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None

    def ask() -> Choice:
        with reporter.paused():
            try:
                while True:
                    click.echo(f"\n{_QUESTION}", nl=False, err=True)
                    line = sys.stdin.readline()
                    if not line:  # the terminal is gone
                        return "detach"
                    if choice := _CHOICES.get(line.strip().lower()[:1]):
                        return choice
            except HungUp:
                raise
            except KeyboardInterrupt:
                click.echo("\nstopping the run; once more leaves it as it is", err=True)
                return "stop"

    return ask


def asking_which(reporter: Reporter) -> Callable[[Sequence[Run]], Run] | None:
    """Asks the person at the terminal which run to stop, and whether to; None without a terminal."""
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
                said = click.prompt(f"Which one to stop? [1-{len(runs)}]", default="", show_default=False, err=True)
                if said.strip().isascii() and said.strip().isdigit() and 1 <= int(said) <= len(runs):
                    return runs[int(said) - 1]
        raise InterruptedByUser("nothing was stopped")

    return ask


@contextmanager
def letting_go() -> Iterator[None]:
    """Within this, SIGTERM and SIGHUP let go of the run that is followed instead of stopping it."""

    def hang_up(_number: int, _frame: FrameType | None) -> None:
        raise HungUp

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # nohup
                signal.signal(number, hang_up)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
