"""``clusterctl bench nccl``: how fast the network between nodes is, who is slow, and which settings make it faster.

``trainer/network`` is sent to the nodes, measures there, and is removed again.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from provision import launchers
from provision.errors import ClusterctlError, NodesFailedError, PreflightError, UsageError
from provision.inventory.writing import with_env
from provision.model import Inventory, Node
from provision.netbench import (
    PAIR_SIZE,
    VARIABLES,
    Judgement,
    Pair,
    Row,
    Setting,
    Tuning,
    failed_stage,
    failure_reason,
    judge_pairs,
    pair_rates,
    parse_event,
    rows,
    search_settings,
    slow_pairs,
    tournament,
)
from provision.render import quote
from provision.run import RunFiles, RunSpec, Worker, new_run_id, readiness
from provision.run.files import sources
from provision.run.found import Used, read_network
from provision.tasks.gate import Answer, prepare, remove_folders, unreachable
from provision.tasks.runs import run_folder

if TYPE_CHECKING:
    from provision.session import Session

Backend = Literal["auto", "nccl", "gloo"]
LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}  # makes NCCL print which network it uses
SECONDS = 1.0  # for each operation in each size
_PAIR_SECONDS = 0.5
_AGAIN = 64  # slow pairs that are measured again
_BUSY = 2 << 30  # bytes of a GPU's memory beyond which other processes use it; the measurement's own take less
_TIMEOUT = 120.0  # seconds for one operation, and for all nodes to come together
_DEADLINE = 6 * 3600.0  # seconds for one measurement, which ends long before
_NAME = "bench"  # in the id
_UNWANTED = ("NCCL_DEBUG_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT")  # output comes through the pipe, and no file stays

Event = Mapping[str, Any]
OnEvent = Callable[[Event], None]


@dataclass(frozen=True)
class BenchOptions:
    """The options of a measurement.

    Attributes:
        ops: the operations, of ``netbench.OPS``; none for none.
        sizes: of the operations, in bytes; pairs and tuning use the largest.
        backend: ``auto`` is nccl if every node has GPUs, else gloo.
        pairs: measure every pair of nodes as well.
        tune: look for NCCL's best socket settings as well.
    """

    ops: Sequence[str]
    sizes: Sequence[int]
    backend: Backend = "auto"
    pairs: bool = False
    tune: bool = False


@dataclass(frozen=True)
class BenchResult:
    """The result of a measurement. Bandwidths are bytes per second.

    Attributes:
        nodes: by rank.
        world_size: processes in all.
        backend: ``nccl`` or ``gloo``.
        network: what NCCL used, such as ``TCP, eth0``; empty if it did not say.
        interfaces: by which the nodes reach rank 0.
        versions: of torch and NCCL, and the GPU's name, as the first rank reports them.
        rows: every operation in every size.
        skipped: operations that this torch lacks, each with the reason.
        pairs: the bandwidth of each pair of nodes in each direction; empty if not measured.
        judgement: of the pairs.
        tuning: of the socket settings; None if not tried.
        seconds: how long it took.
    """

    nodes: tuple[str, ...]
    world_size: int
    backend: str
    network: str
    interfaces: str
    versions: Mapping[str, str]
    rows: tuple[Row, ...]
    skipped: Mapping[str, str]
    pairs: Mapping[Pair, float]
    judgement: Judgement | None
    tuning: Tuning | None
    seconds: float

    def raise_wrong(self) -> None:
        """Raise a NodesFailedError if results are wrong."""
        if bad := [row for row in self.rows if row.wrong]:
            rows_text = ", ".join(f"{row.op} of {row.size} bytes ({row.wrong} elements)" for row in bad)
            raise NodesFailedError(
                f"wrong results: {rows_text}",
                reasons={},
                hint="to find the node, measure fewer of them with --limit; then: clusterctl check --only gpu",
            )


def bench(session: Session, options: BenchOptions) -> BenchResult:
    """Measure the network between nodes. Leaves nothing on them.

    The inventory's ``train.env`` applies to the processes.

    Raises:
        UsageError: the options make no sense on these nodes.
        PreflightError: nodes cannot take part.
        NodesFailedError: nodes do not answer, or their processes failed.
    """
    sizes = options.sizes
    if (options.pairs or options.tune) and len(session.nodes) < 2:
        raise UsageError(f"{'--pairs' if options.pairs else '--tune'} needs two nodes or more", hint="--nodes 2")
    with world(session) as ready:
        backend = options.backend if options.backend != "auto" else "nccl" if ready.gpus else "gloo"
        if options.tune:
            _refuse_tuning(ready, backend)
        events: list[Event] = []
        if options.ops or options.pairs:
            events += _measure(ready, backend, options)
        names = [node.name for node in session.nodes]
        measured = pair_rates(events, names)
        if slow := slow_pairs(measured)[:_AGAIN]:
            measured |= _alone(ready, backend, slow, measured, sizes)
        tuning = None
        if options.tune:
            tuning, first_events = _tune(ready, max(sizes))
            events += first_events
    first = next((event for event in events if event["event"] == "ready" and event["rank"] == 0), {})
    return BenchResult(
        nodes=tuple(names),
        world_size=sum(ready.counts),
        backend=backend,
        network=str(network_used(events) or ""),
        interfaces=ready.interfaces,
        versions={name: str(first[name]) for name in ("torch", "nccl", "device") if name in first},
        rows=rows(events),
        skipped={event["op"]: event["why"] for event in events if event["event"] == "skipped"},
        pairs=measured,
        judgement=judge_pairs(measured) if options.pairs else None,
        tuning=tuning,
        seconds=sum(session.seconds.values()),
    )


def _measure(ready: World, backend: str, options: BenchOptions) -> list[Event]:
    """Operations and pairs, in one measurement."""
    rounds = tournament(len(ready.nodes)) if options.pairs else []
    total = len(options.ops) * len(options.sizes) + sum(map(len, rounds))
    done = 0

    def on(event: Event) -> None:
        nonlocal done
        if event["event"] in {"row", "pair"} and not event.get("local"):
            done += 1
            shown.progress(done, str(event.get("op", "pairs")))
        elif event["event"] == "ready" and event["busy"] > _BUSY:
            text = f"rank {event['rank']}: other processes use {event['busy'] / 1e9:.1f} GB of its GPU"
            ready.session.warn(f"{text}; these figures are too low")

    work = {
        "backend": backend,
        "ops": list(options.ops),
        "sizes": list(options.sizes),
        "seconds": SECONDS if options.ops else _PAIR_SECONDS,
        "rounds": rounds,
        "pair_size": min(max(options.sizes), PAIR_SIZE),
    }
    with ready.session.stage("bench", "Measuring the network", total, "steps") as shown:
        return ready.run(work, LOG, on=on)


def _alone(
    ready: World, backend: str, slow: Sequence[Pair], measured: Mapping[Pair, float], sizes: Sequence[int]
) -> dict[Pair, float]:
    """Measure slow pairs again, one at a time, without the other pairs' traffic. The better figure counts."""
    names = [node.name for node in ready.nodes]
    work = {
        "backend": backend,
        "seconds": _PAIR_SECONDS,
        "rounds": [[[names.index(a), names.index(b)]] for a, b in slow],
        "pair_size": min(max(sizes), PAIR_SIZE),
    }
    with ready.session.stage("again", "Measuring slow pairs alone", len(slow), "steps"):
        found = pair_rates(ready.run(work, LOG), names)
    return {pair: max(rate, measured[pair]) for pair, rate in found.items()}


