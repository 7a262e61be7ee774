"""``clusterctl diagnose``: gathers a run's logs and events from its nodes and from this machine, and judges them.

For a node that is down it uses the logs that an attached ``train`` wrote on this machine.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from provision.diagnosis import Diagnosis, Evidence, Record, arrivals, reading
from provision.diagnosis import diagnose as judged
from provision.diagnosis.evidence import Event
from provision.env.text import number
from provision.errors import NodesFailedError, UsageError
from provision.model import Inventory, Node
from provision.render import render
from provision.run import record as records
from provision.run.found import LOST
from provision.run.ignored import LISTED
from provision.run.named import LONGEST
from provision.tasks.runs import by_name, find, logs_folder, reader_of
from trainer.agent.contract.untrusted import UntrustedError

if TYPE_CHECKING:
    from provision.run.found import Part, Run
    from provision.session import Session
    from provision.tasks.runs import Runs

_DEADLINE = 60.0
_MOST = 2 << 20  # bytes of each file that are read
_LEAST = 128 << 10  # of a node among very many
_TOGETHER = 32 << 20  # bytes of one file of all nodes together: half a second of judging each two MiB
FILE_LIMIT = 64 << 20  # bytes of a file given by hand: its end

Files = dict[str, str]


def diagnose(session: Session, word: str | None, *, found: tuple[Run, Runs] | None = None) -> Diagnosis:
    """Diagnose a run in two round trips. Changes nothing.

    Args:
        session: the command's session.
        word: the run's id or a part of it; None: the newest.
        found: the run, if it was searched already.

    Raises:
        UsageError: no run matches, or several do.
        NodesFailedError: no node answered, and this machine knows nothing of the run either.
    """
    inventory = session.inventory
    with session.stage("diagnose", f"Asking {number(len(session.nodes), 'node')}", len(session.nodes)) as shown:
        try:
            run, known = found or find(session, word)
        except NodesFailedError as error:
            shown.states, shown.failed = error.reasons, len(error.reasons)
            shown.finish()
            return judged(local_evidence(inventory, word, error))
        texts, missing = _gathered(session, run)
        missing = {**known.silent(run), **missing}
        shown.states = dict.fromkeys(missing, "no answer")
    folder = records.folder_of(inventory.path, run.id)
    kept = records.read(folder) or {}
    ranks = {part.node: part.rank for part in run.parts} | _ranks(kept)
    files = {**{name: local_files(folder / name) for name in missing}, **texts}
    state = "running" if run.live else "failed" if run.state == LOST else run.state
    gone = {part.node: _gone(part) for part in run.parts if part.state == LOST}
    return judged(evidence_of(run.id, state, files, ranks, kept, missing, gone))


def diagnose_files(paths: Sequence[Path]) -> Diagnosis:
    """Diagnose log files of any launcher. Each file counts as a node with the file's name.

    Raises:
        UsageError: a file cannot be read.
    """
    names = [path.name for path in paths]
    found = []
    for place, path in enumerate(paths):
        name = path.name if names.count(path.name) == 1 else str(path)
        try:
            dump = _dump(path)
            text, skipped = _tail(path, FILE_LIMIT) if dump is None else (dump, 0)
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
    if arrivals.dump_rank(path.name) is None:
        return None
    with path.open("rb") as file:
        data = file.read(FILE_LIMIT)
    return arrivals.dump_lines(path.name, data) if arrivals.is_dump(path.name, data) else None


def _gathered(session: Session, run: Run) -> tuple[dict[str, Files], dict[str, str]]:
    """The texts of every part of a run, by node, and why nodes gave none."""
    nodes = by_name(session.inventory)
    mark = f"@clusterctl:{secrets.token_hex(8)}"
    limit = max(_LEAST, min(_MOST, _TOGETHER // max(1, len(run.parts))))
    readers = {part.node: reader_of(part) for part in run.parts}
    folders = {part.node: logs_folder(session.inventory, part) for part in run.parts}

    def ask(node: Node) -> Files:
        script = render("run/evidence.sh.j2", logs=folders[node.name], mark=mark, limit=limit)
        return split(session.run(nodes[readers[node.name]], script, deadline=_DEADLINE).out, mark)

    outcome = session.each(ask, on=[nodes[name] for name in folders if name in nodes])
    texts = {
        name: {**files, "where": f"{readers[name]}:{folders[name]}"} if files else files
        for name, files in outcome.ok.items()
    }
    return texts, outcome.reasons


def split(out: str, mark: str) -> Files:
    """A node's answer (``templates/run/evidence.sh.j2``) as texts by file name."""
    files: Files = {}
    for part in f"\n{out}".split(f"\n{mark} ")[1:]:
        name, _, text = part.partition("\n")
        files[name] = text
    return files


