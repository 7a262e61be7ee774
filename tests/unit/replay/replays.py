"""Replays of public failures: ``cases/<id>.yaml``, and the score of ``diagnose`` on them.

A case carries over facts from the thread in ``source``. Its logs are generated: ``formats.py`` has what the libraries
print, and a case names a format and its values, or has the lines themselves::

    schema: 1
    id: deepspeed-offload-killed
    title: ZeRO-3 with both offloads fills the host's memory
    source: https://github.com/deepspeedai/DeepSpeed/issues/4239
    kind: memory                         # its group in the documentation
    program: DeepSpeed                   # who reported it: LLaMA-Factory, DeepSpeed, accelerate, torchrun, NCCL, …
    versions: {torch: "2.0.1"}           # what the thread states
    formats: {torch: "2.0.1"}            # optional: the versions whose message formats the logs have
    nodes: 1                             # null: the thread does not say
    cause: rank.killed                   # what the thread found, or else what its log shows
    fix: …                               # what solved it; null: no solution was read in the thread
    part: aside                          # rules or aside, by a hash of the id; or aside2
    expected: right                      # right, or unknown: the logs do not tell
    caught_by: net.master                # optional: the check, the gate's finding or the command that catches it before
    logs: {node02.log: [...]}            # files of another launcher, as for --log; or:
    run: {node02: {lines: [...], events: [...], kernel: [...]}}    # a run of clusterctl; a line has ``at`` and ``rank``

A third of the first cases is aside: rules were written for the others only. The cases of the part aside2 came later and
were written before a look at the rules. To see the logs of a case, or to give them to
``clusterctl diagnose --log``: ``python tests/unit/replay/replays.py ID FOLDER``.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

sys.path.append(str(Path(__file__).parents[1]))  # for replay; last, so that it hides no module

from replay.formats import FORMATS

from provision.diagnosis import Diagnosis, Evidence, diagnose, reading

FOLDER = Path(__file__).parent / "cases"
FIRST_LOOK = Path(__file__).parent / "first_look.yaml"
SCHEMA = 1
PARTS = ("rules", "aside", "aside2")
KEYS = {"schema", "id", "title", "source", "kind", "program", "versions", "nodes", "cause", "fix", "part", "expected"}
OPTIONAL = {"caught_by", "formats", "logs", "run"}

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same values, ten times as fast
_START = 1718101200  # epoch seconds of a run's start
_BOOT = 1000.0  # seconds of the machine before it


@dataclass(frozen=True)
class Replay:
    """One case.

    Attributes:
        id: its name.
        title: what failed.
        source: the thread.
        kind: its group in the documentation.
        program: who reported it.
        cause: the cause's id; one that the table lacks where ``expected`` is unknown.
        part: one of ``PARTS``.
        expected: right or unknown.
        caught_by: what catches it before the start; "" if nothing can.
        files: the generated logs by path.
        evidence: the same as data.
    """

    id: str
    title: str
    source: str
    kind: str
    program: str
    cause: str
    part: str
    expected: str
    caught_by: str
    files: Mapping[str, str]
    evidence: Evidence

    @cached_property
    def result(self) -> Diagnosis:
        """What ``diagnose`` makes of it."""
        return diagnose(self.evidence)

    @property
    def found(self) -> str:
        """The id of the cause that ``diagnose`` names; "" if it says that it does not know."""
        verdict = self.result.verdict
        first = verdict.first if verdict else None
        return first.cause.id if first and first.cause.grade != "unknown" else ""

    @property
    def verdict(self) -> str:
        """right, wrong or unknown."""
        found = self.found
        return "unknown" if not found else "right" if found == self.cause else "wrong"


def part_of(name: str) -> str:
    """The part of a case of the first set: a third is aside, by a hash of its id."""
    return "aside" if int(hashlib.sha256(name.encode()).hexdigest(), 16) % 3 == 0 else "rules"


@cache
def replays() -> tuple[Replay, ...]:
    """All cases."""
    return tuple(_replay(path) for path in sorted(FOLDER.glob("*.yaml")))


def first_look() -> dict[str, Any]:
    """The scores of each part before rules were written for it."""
    found: dict[str, Any] = yaml.safe_load(FIRST_LOOK.read_text(encoding="utf-8"))
    return found


def score(cases: Iterable[Replay]) -> dict[str, int]:
    """The number of right, wrong and unknown verdicts."""
    counted = dict.fromkeys(("right", "wrong", "unknown"), 0)
    for case in cases:
        counted[case.verdict] += 1
    return counted


def _replay(path: Path) -> Replay:
    data: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), _LOADER)
    assert data["schema"] == SCHEMA, path
    assert data["id"] == path.stem, path
    assert set(data) >= KEYS, (path, KEYS - set(data))
    assert not set(data) - KEYS - OPTIONAL, (path, set(data) - KEYS - OPTIONAL)
    assert ("logs" in data) != ("run" in data), path
    if "logs" in data:
        files = {name: "\n".join(_expand(data, entries)) + "\n" for name, entries in data["logs"].items()}
        records = tuple(reading.record(name, {"run.log": text}, file=name) for name, text in sorted(files.items()))
        evidence = Evidence(records)
    else:
        nodes = {node: _node_files(data, part) for node, part in sorted(data["run"].items())}
        files = {f"{node}/{name}": text for node, each in nodes.items() for name, text in each.items()}
        evidence = Evidence(
            tuple(reading.record(node, each, node_rank=place) for place, (node, each) in enumerate(nodes.items())),
            data["id"],
            "failed",
        )
    return Replay(
        data["id"],
        data["title"],
        data["source"],
        data["kind"],
        data["program"],
        data["cause"],
        data["part"],
        data["expected"],
        data.get("caught_by", ""),
        files,
        evidence,
    )


def _expand(case: Mapping[str, Any], entries: Iterable[Any]) -> list[str]:
    """The lines of entries: text, a format with its values, or entries behind a launcher's prefix."""
    lines: list[str] = []
    for entry in entries:
        if isinstance(entry, str):
            lines += entry.rstrip("\n").split("\n")
        elif "prefix" in entry:
            lines += [entry["prefix"] + line for line in _expand(case, entry["lines"])]
        else:
            ((name, values),) = entry.items()
            lines += FORMATS[name](case, values)
    return lines


def _node_files(case: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, str]:
    """A node's files of a run of clusterctl (trainer/agent/supervisor)."""
    rows: list[tuple[float, str]] = []
    for entry in part["lines"]:
        given = dict(entry)
        at, rank = float(given.pop("at")), given.pop("rank", "launcher")
        stamp = datetime.fromtimestamp(_START + at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
        rows += [(at, f"{stamp}Z [{rank}] {line}") for line in _expand(case, [given])]
    files = {"run.log": "\n".join(row for _, row in sorted(rows, key=lambda each: each[0])) + "\n"}
    if "kernel" in part:
        files["kernel"] = "".join(f"[{_BOOT + row['at']:.6f}] {row['say']}\n" for row in part["kernel"])
        files["machine"] = f"clock {_START} {_BOOT:.2f}\n"
    if "events" in part:
        files["events.jsonl"] = "".join(json.dumps(event) + "\n" for event in part["events"])
    return files


def main() -> None:
    """Write the logs of a case."""
    name, folder = sys.argv[1:]
    for path, text in next(case for case in replays() if case.id == name).files.items():
        target = Path(folder) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
