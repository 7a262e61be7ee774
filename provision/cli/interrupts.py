"""Ctrl-C, SIGTERM and SIGHUP while a run is followed."""

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
    """A prompt for what Ctrl-C does; None without a terminal. Another Ctrl-C stops the run."""
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
                click.echo("\nstopping the run; press Ctrl-C again to leave it as it is", err=True)
                return "stop"

    return ask


def asking_which(reporter: Reporter) -> Callable[[Sequence[Run]], Run] | None:
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
                said = click.prompt(f"Which one to stop? [1-{len(runs)}]", default="", show_default=False, err=True)
                if said.strip().isascii() and said.strip().isdigit() and 1 <= int(said) <= len(runs):
                    return runs[int(said) - 1]
        raise InterruptedByUser("nothing was stopped")

    return ask


@contextmanager
def letting_go() -> Iterator[None]:
    """Within this, SIGTERM and SIGHUP detach from the followed run instead of stopping it."""

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
