"""What the runs of this machine say about each node, and which nodes ``train`` skips.

``nodes.json`` next to the inventory has the excluded nodes: ``{"version": 1, "excluded": {"gpu03": {"why": "…", "run":
"…", "since": "2026-11-27T10:15:00Z"}}}``. A node is excluded when a run replaces it by a spare node. ``clusterctl nodes
trust`` removes the exclusion.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from provision.errors import UsageError
from provision.inventory.document import printable
from provision.run.record import now
from trainer.agent.contract import effective
from trainer.agent.contract.untrusted import UntrustedError, parse_object

FILE = "nodes.json"
VERSION = 1
_LIMIT = 4 << 20  # bytes
_LONG = 500  # characters of a text
_MOST = 10_000  # nodes


@dataclass(frozen=True)
class Excluded:
    """Why a node is excluded, by which run, and since when (UTC)."""

    why: str
    run: str = ""
    since: str = ""


@dataclass(frozen=True)
class NodeHistory:
    """A node over all recorded runs.

    Attributes:
        node: its name.
        runs: how many runs used it.
        failures: how many failures named it, restarts included.
        restarts: restarts of the runs that used it.
        checks: how many results of checks before a start were FAIL or WARN.
        last: the newest reason that named it.
        excluded: why ``train`` skips it; None: it does not.
    """

    node: str
    runs: int = 0
    failures: int = 0
    restarts: int = 0
    checks: int = 0
    last: str = ""
    excluded: Excluded | None = None


def histories(
    names: Sequence[str], records: Mapping[str, Mapping[str, Any]], excluded: Mapping[str, Excluded]
) -> tuple[NodeHistory, ...]:
    """The nodes of an inventory, those that failures named most first. ``records`` are the oldest first."""
    runs: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    restarts: Counter[str] = Counter()
    checks: Counter[str] = Counter()
    last: dict[str, str] = {}
    for record in records.values():
        used = [str(node) for node in _list(record.get("nodes"))]
        spent, why, counted = effective.read(record.get("spent")), record.get("why"), record.get("named")
        reasons = why if isinstance(why, dict) else {}
        for node in used:
            runs[node] += 1
            restarts[node] += spent.restarts if spent is not None else 0
        failures.update(named(counted) if isinstance(counted, dict) else dict.fromkeys(map(str, reasons), 1))
        last.update({str(node): str(text).partition("\n")[0][:_LONG] for node, text in reasons.items()})
        before = record.get("preflight")
        for problem in _list(before.get("problems") if isinstance(before, dict) else None):
            if isinstance(problem, dict) and problem.get("verdict") in {"FAIL", "WARN"}:
                checks.update(str(node) for node in _list(problem.get("nodes")))
    found = (
        NodeHistory(
            each, runs[each], failures[each], restarts[each], checks[each], last.get(each, ""), excluded.get(each)
        )
        for each in names
    )
    return tuple(sorted(found, key=lambda each: (-each.failures, -each.checks)))


def named(counts: Any) -> dict[str, int]:
    """The usable counts in a record's ``named``: by node, the failures that named it."""
    counts = counts if isinstance(counts, dict) else {}
    return {str(node): count for node, count in counts.items() if type(count) is int and 0 < count < 1 << 31}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def read(inventory: Path) -> dict[str, Excluded]:
    """The excluded nodes; empty without the file.

    Raises:
        UsageError: the file cannot be used.
    """
    path = inventory.parent / FILE
    try:
        with path.open("rb") as file:
            content = parse_object(file.read(_LIMIT + 1), limit=_LIMIT)
    except FileNotFoundError:
        return {}
    except (OSError, UntrustedError) as error:
        raise UsageError(
            f"{path}: {error}", hint=f"correct or remove it: it lists the nodes to skip: rm {path}"
        ) from None
    if content.get("version") != VERSION:
        what = f"{path}: version {str(content.get('version'))[:20]}, but only version {VERSION} is supported"
        raise UsageError(what, hint=f"unless a newer version wrote it: rm {path}")
    entries = content.get("excluded")
    entries = entries if isinstance(entries, dict) else {}
    return {
        str(node)[:_LONG]: Excluded(*(str(entry.get(key) or "")[:_LONG] for key in ("why", "run", "since")))
        for node, entry in list(entries.items())[:_MOST]
        if isinstance(entry, dict)
    }


def skipped(inventory: Path, names: Iterable[str]) -> dict[str, str]:
    """The excluded nodes among ``names``, each with a sentence about it.

    Raises:
        UsageError: the file cannot be used.
    """
    known = read(inventory)
    return {
        name: f"{name} is skipped: {printable(known[name].why)}; to use it again: clusterctl nodes trust {name}"
        for name in names
        if name in known
    }


def exclude(inventory: Path, node: str, why: str, run: str) -> None:
    """Let ``train`` skip a node from now on. An existing exclusion stays as it is."""
    found = read(inventory)
    if node not in found:
        _write(inventory, {**found, node: Excluded(why[:_LONG], run, now())})


def trust(inventory: Path, nodes: Iterable[str]) -> dict[str, Excluded]:
    """Let ``train`` use nodes again. Returns those that were excluded."""
    found = read(inventory)
    gone = {node: found.pop(node) for node in nodes if node in found}
    if gone:
        _write(inventory, found)
    return gone


def _write(inventory: Path, excluded: Mapping[str, Excluded]) -> None:
    path = inventory.parent / FILE
    content = {"version": VERSION, "excluded": {node: asdict(entry) for node, entry in sorted(excluded.items())}}
    fresh = path.with_name(f".{FILE}.{os.getpid()}")
    fresh.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)
