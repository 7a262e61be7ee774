"""The nodes of a network measurement: ``trainer/network`` is sent there, runs, and is removed again."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provision import launchers
from provision.errors import ClusterctlError, NodesFailedError, PreflightError
from provision.model import Node
from provision.netbench import failed_stage, failure_reason, parse_event
from provision.render import quote
from provision.run import RunFiles, RunSpec, Worker, new_run_id, readiness
from provision.run.files import sources
from provision.run.found import Used, read_network
from provision.tasks.prepare import Answer, prepare, remove_folders, unreachable
from provision.tasks.runs import run_folder

if TYPE_CHECKING:
    from provision.session import Session

TIMEOUT = 120.0  # seconds for one operation, and for all nodes to come together
_DEADLINE = 6 * 3600.0  # seconds for one measurement, which ends long before
_NAME = "bench"  # in the id
_UNWANTED = ("NCCL_DEBUG_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT")  # output comes through the pipe, and no file stays

Event = Mapping[str, Any]
OnEvent = Callable[[Event], None]


def silent(_event: Event) -> None:
    """An ``OnEvent`` for measurements without separate progress."""


def network_used(events: Iterable[Event]) -> Used | None:
    """The network that NCCL used, as reported by all ranks."""
    return read_network("\n".join(event["text"] for event in events if event["event"] == "network"))


class MeasureFailedError(NodesFailedError):
    """Processes failed while they measured; the nodes still answer."""


@dataclass
class World:
    """Nodes that are ready to measure."""

    session: Session
    spec: RunSpec

    @property
    def nodes(self) -> tuple[Node, ...]:
        """In the order of their ranks."""
        return self.session.nodes

    @property
    def counts(self) -> list[int]:
        """Processes of each node."""
        return [worker.processes for worker in self.spec.workers]

    @property
    def gpus(self) -> bool:
        """Whether every node has GPUs."""
        return all(worker.facts.gpus for worker in self.spec.workers)

    @property
    def interfaces(self) -> str:
        """The interfaces by which the nodes reach rank 0."""
        return ", ".join(dict.fromkeys(worker.facts.interface or "?" for worker in self.spec.workers))

    @property
    def rdma(self) -> bool:
        """Whether NCCL finds InfiniBand or RoCE on every node and may use it."""
        return launchers.network(self.spec).kind != "tcp" and self.spec.env.get("NCCL_IB_DISABLE", "0") == "0"

    def run(self, work: Mapping[str, Any], env: Mapping[str, str], unset: Sequence[str], on: OnEvent) -> list[Event]:
        """One measurement, in new processes on every node.

        Args:
            work: see ``trainer/network/measure.py``.
            env: over the environment of a training run.
            unset: variables to remove from it.
            on: receives every event, from other threads but one at a time.

        Raises:
            MeasureFailedError: a process failed; all were ended.
            NodesFailedError: a node was lost.
            InterruptedByUser: Ctrl-C; all were ended.
        """
        flight = _Flight(self, dict(work, counts=self.counts), env, unset, on)
        try:
            outcome = self.session.each(flight.follow, limit=len(self.nodes))
        finally:
            flight.over.set()
            flight.wait()
        if outcome.failed:
            raise NodesFailedError("nodes were lost while the network was measured", reasons=outcome.reasons)
        if flight.failures:
            where = failed_stage(flight.events, sum(self.counts))
            raise MeasureFailedError(
                "the network could not be measured" + (f": {where}" if where else ""),
                reasons=flight.failures,
                hint="to check ports, names and clocks between the nodes: clusterctl check --level 1",
            )
        return flight.events


class _Flight:
    """One running measurement."""

    def __init__(
        self, world: World, work: Mapping[str, Any], env: Mapping[str, str], unset: Sequence[str], on: OnEvent
    ) -> None:
        self.events: list[Event] = []
        self.failures: dict[str, str] = {}
        self.over = threading.Event()
        self._world, self._work, self._env, self._unset, self._on = world, work, env, unset, on
        self._lock = threading.Lock()
        self._ended = {node.name: threading.Event() for node in world.nodes}

    def follow(self, node: Node) -> None:
        """Run the ranks of one node to their end; if they fail, all others end too."""
        spec = self._world.spec
        # The first line of stdin is the request; the end of stdin stops the measurement.
        script = (
            f"export CLUSTERCTL_RUN={quote(spec.id)} CLUSTERCTL_NODE={quote(node.name)}\n"
            f"exec {quote(spec.prefix)}/bin/python -I {quote(spec.folder)}/network\n"
        )
        try:
            result = self._world.session.connections[node].run(
                script, stdin=self._input(node), on_line=lambda line: self._take(node, line), deadline=_DEADLINE
            )
            if result.rc != 0:
                if not self.over.is_set():
                    reason = result.err.strip() or f"ended with status {result.rc} without reporting"
                    self.failures.setdefault(node.name, reason)
                self.over.set()
        except ClusterctlError:
            self.over.set()
            raise
        finally:
            self._ended[node.name].set()

    def wait(self, seconds: float = 10.0) -> None:
        """Wait until every node's script has ended, but not forever."""
        until = time.monotonic() + seconds
        for ended in self._ended.values():
            ended.wait(max(0.0, until - time.monotonic()))

    def _input(self, node: Node) -> Iterator[bytes]:
        """The work, and then nothing until the measurement is over."""
        spec = self._world.spec
        index, counts = self._world.nodes.index(node), self._world.counts
        first = sum(counts[:index])
        settings = {
            "ranks": list(range(first, first + counts[index])),
            "world": sum(counts),
            "master": spec.master,
            "port": spec.port,
            "env": {**launchers.environment(spec, index), **self._env},
            "unset": [*launchers.UNSET, *_UNWANTED, *self._unset],
            "timeout": TIMEOUT,
            "work": self._work,
        }
        yield json.dumps(settings).encode() + b"\n"
        self.over.wait()

    def _take(self, node: Node, line: str) -> None:
        event = parse_event(line, len(self._world.nodes))
        if event is None:
            return  # another program of the node prints
        with self._lock:
            if event["event"] == "failed" and not self.over.is_set():
                self.failures.setdefault(node.name, failure_reason(event))
            self.events.append(event)
            self._on(event)


