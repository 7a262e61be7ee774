"""``clusterctl compare``: the records of two runs, from this machine or, for the runs of others, from their nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provision.errors import UsageError
from provision.report.data import described
from provision.run import record as records
from provision.run.difference import Description, describe

if TYPE_CHECKING:
    from provision.session import Session


@dataclass(frozen=True)
class Compared:
    """A run to compare: its id, this machine's record (empty if there is none), and the description made of it."""

    run: str
    record: Mapping[str, Any]
    described: Description


def find_run(inventory: Path, word: str, connect: Callable[[], Session]) -> Compared:
    """A run by a word that the user typed: a folder, or a run's id or a part of it.

    Args:
        inventory: the inventory's path, next to which the records are.
        word: the word.
        connect: connects to the nodes; called if this machine has no record of the run.

    Raises:
        UsageError: no run matches, several do, or the folder has no record.
        NodesFailedError: no node answered.
    """
    if Path(word).is_dir() or "/" in word:
        record = records.read(Path(word))
        if record is None:
            raise UsageError(
                f"{word} has no {records.FILE}",
                hint="name a run, its folder in runs/, or one of clusterctl collect",
            )
        return _of_record({"run": Path(word).resolve().name, **record})
    known = records.kept(inventory)
    if any(word in name for name in known):
        return _of_record({"run": (run := records.choose(word, known)), **known[run]})
    from provision.tasks.report import report_run  # noqa: PLC0415 - only for runs without a record

    data = report_run(connect(), word).run
    return Compared(data.id, data.record, described(data))


def _of_record(record: Mapping[str, Any]) -> Compared:
    run = str(record.get("run") or "")
    return Compared(run, record, describe(run, record))
