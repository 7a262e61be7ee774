"""``clusterctl report``: gathers what the report shows of a run, from its nodes or from a folder on this machine."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from provision.diagnosis import Diagnosis
from provision.diagnosis import diagnose as judged
from provision.errors import NodesFailedError, UsageError
from provision.model import Node
from provision.render import render
from provision.report import NodeData, RunData, read_node, samples_of
from provision.run import record as records
from provision.run.found import LOST
from provision.tasks.diagnose import diagnose, evidence_of, local_files, split
from provision.tasks.logs import KEPT, read_run
from provision.tasks.pattern import read_pattern
from provision.tasks.runs import Runs, by_name, find, logs_folder, reader_of, run_folder
from trainer.reader import Pattern, Reader, Reading, Series

if TYPE_CHECKING:
    from provision.run.found import Run
    from provision.session import Session
    from provision.tasks.runs import Runs

_DEADLINE = 120.0
_MOST = 64 << 20  # bytes of each file of a node
_LINE = 1 << 20  # bytes of a line
_STATE = 1 << 18  # bytes of a state
_BLOCK = 256 << 10
_TOGETHER = 1000  # lines of events that are read together
_FILES = 20  # configuration files
_NODES = ("state.json", "events.jsonl", "metrics.jsonl", *KEPT)  # a folder with one of these is a node's


@dataclass(frozen=True)
class Reported:
    """A run's data, and its diagnosis."""

    run: RunData
    diagnosis: Diagnosis


def report_run(session: Session, word: str | None) -> Reported:
    """Gather a run from its nodes. Changes nothing.

    Args:
        session: the command's session.
        word: the run's id or a part of it; None: the newest.

    Raises:
        UsageError: no run matches, or several do.
        NodesFailedError: no node answered.
    """
    found = find(session, word)
    return Reported(gather(session, found), diagnose(session, found[0].id, found=found))


def gather(session: Session, found: tuple[Run, Runs]) -> RunData:
    """What the nodes of a run know of it. Changes nothing."""
    run, known = found
    parts, missing = _gathered(session, run)
    try:
        series = read_run(session, run.id, found=found).series
    except (UsageError, NodesFailedError):  # it has printed no number yet, or its first node did not answer
        series = Series()
    record = records.read(records.folder_of(session.inventory.path, run.id)) or {}
    return RunData(
        run.id,
        run.state,
        tuple(parts[name].node for name in run.nodes if name in parts and parts[name].has_files),
        tuple(series),
        counted=series.counted,
        record=record,
        missing={**known.silent(run), **missing},
        files={name: text for part in parts.values() for name, text in part.configurations.items()},
    )


@dataclass(frozen=True)
class _Part:
    """A node's answer: its part of the run, and the configuration files next to the run's code."""

    node: NodeData
    has_files: bool
    configurations: Mapping[str, str]


def _gathered(session: Session, run: Run) -> tuple[dict[str, _Part], dict[str, str]]:
    """Every part of a run, by node, and why nodes gave none."""
    nodes = by_name(session.inventory)
    mark = f"@clusterctl:{secrets.token_hex(8)}"
    scripts = {
        part.node: render(
            "run/report.sh.j2",
            mark=mark,
            logs=logs_folder(session.inventory, part),
            job=str(run_folder(session.inventory, run.id) / "job"),
            limit=_MOST,
            samples=samples_of(len(run.parts)),
            files=_FILES if part is run.head else 0,
        )
        for part in run.parts
    }
    readers = {part.node: nodes[reader_of(part)] for part in run.parts}

    ranks = {part.node: part.rank for part in run.parts}

    def ask(node: Node) -> _Part:
        texts = split(session.run(readers[node.name], scripts[node.name], deadline=_DEADLINE).out, mark)
        events, samples = (texts.get(file, "").splitlines() for file in ("events.jsonl", "metrics.jsonl"))
        state, rank = texts.get("state.json", ""), ranks[node.name]
        return _Part(
            read_node(node.name, events, samples, state, rank=rank, nodes=len(run.parts)),
            bool(texts),
            {name.removeprefix("job/"): text for name, text in texts.items() if name.startswith("job/")},
        )

    with session.stage("report", f"Reading {run.id}") as shown:
        outcome = session.each(ask, on=[nodes[name] for name in scripts if name in nodes])
        shown.states = outcome.reasons
    return dict(outcome.ok), dict(outcome.reasons)


