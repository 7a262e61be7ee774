"""Recorded answers of probes: ``recorded/<id>.yaml``, one file a check.

::

    healthy:
      source: "H200 x2, driver 575.57.08, 2026-11"   # machine, version, date; or the document that the text is after
      seen: true                                     # false: written after a document, or edited
      nodes: {node01: {out: "…", rc: 0}}             # also state, root, err
    faulty:
      - name: "one node's driver was updated"
        source: "…"
        seen: false
        nodes: {…}
        finds: {node02: FAIL}                        # every other node is OK or N/A
        says: ["570.1", "reboot"]                    # part of what these findings observe, expect or advise
    also:                                            # further answers of healthy nodes: another vendor, no GPU
      - {name: …, source: …, seen: …, nodes: …}

Any recording may hold ``limits``, ``manifest`` (fields of ``Manifest``), ``inventory`` (a node's fields by its name)
``train`` (fields of ``TrainDefaults``) and ``services`` (as in the inventory).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from provision import checks
from provision.checks import Answer, Plan
from provision.env.bundle.manifest import Entry, Manifest, Package, PrefixFiles
from provision.model import Inventory, Node, TrainDefaults

FOLDER = Path(__file__).parent / "recorded"
KNOWN = {
    "name",
    "source",
    "seen",
    "nodes",
    "finds",
    "says",
    "limits",
    "manifest",
    "inventory",
    "train",
    "user",
    "services",
}
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Recording:
    """One state of a few nodes, and what the check finds in it."""

    check: str
    name: str
    source: str
    seen: bool
    answers: dict[str, Answer]
    finds: dict[str, str] = field(default_factory=dict)
    says: tuple[str, ...] = ()
    limits: dict[str, float] = field(default_factory=dict)
    manifest: dict[str, Any] | None = None
    inventory: dict[str, dict[str, Any]] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    user: str = ""
    services: dict[str, Any] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        nodes = tuple(
            Node(name, **{"address": f"192.168.20.{number}", **self.inventory.get(name, {})})
            for number, name in enumerate(self.answers, 11)
        )
        cluster = Inventory(
            Path("inventory.yaml"),
            PurePosixPath("/opt/llm/current"),
            nodes,
            train=TrainDefaults(**self.train),
            services=self.services,
        )
        limits = {**checks.load(self.check).limits, **self.limits}
        return Plan(cluster, nodes, manifest(**self.manifest) if self.manifest else None, limits, self.user)


@dataclass(frozen=True)
class Recorded:
    """All recordings of a check."""

    healthy: tuple[Recording, ...]
    faulty: tuple[Recording, ...]


def manifest(**given: Any) -> Manifest:
    """A manifest of an environment without files, but for what is ``given``."""
    made: dict[str, Any] = {
        "name": "llm",
        "tool": "0.1.0",
        "created": "2026-11-01T00:00:00+00:00",
        "platform": "linux-x86_64",
        "python": "3.11.9",
        "source_prefix": "/home/user/envs/llm",
        "chunks": (),
        "prefix_files": PrefixFiles("0" * 64, 0, 0, 0),
        "files": (),
        "relocations": (),
    } | given
    made["files"] = tuple(Entry(**{"type": "file", "mode": 0o644, "mtime": 0, **entry}) for entry in made["files"])
    made["packages"] = tuple(Package(**{"kind": "pypi", **each}) for each in made.get("packages", ()))
    if made.get("gpu_architectures") is not None:
        made["gpu_architectures"] = tuple(made["gpu_architectures"])
    return Manifest(**made)


@cache
def recorded(check: str) -> Recorded:
    """The recordings of a check.

    Raises:
        FileNotFoundError: it has none.
    """
    data = yaml.load((FOLDER / f"{check}.yaml").read_text(encoding="utf-8"), _LOADER)
    unknown = set(data) - {"healthy", "faulty", "also", "limits"}
    assert not unknown, f"{check}.yaml: {unknown}"
    healthy = [{"name": "healthy", **data["healthy"]}, *data.get("also", ())]
    assert all("finds" not in each for each in healthy), f"{check}.yaml: what is healthy finds nothing"
    shared = {"limits": data["limits"]} if "limits" in data else {}
    return Recorded(
        tuple(_recording(check, {**shared, **each}) for each in healthy),
        tuple(_recording(check, {**shared, **each}) for each in data["faulty"]),
    )


def _recording(check: str, data: dict[str, Any]) -> Recording:
    unknown = set(data) - KNOWN
    assert not unknown, f"{check}.yaml: {unknown}"
    answers = {name: Answer(**answer) for name, answer in data.pop("nodes").items()}
    return Recording(check, answers=answers, **{**data, "says": tuple(data.get("says", ()))})
