"""``clusterctl diagnose``: what a run left behind is gathered from its nodes and from this machine, and judged.

Nodes that are down do not hinder: what is here of them (the logs that an attached ``train`` has written) stands in.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from provision.diagnosis import Diagnosis, Evidence, Record, reading, recorder
from provision.diagnosis import diagnose as judged
from provision.diagnosis.evidence import Event
from provision.errors import ClusterctlError, NodesFailedError, UsageError
from provision.model import Emit, Inventory, Node, StageFinished, StageStarted
from provision.render import render
from provision.run import record as records
from provision.run.found import LOST
from provision.ssh.remote import Connections, fan_out
from provision.tasks import runs
from provision.tasks.answers import reason
from provision.tasks.prepare import run_folder
from trainer.untrusted import UntrustedError

if TYPE_CHECKING:
    from provision.run.found import Part, Run
    from provision.ssh.prompts import Prompts

_STAGE = "diagnose"
_AT_ONCE = 64  # nodes
_DEADLINE = 60.0
_MOST = 2 << 20  # bytes of each file that are read
_LEAST = 128 << 10  # of a node among very many
_TOGETHER = 32 << 20  # bytes of one file of all nodes together: half a second of judging each two MiB
_FILE = 64 << 20  # bytes of a file given by hand: its end

Files = dict[str, str]


def diagnose(
    inventory: Inventory, nodes: Sequence[Node], word: str | None, *, prompts: Prompts | None = None, emit: Emit
) -> Diagnosis:
    """Say what is wrong with a run. Two round trips; changes nothing.

    Args:
        inventory: the cluster.
        nodes: those that are asked.
        word: the run's id or a part of it; None: the newest.
        prompts: how to ask for a password or about a host key.
        emit: is told about the progress.

    Raises:
        UsageError: no run is meant, or several are.
        NodesFailedError: no node answered, and this machine knows nothing of the run either.
    """
    began = time.monotonic()
    emit(StageStarted(_STAGE, f"Asking {len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}", len(nodes)))
    with Connections(inventory, prompts) as connections:
        try:
            run, known = runs.find(inventory, nodes, connections, word)
        except NodesFailedError as error:
            emit(StageFinished(_STAGE, time.monotonic() - began, error.reasons, failed=len(error.reasons)))
            return judged(_here(inventory, word, error))
        texts, missing = _gathered(inventory, run, connections)
    missing = {**{name: why for name, why in known.unreachable.items() if run.missing or name in run.nodes}, **missing}
    emit(StageFinished(_STAGE, time.monotonic() - began, dict.fromkeys(missing, "no answer")))
    folder = records.folder_of(inventory.path, run.id)
    kept = records.read(folder) or {}
    ranks = {part.node: part.rank for part in run.parts} | _ranks(kept)
    for name in missing:
        texts.setdefault(name, _local(folder / name))
    state = "running" if run.live else "failed" if run.state == LOST else run.state
    gone = {part.node: _gone(part) for part in run.parts if part.state == LOST}
    return judged(_evidence(run.id, state, texts, ranks, kept, missing, gone))


def diagnose_files(paths: Sequence[Path]) -> Diagnosis:
    """Say what log files of any launcher tell. A file stands for a node, under its own name.

    Raises:
        UsageError: a file cannot be read.
    """
    names = [path.name for path in paths]
    found = []
    for place, path in enumerate(paths):
        name = path.name if names.count(path.name) == 1 else str(path)
        try:
            dump = _dump(path)
            text, skipped = _tail(path, _FILE) if dump is None else (dump, 0)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror or error}", hint="--log FILE") from error
        except UntrustedError as error:
            raise UsageError(f"{path} {error}", hint="--log with the rank's log in its place") from error
        kind = "events.jsonl" if path.suffix == ".jsonl" else "run.log"
        files = {kind: text, "skipped": f"{kind} {skipped}"}
        found.append(reading.record(name, files, node_rank=place, file=str(path)))
    return judged(Evidence(tuple(found)))


def _dump(path: Path) -> str | None:
    """The lines of a dump of torch's flight recorder; None where the file is another one."""
    if recorder.rank_of(path.name) is None:
        return None
    with path.open("rb") as file:
        data = file.read(_FILE)
    return recorder.lines(path.name, data) if recorder.is_dump(path.name, data) else None


