"""``clusterctl report``: one HTML file about runs."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from provision.cli.cluster import Selection, on_nodes
from provision.cli.options import importing, reporting
from provision.errors import NodesFailedError, UsageError
from provision.inventory import fold
from provision.output import Reporter

if TYPE_CHECKING:
    from provision.report import RunData
    from provision.tasks.report import Reported

_MOST = 20  # runs in a report


@click.command("report")
@on_nodes
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write to FILE.  [default: report-RUN.html]")  # fmt: skip
@click.option("--redact", is_flag=True, help="Remove names, addresses and secrets, for a file that leaves the room.")
@click.argument("runs", nargs=-1, metavar="[RUN|DIR...]")
@reporting
def report_command(
    reporter: Reporter, selection: Selection, output: Path | None, redact: bool, runs: tuple[str, ...]
) -> None:
    """Write one HTML file about a run, or several to compare.

    The file opens without a network: curves, nodes, configuration, events, restarts and the diagnosis. RUN is a run's
    id or part of it. The default is the newest run. DIR is a run's folder from clusterctl collect; it needs no nodes.
    """
    with importing():
        from provision.report import report_page  # noqa: PLC0415
        from provision.summaries.report import described, redacted_report, report_output  # noqa: PLC0415
        from provision.tasks.report import report_folder, report_run  # noqa: PLC0415

    gc.disable()  # the data only grows until the command ends, so looking for garbage in it is a tenth of the time
    click.get_current_context().call_on_close(gc.enable)
    if len(runs) > _MOST:
        raise UsageError(f"{len(runs)} runs; a report compares at most {_MOST}")
    folders = {word: report_folder(Path(word)) for word in runs if _is_folder(word)}
    reported: list[Reported] = []
    retry, known = "", None
    if len(folders) < len(set(runs)) or not runs:
        with selection.session_or_here(reporter) as session:
            for word in runs or (None,):
                found = folders.get(word) if word is not None else None
                reported.append(found or report_run(session, word))
            retry, known = session.again(), session.inventory
    else:
        reported = [folders[word] for word in runs]
    found_runs: list[RunData] = [replace(each.run, **described(each.diagnosis)) for each in reported]
    redaction = redacted_report(found_runs, known) if redact else None
    shown = redaction.runs if redaction else found_runs
    path = output or Path(f"report-{shown[0].id}.html" if len(shown) == 1 else "report.html")
    size = _write(path, report_page(shown, time.time(), redaction.removed if redaction else None))
    reporter.result(*report_output(path, size, found_runs, redaction))
    missing = {name: why for run in found_runs for name, why in run.missing.items()}
    if missing:
        raise NodesFailedError(
            f"the report lacks {fold(missing)}", reasons=missing, hint=f"to write it again: {retry}"
        )  # fmt: skip


def _is_folder(word: str) -> bool:
    """Whether an argument is a folder: it exists, or cannot be a run's id."""
    return Path(word).is_dir() or "/" in word


def _write(path: Path, page: str) -> int:
    """Write the file with one rename; it may have values that only its user should read."""
    data = page.encode("utf-8", "replace")
    try:
        number, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(data)
            Path(temporary).replace(path)
        except BaseException:
            with suppress(FileNotFoundError):
                Path(temporary).unlink()
            raise
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}", hint="--output FILE") from error
    return len(data)
