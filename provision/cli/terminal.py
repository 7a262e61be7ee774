"""Prompts at the terminal: host keys, passwords, and what Ctrl-C does to a run.

Worker threads ask, while Ctrl-C reaches the main thread. So no read blocks: an interrupt ends the question and restores
the terminal's echo.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from provision.errors import InterruptedByUser
from provision.inventory import fold
from provision.tasks.start import Ask, Choice, HungUp

if TYPE_CHECKING:
    from provision.model import Node
    from provision.output import Reporter
    from provision.run.found import Run


class Terminal:
    """Asks at the terminal, with the progress display paused; implements ``ssh.prompts.Prompts``.

    Create it in the main thread. Without a terminal every answer is no, or None.
    """

    def __init__(self, reporter: Reporter, *, accept_host_keys: bool) -> None:
        self._reporter = reporter
        self._accept = accept_host_keys
        self._woken, self._wake = os.pipe()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._leave_on(number)

    def confirm_host_key(self, node: Node, key_type: str, fingerprint: str) -> bool:
        """Show the fingerprint and ask, unless every new key is accepted."""
        if self._accept:
            self._reporter.warn(f"{node.name} ({node.address}): pinned {key_type} {fingerprint}")
            return True
        if not sys.stdin.isatty():
            return False
        with self._reporter.paused():
            click.echo(f"{node.name} ({node.address}) has the host key {key_type} {fingerprint}", err=True)
            while True:
                answer = self._answer("Trust this key? [y/N]: ")
                word = (answer or "").strip().lower()
                if word in {"y", "yes"}:
                    return True
                if word in {"", "n", "no"}:
                    return False
                click.echo("Please answer yes or no.", err=True)

    def password(self, user: str, where: str) -> str | None:
        """Ask without echo."""
        return self._secret(f"Password of {user} on {where}: ")

    def sudo_password(self, user: str, where: str) -> str | None:
        """Ask without echo, once for all nodes."""
        return self._secret(f"sudo password of {user} (first needed on {where}): ")

    def _secret(self, question: str) -> str | None:
        if not sys.stdin.isatty():
            return None
        with self._reporter.paused(), _unseen(sys.stdin.fileno()):
            answer = self._answer(question)
            click.echo(err=True)  # the user's own newline was not shown
        return answer or None

    def _answer(self, question: str) -> str | None:
        """A line of text; None at the end of the input or after an interrupt."""
        click.echo(question, nl=False, err=True)
        typed = b""
        while not typed.endswith(b"\n"):
            ready, _, _ = select.select([sys.stdin.fileno(), self._woken], [], [])
            if self._woken in ready:
                return None
            part = os.read(sys.stdin.fileno(), 4096)
            if not part:
                return None
            typed += part
        return typed[:-1].decode(sys.stdin.encoding or "utf-8", "surrogateescape")

    def _leave_on(self, number: signal.Signals) -> None:
        """Ends the question when a signal arrives, then calls the previous handler."""
        before: Any = signal.getsignal(number)
        if callable(before):

            def leave(received: int, frame: FrameType | None) -> None:
                os.write(self._wake, b".")
                before(received, frame)

            signal.signal(number, leave)


@contextmanager
def _unseen(terminal: int) -> Iterator[None]:
    """Turns echo off and drops text typed before."""
    before = termios.tcgetattr(terminal)
    hidden = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(terminal, termios.TCSAFLUSH, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


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
                    if not line:  # the terminal was closed
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
                typed = click.prompt(f"Which one to stop? [1-{len(runs)}]", default="", show_default=False, err=True)
                if typed.strip().isascii() and typed.strip().isdigit() and 1 <= int(typed) <= len(runs):
                    return runs[int(typed) - 1]
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
