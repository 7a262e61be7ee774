"""Recorded runs: ``recorded_runs/<case>/``, with what ``diagnose`` must make of each.

::

    case.yaml
        source: "https://…"         # where the texts are from: a thread, a document, or "recorded" and with what
        note: "…"                   # what is special about it
        state: running              # the state in the run's record, if the agents' events have none
        processes: 1                # on each node; 2 by default
        finds: cuda.oom             # the cause's id; omitted if no log gives the reason, or nothing failed
        node: node02                # who failed first,
        rank: 3                     # and which rank; omitted: the launcher, or the node as a whole
        unsent: ["data/x.bin"]      # git-ignored files of the code that the run's record lists as not sent
        conditions: [loss.flat]     # of a run that trains: the rules that hold, and no others
        says: ["2.00 GiB"]          # part of the verdict
        fix: ["ZeRO"]               # part of the fix
        rows: ["gpt2-xl.slow"]      # rows of guides' own troubleshooting tables that this is (test_diagnosis_guides.py)
    <node>/run.log events.jsonl metrics.jsonl machine kernel    as on a node
    <file>                                                      a log of another launcher, as ``--log`` is given it
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from provision.diagnosis import Evidence, reading

FOLDER = Path(__file__).parent
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same values, ten times as fast
KNOWN = {
    *("source", "note", "state", "processes", "finds", "node", "rank", "unsent", "conditions", "says", "fix", "rows")
}


@dataclass(frozen=True)
class Case:
    """One recorded run and what it yields."""

    name: str
    source: str
    evidence: Evidence
    state: str = ""
    finds: str | None = None
    node: str | None = None
    rank: int | None = None
    conditions: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    note: str = ""


@cache
def cases() -> tuple[Case, ...]:
    """All of them."""
    return tuple(_case(path.parent) for path in sorted(FOLDER.glob("*/case.yaml")))


def case(name: str) -> Case:
    """The one of that name."""
    return next(each for each in cases() if each.name == name)


def _case(folder: Path) -> Case:
    data: dict[str, Any] = yaml.load((folder / "case.yaml").read_text(encoding="utf-8"), _LOADER)
    unknown = set(data) - KNOWN
    assert not unknown, f"{folder.name}: {unknown}"
    processes = data.pop("processes", 2)
    nodes = sorted(path for path in folder.iterdir() if path.is_dir())
    records = [
        reading.record(
            path.name,
            {file.name: file.read_text(encoding="utf-8") for file in path.iterdir()},
            node_rank=place,
            first_rank=place * processes,
        )
        for place, path in enumerate(nodes)
    ]
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != "case.yaml")
    records += [
        reading.record(path.name, {"run.log": path.read_text(encoding="utf-8")}, file=path.name) for path in files
    ]
    unsent = tuple(data.pop("unsent", ()))
    evidence = Evidence(tuple(records), "" if files else folder.name, data.get("state", ""), unsent=unsent)
    listed = {name: tuple(data.pop(name, ())) for name in ("conditions", "says", "fix", "rows")}
    return Case(folder.name, evidence=evidence, **listed, **data)