def write_tuning(inventory: Inventory, tuning: Tuning) -> bool:
    """Write the best settings into the inventory's ``train.env``, in one rename. Returns whether that changed it.

    Raises:
        UsageError: the file cannot be edited; the hint has the lines.
    """
    if not tuning.worth_it:
        return False
    path = inventory.path.resolve()
    before = path.read_bytes().decode("utf-8")
    env = tuning.best.env
    after = with_env(before, env, without=frozenset(VARIABLES) - env.keys())
    if after == before:
        return False
    handle, fresh = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(after.encode("utf-8"))
            os.fchmod(file.fileno(), path.stat().st_mode & 0o7777)
            os.fsync(file.fileno())
        Path(fresh).replace(path)
    except BaseException:
        Path(fresh).unlink(missing_ok=True)
        raise
    return True


def _refuse_tuning(ready: World, backend: str) -> None:
    """Refuse to tune if NCCL's socket settings change nothing.

    Raises:
        UsageError: there is no NCCL, or it does not use sockets.
    """
    if backend != "nccl":
        raise UsageError(
            "--tune is about NCCL's sockets, and without GPUs on every node gloo is used, which has no such settings",
            hint="to measure it without --tune: clusterctl bench nccl",
        )
    if ready.rdma:
        raise UsageError(
            "--tune is about NCCL's sockets, and InfiniBand or RoCE is active on every node: NCCL sends nothing but "
            "its first words over sockets there",
            hint="to tune sockets anyway, set NCCL_IB_DISABLE: 1 in train.env; to measure without --tune: "
            "clusterctl bench nccl",
        )


