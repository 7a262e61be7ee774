"""The trainer's errors, and its exit codes."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Callable

FAILED = 1  # the training failed
INTERRUPTED = 130  # by SIGINT, the value that shells use
USAGE = 2  # invalid options or data


class RefusedError(Exception):
    """An error that the user can fix: what failed and where, and in ``fix`` what to type next."""

    code = USAGE

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.fix = fix


class FailedError(RefusedError):
    """A training that cannot continue."""

    code = FAILED


def exit_with(main: Callable[[], None]) -> None:
    """Run a program and exit with its code. A refusal is one line on stderr, from each rank that refuses."""
    try:
        main()
    except RefusedError as error:
        _end(error)
    except KeyboardInterrupt:
        _leave(INTERRUPTED)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's; not every program here needs torch
            raise
        fix = "use a smaller --batch-size with more --accumulation, --checkpointing, or --engine fsdp"
        _end(FailedError(". ".join(str(error).split(". ")[:2]), fix))
    else:
        # A gloo thread that releases a tensor during interpreter shutdown aborts the process (torch 2.13: "terminate
        # called without an active exception"). So run the exit functions, then exit at once.
        atexit._run_exitfuncs()  # noqa: SLF001 - Python has no public function for it
        _leave(0)


def _end(error: RefusedError) -> None:
    rank = os.environ.get("RANK", "0")
    who = "" if rank == "0" else "rank %s: " % rank  # perhaps only this rank saw the error
    sys.stderr.write("error: %s%s%s\n" % (who, error, "; %s" % error.fix if error.fix else ""))
    # Not sys.exit: other ranks may be waiting in a collective, and the interpreter would wait for their threads.
    _leave(error.code)


def _leave(code: int) -> None:
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)
