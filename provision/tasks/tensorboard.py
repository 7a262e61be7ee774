"""``clusterctl metrics --tensorboard``: writes a run's numbers and samples as a TensorBoard event file."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from provision.errors import UsageError
from provision.report.tensorboard import event_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from provision.report import RunData

NAME = "events.out.tfevents.%d.clusterctl"  # TensorBoard reads files with ``tfevents`` in their names


@dataclass(frozen=True)
class EventFile:
    """The written file.

    Attributes:
        run: the run's id.
        path: the file, in a folder with the run's id: TensorBoard's name for the run.
        bytes: its size.
        steps: the number of steps in it.
        samples: the number of samples of nodes.
        missing: nodes without files, each with the reason.
    """

    run: str
    path: Path
    bytes: int
    steps: int
    samples: int
    missing: Mapping[str, str]


def write_events(run: RunData, folder: Path) -> EventFile:
    """Write the event file of a run below ``folder``, or replace it, in one rename.

    Raises:
        UsageError: the run has no numbers and no samples, or the file cannot be written.
    """
    samples = sum(len(node.samples) for node in run.nodes)
    if not run.rows and not samples:
        raise UsageError(f"run {run.id} has no numbers yet", hint=f"clusterctl status {run.id}")
    place = folder / re.sub(r"[^A-Za-z0-9._-]|^\.+", "-", run.id)[:200]
    path = place / (NAME % (run.began or 0))
    try:
        place.mkdir(parents=True, exist_ok=True)
        number, temporary = tempfile.mkstemp(prefix=".new.", dir=place)
        try:
            with os.fdopen(number, "wb") as file:
                file.writelines(event_file(run))
                os.fchmod(number, 0o644)  # another user may run TensorBoard
            Path(temporary).replace(path)
        except BaseException:
            with suppress(FileNotFoundError):
                Path(temporary).unlink()
            raise
        size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}", hint="--tensorboard DIR") from error
    return EventFile(run.id, path, size, len(run.rows), samples, run.missing)
