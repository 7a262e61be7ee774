"""The values that replace typed options and variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from provision.inventory.selection import fold
from provision.model import Notice
from provision.run import RunSpec
from provision.run.job import Replaced


def replaced(spec: RunSpec) -> list[Notice]:
    """A notice for each typed option or variable that is replaced: ``--master_addr 10.0.0.9: replaced by …``."""
    return [
        Notice(f"{each.typed}: replaced by {BY[each.by](spec)}") for each in spec.job.replaced if not _same(spec, each)
    ]


def used(spec: RunSpec, names: Mapping[str, str]) -> str:
    """``NNODES 2, MASTER_PORT 29500``: the run's values of variables, by name and key of ``BY``."""
    return ", ".join(f"{name}: {BY[by](spec)}" for name, by in names.items())


def _same(spec: RunSpec, each: Replaced) -> bool:
    """Whether the typed value is the one that is used."""
    values = {
        "address": (spec.master, spec.active[0].node.name),
        "port": (str(spec.port),),
        "endpoint": (f"{spec.master}:{spec.port}",),
    }
    return each.value in values.get(each.by, ())


def _head(spec: RunSpec) -> str:
    return spec.active[0].node.name


def _ranks(spec: RunSpec) -> str:
    last = len(spec.active) - 1
    return f"each node's own, {f'0 to {last} on' if last else '0 on'} {_nodes(spec)}"


def _nodes(spec: RunSpec) -> str:
    return fold(worker.node.name for worker in spec.active)


def _processes(spec: RunSpec) -> str:
    counts = {worker.processes for worker in spec.active}
    if len(counts) == 1:
        return f"{counts.pop()} on each of {_nodes(spec)}"
    return ", ".join(f"{worker.processes} on {worker.node.name}" for worker in spec.active)


def _restarts(spec: RunSpec) -> str:
    more = "" if spec.restarts else "; --restarts N restarts a failed run from its newest checkpoint"
    return f"--restarts {spec.restarts}{more}"


BY: Mapping[str, Callable[[RunSpec], str]] = {
    "rank": _ranks,
    "address": lambda spec: f"{spec.master} ({_head(spec)})",
    "port": lambda spec: f"{spec.port}, a free port of {_head(spec)}",
    "endpoint": lambda spec: f"{spec.master}:{spec.port} ({_head(spec)})",
    "rendezvous": lambda spec: f"a static rendezvous at {spec.master}:{spec.port} ({_head(spec)})",
    "nodes": lambda spec: f"{len(spec.active)} of the inventory's nodes: {_nodes(spec)}",
    "per_node": _processes,
    "processes": _processes,
    "restarts": _restarts,
    "logs": lambda spec: f"the logs of all ranks in runs/{spec.id}",
    "ssh": lambda _: "clusterctl, which starts every node itself",
    "marks": lambda _: "clusterctl stop, which finds the processes",
    "kind": lambda spec: (
        "GPUs on every node" if all(each.has_gpus for each in spec.active) else "the CPUs or GPUs of the nodes"
    ),
}