def _gone(part: Part) -> Event:
    """The event of an agent that died without reporting: its state has the time at which it was last alive."""
    fields = part.fields
    return {"event": "gone", "time": fields.get("time", 0), "attempt": fields.get("attempt", 1), "node": part.node}


def local_evidence(inventory: Inventory, word: str | None, error: NodesFailedError) -> Evidence:
    """What this machine knows of a run, if no node answers; raises ``error`` if it knows nothing."""
    known = records.kept(inventory.path)
    if not known:
        raise error
    run = records.choose(word, known)
    kept = known[run]
    folder = records.folder_of(inventory.path, run)
    ranks = _ranks(kept)
    texts = {name: local_files(folder / name) for name in ranks}
    missing = {name: why for name, why in error.reasons.items() if name in ranks}
    return evidence_of(run, str(kept.get("state") or ""), texts, ranks, kept, missing)


def _ranks(kept: Mapping[str, Any]) -> dict[str, int]:
    nodes = kept.get("nodes") or kept.get("plans") or ()
    return {str(name): rank for rank, name in enumerate(nodes)} if isinstance(nodes, Iterable) else {}


def evidence_of(
    run: str,
    state: str,
    texts: Mapping[str, Files],
    ranks: Mapping[str, int],
    kept: Mapping[str, Any],
    missing: Mapping[str, str],
    gone: Mapping[str, Event] = MappingProxyType({}),
) -> Evidence:
    """The evidence of a run.

    Args:
        run: its id.
        state: the run's state.
        texts: by node name, its files.
        ranks: by node name.
        kept: this machine's record of the run.
        missing: nodes without an answer, each with its reason.
        gone: nodes whose agent died without reporting, each with an event for it.
    """
    plans = kept.get("plans") if isinstance(kept.get("plans"), dict) else {}
    found = [
        _record(name, texts[name], ranks.get(name, 0), (plans or {}).get(name) or {}, gone.get(name))
        for name in sorted(texts, key=lambda name: (ranks.get(name, len(ranks)), name))
        if texts[name]
    ]
    unsent = kept.get("unsent")
    names = [name[:LONGEST] for name in unsent][:LISTED] if isinstance(unsent, dict) else []
    release = re.search(r"/releases/([0-9a-f]{12})", str(kept.get("prefix") or ""))
    return Evidence(tuple(found), run, state, missing, tuple(names), release[1] if release else "")


def _record(name: str, files: Files, rank: int, plan: Mapping[str, Any], gone: Event | None) -> Record:
    first, pattern = plan.get("first_rank"), plan.get("pattern")
    events = (gone,) if gone else ()
    return reading.record(
        name,
        files,
        node_rank=rank,
        first_rank=first if isinstance(first, int) else None,
        events=events,
        pattern=pattern if isinstance(pattern, str) else None,
    )


def local_files(folder: Path) -> Files:
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
        while left and (part := file.read(min(left, FILE_LIMIT))):
            skipped += part.count(b"\n")
            left -= len(part)
        file.seek(before)
        text = file.read(limit).decode("utf-8", "replace")
    return (text, 0) if not before else (text.partition("\n")[2], skipped + 1)
