"""Gives a rehearsal an output folder of its own, so that it never writes to the folder of the real training. Pure."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, replace

from provision.errors import UsageError
from provision.run.files import WORK
from provision.run.job import Job
from provision.run.outputs import output_of
from provision.run.script_source import Source


@dataclass(frozen=True)
class Own:
    """The job of a rehearsal.

    Attributes:
        job: the job, with an output folder of its own.
        output: the folder as the program names it; None if it is in the run's folder, which the rehearsal removes.
    """

    job: Job
    output: str | None = None


def own_output(job: Job, output: str | None, token: str) -> Own:
    """The job with another output folder, beside the real one and so on the same disk.

    A relative folder is in the run's own folder already, and stays.

    Args:
        job: the job.
        output: the folder of its checkpoints, relative to the run's folder unless absolute; None: unknown.
        token: makes the new name unique.

    Raises:
        UsageError: the folder is not known, or it cannot be replaced.
    """
    if output is None:
        raise UsageError(
            "where this program saves its checkpoints is not known, so a rehearsal might write over a real output",
            hint="name its folder as the program receives it, relative to its code: --output DIR",
        )
    typed = output_of(replace(job, output=None), None, Source.read([])) if job.output is not None else None
    if typed is not None and typed.startswith("/") and typed != posixpath.normpath(output):
        raise UsageError(
            f"--output is {job.output}, but the program's arguments name {typed}, which a rehearsal would write over",
            hint=f"--output {typed}",
        )
    if not output.startswith("/"):
        if any(part.startswith("~") for part in output.split("/")):
            raise UsageError(
                f"the output folder {job.output or output.removeprefix(f'{WORK}/')} starts with ~, which only the "
                "program expands, so a rehearsal might write over it",
                hint="write it as an absolute path",
            )
        inside = posixpath.normpath(output)
        if inside.startswith("../") or inside in ("..", "."):
            raise UsageError(
                f"the output folder {output} is outside of the run's folder, so a rehearsal might write over it",
                hint=f"choose a folder below the program's code ({WORK}/), or an absolute path",
            )
        return Own(job)
    fresh = f"{posixpath.normpath(output)}-rehearsal-{token}"
    if job.kind == "config":
        args = [word for word in job.args if not word.startswith("output_dir=")]
        return Own(replace(job, args=(*args, f"output_dir={fresh}")), fresh)
    args = [_replaced(word, output, fresh) for word in job.args]
    if args == list(job.args):
        raise UsageError(
            f"the program saves to {output}, which its arguments do not name, so a rehearsal cannot choose another "
            "folder and would write over it",
            hint=f"add the program's option for it, for example: --output {output} SCRIPT.py -- --output_dir {output}",
        )
    given = None if job.output is None else fresh
    return Own(replace(job, args=tuple(args), output=given), fresh)


def _replaced(word: str, output: str, fresh: str) -> str:
    """An argument with the new folder: the folder itself, or ``--option=FOLDER``."""
    head, equals, value = word.rpartition("=")
    whole = posixpath.normpath(value) if value else ""
    if whole == posixpath.normpath(output) and (not equals or head.strip()):
        return f"{head}{equals}{fresh}"
    return word
