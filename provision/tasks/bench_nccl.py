"""``clusterctl bench nccl``: how fast the network between nodes is, who is slow, and which settings make it faster."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from provision.errors import NodesFailedError, UsageError
from provision.model import Emit, Inventory, Node, Notice, Progress, StageFinished, StageStarted
from provision.netbench import Row, rows
from provision.netbench.pairs import SIZE, Judgement, Pair, judge, rates, slow_pairs, tournament
from provision.netbench.tuning import Tuning
from provision.tasks.bench_nodes import World, network_used, silent, world
from provision.tasks.bench_tune import LOG, SECONDS, refuse_tuning
from provision.tasks.bench_tune import tune as tune_sockets

if TYPE_CHECKING:
    from provision.ssh.prompts import Prompts
    from provision.tasks.bench_nodes import Event

Backend = Literal["auto", "nccl", "gloo"]
_PAIR_SECONDS = 0.5
_AGAIN = 64  # slow pairs that are measured once more
_BUSY = 2 << 30  # bytes of a GPU's memory beyond which somebody works there; a context of its own takes less
_STAGE = "bench"


@dataclass(frozen=True)
class BenchResult:
    """What was measured. Bandwidths are bytes a second.

    Attributes:
        nodes: by rank.
        world_size: processes in all.
        backend: ``nccl`` or ``gloo``.
        network: what NCCL says it has used, such as ``TCP, eth0``; "" where it does not say.
        interfaces: by which the nodes reach rank 0.
        versions: of torch and NCCL, and the GPU's name, as the first rank said.
        rows: every operation in every size.
        skipped: operations that this torch cannot do, each with the reason.
        pairs: what each pair of nodes reached in each direction; empty when they were not measured.
        judgement: of the pairs.
        tuning: of the socket settings; None when they were not tried.
        seconds: how long all of it took.
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
        """Raise a NodesFailedError where results were not what they should be."""
        if bad := [row for row in self.rows if row.wrong]:
            said = ", ".join(f"{row.op} of {row.size} bytes ({row.wrong} elements)" for row in bad)
            raise NodesFailedError(
                f"wrong results: {said}",
                reasons={},
                hint="to find the node, measure fewer of them with --limit; then: clusterctl check --only gpu",
            )


def bench(
    inventory: Inventory,
    nodes: Sequence[Node],
    *,
    ops: Sequence[str],
    sizes: Sequence[int],
    backend: Backend = "auto",
    pairs: bool = False,
    tune: bool = False,
    prompts: Prompts | None = None,
    emit: Emit,
) -> BenchResult:
    """Measure the network between nodes. Leaves nothing on them.

    Args:
        inventory: the cluster; its ``train.env`` holds for the processes.
        nodes: in the order of their ranks.
        ops: the operations, of ``netbench.OPS``; none for none.
        sizes: of the operations, in bytes; pairs and tuning use the largest.
        backend: ``auto`` is nccl where every node has GPUs, else gloo.
        pairs: measure every pair of nodes as well.
        tune: look for NCCL's best socket settings as well.
        prompts: how to ask for a password or about a host key.
        emit: is told about the progress.

    Raises:
        UsageError: what was asked for makes no sense on these nodes.
        PreflightError: nodes that cannot take part.
        NodesFailedError: nodes that cannot be reached, or whose processes failed.
    """
    began = time.monotonic()
    if (pairs or tune) and len(nodes) < 2:
        raise UsageError(f"{'--pairs' if pairs else '--tune'} needs two nodes or more", hint="--nodes 2")
    with world(inventory, nodes, prompts=prompts, emit=emit) as ready:
        chosen = backend if backend != "auto" else "nccl" if ready.gpus else "gloo"
        if tune:
            refuse_tuning(ready, chosen)
        events: list[Event] = []
        if ops or pairs:
            events += _measure(ready, chosen, ops, sizes, pairs=pairs, emit=emit)
        names = [node.name for node in nodes]
        measured = rates(events, names)
        if slow := slow_pairs(measured)[:_AGAIN]:
            measured |= _alone(ready, chosen, slow, measured, sizes, emit)
        tuning = tune_sockets(ready, max(sizes), events, emit) if tune else None
    first = next((event for event in events if event["event"] == "ready" and event["rank"] == 0), {})
    return BenchResult(
        nodes=tuple(names),
        world_size=sum(ready.counts),
        backend=chosen,
        network=str(network_used(events) or ""),
        interfaces=ready.interfaces,
        versions={name: str(first[name]) for name in ("torch", "nccl", "device") if name in first},
        rows=rows(events),
        skipped={event["op"]: event["why"] for event in events if event["event"] == "skipped"},
        pairs=measured,
        judgement=judge(measured) if pairs else None,
        tuning=tuning,
        seconds=time.monotonic() - began,
    )


def _measure(
    ready: World, backend: str, ops: Sequence[str], sizes: Sequence[int], *, pairs: bool, emit: Emit
) -> list[Event]:
    """Operations and pairs, in one go."""
    began = time.monotonic()
    rounds = tournament(len(ready.nodes)) if pairs else []
    total = len(ops) * len(sizes) + sum(map(len, rounds))
    emit(StageStarted(_STAGE, "Measuring the network", total, "steps"))
    done = 0

    def on(event: Event) -> None:
        nonlocal done
        if event["event"] in {"row", "pair"} and not event.get("local"):
            done += 1
            emit(Progress(_STAGE, done, total, str(event.get("op", "pairs"))))
        elif event["event"] == "ready" and event["busy"] > _BUSY:
            text = f"rank {event['rank']}: {event['busy'] / 1e9:.1f} GB of its GPU are in use by others"
            emit(Notice(f"{text}; what is measured now is too low", "warning"))

    work = {
        "backend": backend,
        "ops": list(ops),
        "sizes": list(sizes),
        "seconds": SECONDS if ops else _PAIR_SECONDS,
        "rounds": rounds,
        "pair_size": min(max(sizes), SIZE),
    }
    events = ready.run(work, LOG, (), on)
    emit(StageFinished(_STAGE, time.monotonic() - began, {}))
    return events


def _alone(
    ready: World, backend: str, slow: Sequence[Pair], measured: Mapping[Pair, float], sizes: Sequence[int], emit: Emit
) -> dict[Pair, float]:
    """Slow pairs once more, one at a time: what others do meanwhile is not their fault. The better figure counts."""
    began = time.monotonic()
    emit(StageStarted("again", "Measuring slow pairs alone", len(slow), "steps"))
    names = [node.name for node in ready.nodes]
    work = {
        "backend": backend,
        "seconds": _PAIR_SECONDS,
        "rounds": [[[names.index(a), names.index(b)]] for a, b in slow],
        "pair_size": min(max(sizes), SIZE),
    }
    found = rates(ready.run(work, LOG, (), silent), names)
    emit(StageFinished("again", time.monotonic() - began, {}))
    return {pair: max(rate, measured[pair]) for pair, rate in found.items()}