def _tune(ready: World, size: int) -> tuple[Tuning, list[Event]]:
    """Try settings, each in new processes, by an all-reduce of ``size`` bytes.

    Returns:
        The settings, and the events of the first measurement without its row.

    Raises:
        UsageError: NCCL uses another network than sockets.
        NodesFailedError: a node died, or not even NCCL's defaults work.
    """
    session = ready.session
    work: dict[str, Any] = {"backend": "nccl", "ops": ["all_reduce"], "sizes": [size], "seconds": SECONDS}
    tried: list[float] = []
    failures: list[MeasureFailedError] = []
    first: list[Event] = []

    def measure(setting: Setting) -> float | None:
        try:
            events = ready.run(work, {**LOG, **setting.env}, [name for name in VARIABLES if name not in setting.env])
        except MeasureFailedError as error:
            failures.append(error)
            session.warn(f"{setting}: {next(iter(error.reasons.values()), error)}")
            return None
        if not tried:
            if (used := network_used(events)) and used.kind != "TCP":
                raise UsageError(
                    f"--tune is about NCCL's sockets, and NCCL uses another network here: {used}",
                    hint="to measure it without --tune: clusterctl bench nccl",
                )
            first.extend(event for event in events if event["event"] != "row")
        (row,) = rows(events)
        tried.append(row.busbw)
        shown.progress(len(tried), f"{row.busbw / 1e9:.1f} GB/s with {setting}")
        return 0.0 if row.wrong else row.busbw

    with session.stage("tune", "Trying NCCL's socket settings", None, "steps") as shown:
        try:
            return search_settings(measure, Setting.of(ready.session.inventory.train.env)), first
        except ValueError as error:
            raise failures[0] if failures else NodesFailedError(str(error), reasons={}) from error


# --- the nodes ------------------------------------------------------------------------------------


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

    def run(
        self, work: Mapping[str, Any], env: Mapping[str, str], unset: Sequence[str] = (), on: OnEvent | None = None
    ) -> list[Event]:
        """One measurement, in new processes on every node.

        Args:
            work: see ``trainer/network/measure.py``.
            env: over the environment of a training run.
            unset: variables to remove from it.
            on: receives every event, from other threads but one at a time; None: the events are only returned.

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
        self, world: World, work: Mapping[str, Any], env: Mapping[str, str], unset: Sequence[str], on: OnEvent | None
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
            "env": {**launchers.first_environment(spec, index), **self._env},
            "unset": [*launchers.UNSET, *_UNWANTED, *self._unset],
            "timeout": _TIMEOUT,
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
            if self._on:
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
