"""The entry point. Sets up streams and signals, then imports everything else, which takes a moment.

So Ctrl-C during the imports is a normal interrupt, and a closed stream does not crash. This module imports only what
Python has already loaded.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence
    from typing import Any, NoReturn
else:
    import _signal as signal  # built in; importing the module signal takes time in which Ctrl-C would print a traceback

SEPARATED = "clusterctl.separated"  # in click's meta: the number of words after ``--``
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code: 0 ok, 2 usage, 3 bundle, 4 refused, 5 nodes, 6 run, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    with Leaving(words):
        closed = _open_streams()
        from provision.cli.program import run  # noqa: PLC0415 - this takes a moment
    run(words, closed)


class Leaving:
    """In this block, SIGINT and SIGTERM end the program at once, because there is nothing to clean up yet.

    An exception would not work: a module that is being imported may convert or drop it.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._json = wants_json(words)
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._leave)

    def __exit__(self, *_error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _leave(self, _number: int, _frame: object) -> None:
        try:
            if self._json:
                hint = "run the same command again"
                os.write(1, b'{"error": {"message": "interrupted", "exit_code": 130, "hint": "%s"}}\n' % hint.encode())
            os.write(2, b"interrupted\ntry: run the same command again\n")
        finally:
            os._exit(_INTERRUPTED)


def wants_json(words: Sequence[str]) -> bool:
    """Whether a command line has the option ``--json``."""
    options = words[: words.index("--")] if "--" in words else words
    return "--json" in options


def _open_streams() -> frozenset[str]:
    """Open closed streams on /dev/null. Returns their names.

    A closed stream is None in Python, and the next opened file would get its number and receive the output.
    """
    closed = set()
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            closed.add(name)
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False, encoding="utf-8", errors="backslashreplace"))  # noqa: SIM115
    return frozenset(closed)


def __getattr__(name: str) -> Any:
    """``provision.cli.cli``, the click group, for programs that examine the commands."""
    if name == "cli":
        from provision.cli.program import cli  # noqa: PLC0415 - not needed to start

        return cli
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