def report_folder(folder: Path) -> Reported:
    """Gather a run from a folder of ``collect``, or from this machine's record of a run. Needs no nodes.

    Raises:
        UsageError: it is no such folder, or cannot be read.
    """
    try:
        places = [path for path in sorted(folder.iterdir()) if any((path / name).is_file() for name in _NODES)]
        if not places:
            raise UsageError(
                f"no run in {folder}: none of its folders has {', '.join(_NODES[:3])}",
                hint="name the folder of the run: clusterctl collect --to DIR; clusterctl report DIR/RUN",
            )
        return _local(folder, places)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename or folder}: {error.strerror or error}") from error


def _local(folder: Path, places: list[Path]) -> Reported:
    record = records.read(folder) or {}
    named = record.get("nodes")
    ranks = {str(name): rank for rank, name in enumerate(named)} if isinstance(named, list) else {}
    read = [
        read_node(
            place.name,
            _lines(place / "events.jsonl"),
            _spaced((place / "metrics.jsonl.1", place / "metrics.jsonl"), samples_of(len(places))),
            _start(place / "state.json"),
            rank=ranks.get(place.name, number),
            nodes=len(places),
        )
        for number, place in enumerate(places)
    ]
    nodes = tuple(sorted(read, key=lambda node: (node.rank, node.name)))
    series = next((found for node in nodes if len(found := _series(folder / node.name, node))), Series())
    state = str(nodes[0].state.get("state") or record.get("state") or "")
    run = str(nodes[0].state.get("run") or record.get("run") or folder.resolve().name)
    texts = {node.name: local_files(folder / node.name) for node in nodes}
    order = {node.name: rank for rank, node in enumerate(nodes)}
    data = RunData(run, state, nodes, tuple(series), counted=series.counted, record=record)
    known = "failed" if state == LOST else state if state in {"finished", "failed", "stopped"} else "running"
    return Reported(data, judged(evidence_of(run, known, texts, order, record, {})))


def _series(folder: Path, node: NodeData) -> Series:
    """The numbers in a node's events and log."""
    series, own = Series(), node.state.get("pattern")
    pattern: Pattern | None = read_pattern(own, "the run's pattern") if isinstance(own, str) else None
    events = Reader()
    printed = Reader(pattern=pattern) if pattern else events
    progress = (f"{line}\n" for line in _lines(folder / "events.jsonl") if '"event": "progress"' in line)
    while block := "".join(islice(progress, _TOGETHER)):
        _add(series, events.feed(block))
    path = next((folder / name for name in KEPT if (folder / name).is_file()), None)
    if path is not None:
        with path.open("rb") as file:
            while part := file.read(_BLOCK):
                _add(series, printed.feed(part))
    for reader in {events, printed}:
        _add(series, reader.close())
    return series


def _add(series: Series, readings: Iterable[Reading]) -> None:
    for reading in readings:
        series.add(reading)


def _lines(path: Path) -> Iterator[str]:
    """The lines of a file of the agent, without log lines; none if it does not exist. A long line has several parts."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        while line := file.readline(_LINE):
            if b'"event": "log"' not in line:
                yield line.decode("utf-8", "replace").rstrip("\n")


def _spaced(paths: Sequence[Path], most: int) -> list[str]:
    """Evenly spaced lines of files of the agent, at most ``most``: the others are not even decoded."""
    there = [path for path in paths if path.is_file()]
    by = max(1, math.ceil(sum(map(_count, there)) / most))
    found: list[str] = []
    before = 0
    for path in there:
        with path.open("rb") as file:
            while line := file.readline(_LINE):
                if before % by == 0:
                    found.append(line.decode("utf-8", "replace").rstrip("\n"))
                before += 1
    return found


def _count(path: Path) -> int:
    """How many lines a file has."""
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK), b"")) + 1


def _start(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(_STATE).decode("utf-8", "replace")