@contextmanager
def world(session: Session) -> Iterator[World]:
    """Nodes with the program, and their addresses, ports and interfaces; afterwards it is removed from them.

    Raises:
        PreflightError: nodes cannot take part.
        NodesFailedError: nodes do not answer.
    """
    inventory, nodes = session.inventory, session.nodes
    run = new_run_id(datetime.now(timezone.utc), _NAME)
    files = RunFiles(config=Path(_NAME), config_name=_NAME, texts=sources("network"), entries=())
    asked = prepare(session, nodes, run, files, port=inventory.train.port)
    try:
        if error := unreachable(asked):
            raise error
        _refuse(nodes, asked.ok, asked.reasons)
        head = nodes[0]
        spec = RunSpec(
            id=run,
            workers=tuple(Worker(node, asked.ok[node.name].facts) for node in nodes),
            prefix=asked.ok[head.name].prefix(inventory),
            folder=run_folder(inventory, run),
            config=_NAME,
            master=head.train_address,
            port=asked.ok[head.name].facts.port or 0,
            env=inventory.train.env,
        )
        yield World(session, spec)
    finally:
        remove_folders(asked, nodes, run)


def _refuse(nodes: Sequence[Node], answers: Mapping[str, Answer], lacking: Mapping[str, str]) -> None:
    if lacking:
        message = f"{len(lacking)} of {len(nodes)} nodes cannot take part; nothing was started"
        raise PreflightError(message, reasons=lacking, hint="clusterctl deploy")
    facts = {name: answer.facts for name, answer in answers.items()}
    releases = {name: answer.release for name, answer in answers.items()}
    findings = [
        *readiness.reachable(nodes, facts),
        *readiness.machines(nodes, facts),
        *readiness.releases(nodes, releases),
    ]
    failed = {finding.node: finding for finding in findings if finding.verdict == "FAIL"}
    if failed:
        raise PreflightError(
            f"{len(failed)} of {len(nodes)} nodes cannot take part; nothing was started",
            reasons={name: finding.observed for name, finding in failed.items()},
            hint=next(iter(failed.values())).fix,
        )
