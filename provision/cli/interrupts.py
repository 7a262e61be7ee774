"""Whoever follows a run at a terminal: what Ctrl-C is to do, and what becomes of a run whose terminal goes away."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import click

from provision.tasks.attach import Ask, Choice, HungUp

if TYPE_CHECKING:
    from provision.output import Reporter

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
