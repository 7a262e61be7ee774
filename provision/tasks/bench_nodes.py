"""The nodes of a network measurement: ``trainer/network`` goes there, runs as often as it takes, and goes again."""

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
from provision.model import Emit, Inventory, Node, StageFinished, StageStarted
from provision.netbench.events import parse
from provision.netbench.failing import reason as why_failed
from provision.netbench.failing import stage
from provision.render import render
from provision.run import RunSpec, Travel, Worker, new_run_id, readiness
from provision.run.files import sources
from provision.run.found import Used, read_network
from provision.ssh.remote import Connections, fan_out
from provision.tasks.answers import reason
from provision.tasks.prepare import Answer, missing, prepare, run_folder, unreachable, withdraw

if TYPE_CHECKING:
    from provision.ssh.prompts import Prompts

TIMEOUT = 120.0  # seconds for one operation, and for all nodes to come together
_DEADLINE = 6 * 3600.0  # seconds for one measurement: it ends by itself long before
_NAME = "bench"  # in the id
_UNWANTED = ("NCCL_DEBUG_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT")  # what is said comes by the pipe, and no file stays

Event = Mapping[str, Any]
OnEvent = Callable[[Event], None]


def silent(_event: Event) -> None:
    """An ``OnEvent`` for measurements that show no progress of their own."""


def network_used(events: Iterable[Event]) -> Used | None:
    """The network that NCCL has used, as all ranks together say."""
    return read_network("\n".join(event["text"] for event in events if event["event"] == "network"))


class MeasureFailedError(NodesFailedError):
    """Processes failed while they measured; the nodes themselves are there."""


@dataclass
class World:
    """Nodes that are ready to measure."""

    inventory: Inventory
    nodes: tuple[Node, ...]
    connections: Connections
    spec: RunSpec

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
            unset: variables of it that are not to be there.
            on: is told every event, from threads of its own but one at a time.

        Raises:
            MeasureFailedError: a process failed; all were ended.
            NodesFailedError: a node is gone.
            InterruptedByUser: Ctrl-C; all were ended.
        """
        flight = _Flight(self, dict(work, counts=self.counts), env, unset, on)
        try:
            answers = fan_out(self.nodes, flight.follow, limit=len(self.nodes))
        finally:
            flight.over.set()
            flight.wait()
        gone = {
            node.name: reason(answer, self.inventory, node)
            for node in self.nodes
            if isinstance(answer := answers[node.name], ClusterctlError)
        }
        if gone:
            raise NodesFailedError("nodes were lost while the network was measured", reasons=gone)
        if flight.failures:
            where = stage(flight.events, sum(self.counts))
            raise MeasureFailedError(
                "the network could not be measured" + (f": {where}" if where else ""),
                reasons=flight.failures,
                hint="to look at ports, names and clocks between the nodes: clusterctl check --level 1",
            )
        return flight.events


class _Flight:
    """One measurement while it goes on."""

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
        """Run the ranks of one node to their end; when they fail, all others end too."""
        spec = self._world.spec
        script = render(
            "netbench/measure.sh.j2", run=spec.id, node=node.name, release=str(spec.prefix), folder=str(spec.folder)
        )
        try:
            result = self._world.connections[node].run(
                script, stdin=self._input(node), on_line=lambda line: self._take(node, line), deadline=_DEADLINE
            )
            if result.rc != 0:
                if not self.over.is_set():
                    said = result.err.strip() or f"ended with status {result.rc} and without a word"
                    self.failures.setdefault(node.name, said)
                self.over.set()
        except ClusterctlError:
            self.over.set()
            raise
        finally:
            self._ended[node.name].set()

    def wait(self, seconds: float = 10.0) -> None:
        """Until every node's script has ended, but not for ever."""
        until = time.monotonic() + seconds
        for ended in self._ended.values():
            ended.wait(max(0.0, until - time.monotonic()))

    def _input(self, node: Node) -> Iterator[bytes]:
        """What to do, and then nothing until all is over."""
        spec = self._world.spec
        index, counts = self._world.nodes.index(node), self._world.counts
        first = sum(counts[:index])
        told = {
            "ranks": list(range(first, first + counts[index])),
            "world": sum(counts),
            "master": spec.master,
            "port": spec.port,
            "env": {**launchers.environment(spec, index), **self._env},
            "unset": [*launchers.UNSET, *_UNWANTED, *self._unset],
            "timeout": TIMEOUT,
            "work": self._work,
        }
        yield json.dumps(told).encode() + b"\n"
        self.over.wait()

    def _take(self, node: Node, line: str) -> None:
        event = parse(line, len(self._world.nodes))
        if event is None:
            return  # a program of the node's own that prints
        with self._lock:
            if event["event"] == "failed" and not self.over.is_set():
                self.failures.setdefault(node.name, why_failed(event))
            self.events.append(event)
            self._on(event)


@contextmanager
def world(
    inventory: Inventory, nodes: Sequence[Node], *, prompts: Prompts | None = None, emit: Emit
) -> Iterator[World]:
    """Nodes that have the program, and their addresses, ports and interfaces; afterwards nothing of it is left there.

    Raises:
        PreflightError: nodes that cannot take part.
        NodesFailedError: nodes that cannot be reached.
    """
    began = time.monotonic()
    emit(StageStarted("prepare", "Preparing nodes", len(nodes), "nodes"))
    run = new_run_id(datetime.now(timezone.utc), _NAME)
    luggage = Travel(config=Path(_NAME), config_name=_NAME, texts=sources("network"), entries=())
    with Connections(inventory, prompts) as connections:
        asked = prepare(inventory, nodes, connections, run, luggage, port=inventory.train.port)
        try:
            answers = {name: answer for name, answer in asked.items() if isinstance(answer, Answer)}
            if error := unreachable(inventory, nodes, asked):
                raise error
            _refuse(nodes, answers, missing(inventory, nodes, asked))
            head = nodes[0]
            spec = RunSpec(
                id=run,
                workers=tuple(Worker(node, answers[node.name].facts) for node in nodes),
                prefix=answers[head.name].prefix(inventory),
                folder=run_folder(inventory, run),
                config=_NAME,
                master=head.train_address,
                port=answers[head.name].facts.port or 0,
                env=inventory.train.env,
            )
            states = {name: answer.facts.interface or "?" for name, answer in answers.items()}
            emit(StageFinished("prepare", time.monotonic() - began, states))
            yield World(inventory, tuple(nodes), connections, spec)
        finally:
            withdraw(inventory, nodes, connections, run, asked)


def _refuse(nodes: Sequence[Node], answers: Mapping[str, Answer], lacking: Mapping[str, str]) -> None:
    if lacking:
        said = f"{len(lacking)} of {len(nodes)} nodes cannot take part; nothing was started"
        raise PreflightError(said, reasons=lacking, hint="clusterctl deploy")
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
