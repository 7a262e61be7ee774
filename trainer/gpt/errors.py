"""What the trainer refuses, in words for the person who can change it."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Callable

FAILED = 1  # the training went wrong
INTERRUPTED = 130  # by SIGINT, as shells count it
USAGE = 2  # what was asked for cannot be done


class RefusedError(Exception):
    """Something that a person has to change: what and where, and in ``fix`` what to type next."""

    code = USAGE

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.fix = fix


class FailedError(RefusedError):
    """A training that cannot go on."""

    code = FAILED


def exit_with(main: Callable[[], None]) -> None:
    """Run a program to its exit code; what was refused is one line on stderr, of every rank that refuses it."""
    try:
        main()
    except RefusedError as error:
        _end(error)
    except KeyboardInterrupt:
        _leave(INTERRUPTED)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's; not every program here needs torch
            raise
        fix = "a smaller --batch-size with more --accumulation, --checkpointing, or --engine zero3"
        _end(FailedError(". ".join(str(error).split(". ")[:2]), fix))
    else:
        # A thread of gloo's that lets go of a tensor while the interpreter ends aborts the process (torch 2.13:
        # "terminate called without an active exception"). So who has registered is told, and it ends at once.
        atexit._run_exitfuncs()  # noqa: SLF001 - there is no other way to have them called before that
        _leave(0)


def _end(error: RefusedError) -> None:
    rank = os.environ.get("RANK", "0")
    who = "" if rank == "0" else "rank %s: " % rank  # only one of them may have seen it
    sys.stderr.write("error: %s%s%s\n" % (who, error, "; %s" % error.fix if error.fix else ""))
    # Not sys.exit: other ranks may be held in a collective, and the interpreter would wait for their threads.
    _leave(error.code)


def _leave(code: int) -> None:
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)