def _gathered(inventory: Inventory, run: Run, connections: Connections) -> tuple[dict[str, Files], dict[str, str]]:
    """The texts of every part of a run, by node, and the reasons of nodes that gave none."""
    nodes = runs.by_name(inventory)
    mark = f"@clusterctl:{secrets.token_hex(8)}"
    limit = max(_LEAST, min(_MOST, _TOGETHER // max(1, len(run.parts))))
    readers = {part.node: part.node if part.node in part.seen_on else part.seen_on[0] for part in run.parts}
    scripts = {
        part.node: render(
            "run/evidence.sh.j2", logs=f"{run_folder(inventory, run.id).parent}/{part.logs}", mark=mark, limit=limit
        )
        for part in run.parts
    }

    def ask(node: Node) -> Files:
        return split(connections[nodes[readers[node.name]]].run(scripts[node.name], deadline=_DEADLINE).out, mark)

    answers = fan_out([nodes[name] for name in scripts if name in nodes], ask, limit=_AT_ONCE)
    folders = {part.node: f"{run_folder(inventory, run.id).parent}/{part.logs}" for part in run.parts}
    texts = {
        name: {**answer, "where": f"{readers[name]}:{folders[name]}"} if answer else answer
        for name, answer in answers.items()
        if not isinstance(answer, ClusterctlError)
    }
    missing = {
        name: reason(answer, inventory, nodes[readers[name]])
        for name, answer in answers.items()
        if isinstance(answer, ClusterctlError)
    }
    return texts, missing


def split(out: str, mark: str) -> Files:
    """A node's answer (``templates/run/evidence.sh.j2``) as texts by file name."""
    files: Files = {}
    for part in f"\n{out}".split(f"\n{mark} ")[1:]:
        name, _, text = part.partition("\n")
        files[name] = text
    return files


def _gone(part: Part) -> Event:
    """That an agent is gone without having written an end: it wrote its state last when it lived."""
    said = part.said
    return {"event": "gone", "time": said.get("time", 0), "attempt": said.get("attempt", 1), "node": part.node}


def _here(inventory: Inventory, word: str | None, error: NodesFailedError) -> Evidence:
    """What this machine alone knows of a run, where no node answers."""
    known = records.kept(inventory.path)
    if not known:
        raise error
    run = records.choose(word, known)
    kept = known[run]
    folder = records.folder_of(inventory.path, run)
    ranks = _ranks(kept)
    texts = {name: _local(folder / name) for name in ranks}
    missing = {name: why for name, why in error.reasons.items() if name in ranks}
    return _evidence(run, str(kept.get("state") or ""), texts, ranks, kept, missing)


def _ranks(kept: Mapping[str, Any]) -> dict[str, int]:
    nodes = kept.get("nodes") or kept.get("plans") or ()
    return {str(name): rank for rank, name in enumerate(nodes)} if isinstance(nodes, Iterable) else {}


def _evidence(
    run: str,
    state: str,
    texts: Mapping[str, Files],
    ranks: Mapping[str, int],
    kept: Mapping[str, Any],
    missing: Mapping[str, str],
    gone: Mapping[str, Event] = MappingProxyType({}),
) -> Evidence:
    plans = kept.get("plans") if isinstance(kept.get("plans"), dict) else {}
    found = [
        _record(name, texts[name], ranks.get(name, 0), (plans or {}).get(name) or {}, gone.get(name))
        for name in sorted(texts, key=lambda name: (ranks.get(name, len(ranks)), name))
        if texts[name]
    ]
    return Evidence(tuple(found), run, state, missing)


def _record(name: str, files: Files, rank: int, plan: Mapping[str, Any], gone: Event | None) -> Record:
    first = plan.get("first_rank")
    events = (gone,) if gone else ()
    return reading.record(
        name, files, node_rank=rank, first_rank=first if isinstance(first, int) else None, events=events
    )


def _local(folder: Path) -> Files:
    """The ends of a node's log files on this machine."""
    if not folder.is_dir():
        return {}
    read = {path.name: _tail(path, _MOST) for path in sorted(folder.iterdir()) if path.suffix in {".log", ".jsonl"}}
    if not read:
        return {}
    files = {name: text for name, (text, _) in read.items()}
    files["skipped"] = "\n".join(f"{name} {skipped}" for name, (_, skipped) in read.items())
    return {**files, "where": str(folder)}


def _tail(path: Path, limit: int) -> tuple[str, int]:
    """The whole lines in the last bytes of a file, and how many lines are before them."""
    with path.open("rb") as file:
        before = max(0, file.seek(0, 2) - limit)
        file.seek(0)
        skipped, left = 0, before
        while left and (part := file.read(min(left, _FILE))):
            skipped += part.count(b"\n")
            left -= len(part)
        file.seek(before)
        text = file.read(limit).decode("utf-8", "replace")
    return (text, 0) if not before else (text.partition("\n")[2], skipped + 1)
