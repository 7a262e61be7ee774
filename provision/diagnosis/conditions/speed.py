"""The run's speed compared with earlier steps, where its time is spent, and what is about to run out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from statistics import median
from typing import TYPE_CHECKING

from provision.diagnosis.conditions._rule import Limit, Rule, numbers, steps
from provision.output_text import size

if TYPE_CHECKING:
    from provision.diagnosis.evidence import Evidence


def _slower(evidence: Evidence, limits: Mapping[str, Limit]) -> Iterator[str]:
    found = [event for event in steps(evidence) if isinstance(event.get("time"), int | float)]
    paces = [
        (after["time"] - before["time"]) / (after["step"] - before["step"])
        for before, after in itertools.pairwise(found)
        if after["time"] > before["time"]
    ]
    if len(paces) < limits["points"].value:
        return
    part = len(paces) // 4
    before, now = median(paces[part : 2 * part]), median(paces[-part:])  # the first quarter warms up
    if now > limits["slower"].value * before:
        yield f"a step takes {now:.3g} s; earlier it took {before:.3g} s"


def _evaluates(evidence: Evidence, limits: Mapping[str, Limit]) -> Iterator[str]:
    for record in evidence.records[:1]:
        phases = [sample["phase"] for sample in record.samples if sample.get("phase")]
        busy = [phase for phase in phases if phase in {"training", "evaluating", "saving"}]
        for phase, what in (("evaluating", "evaluation"), ("saving", "saving")):
            part = busy.count(phase) / len(busy) if busy else 0
            if len(busy) >= limits["samples"].value and part > limits["part"].value:
                yield f"{what} takes {part:.0%} of the time"


def _host_memory(evidence: Evidence, limits: Mapping[str, Limit]) -> Iterator[str]:
    for record in evidence.records:
        last = record.samples[-int(limits["samples"].value) :]
        free, total = numbers(last, "memory_available"), numbers(last, "memory_total")
        if len(last) == limits["samples"].value and free and total and max(free) < limits["free"].value * total[-1]:
            yield f"{record.node}: {size(free[-1])} of the host's {size(total[-1])} of memory is left"


def _disk(evidence: Evidence, limits: Mapping[str, Limit]) -> Iterator[str]:
    for record in evidence.records:
        free = numbers(record.samples[-1:], "disk_free")
        if free and free[0] < limits["free"].value:
            yield f"{record.node}: {size(free[0])} is left on the run's disk"


RULES = (
    Rule(
        id="speed.slower",
        title="The run has become slower",
        look=_slower,
        limits={
            "points": Limit(40, "points of the log: ten in each quarter of the run"),
            "slower": Limit(1.3, "times a step of the second quarter; equal steps differ by a few per cent"),
        },
        fix=(
            "clusterctl check finds hot and throttled GPUs, other users' processes, lost links and swapping",
            "clusterctl bench nccl compares pairs of nodes and names the slow one",
            "longer examples later in the data are rightly slower: shuffle, or packing: true",
        ),
    ),
    Rule(
        id="speed.evaluates",
        title="Evaluation or saving takes much of the time",
        look=_evaluates,
        limits={
            "samples": Limit(30, "samples, one every 10 s: five minutes"),
            "part": Limit(0.25, "of the time: more is rarely worth it"),
        },
        fix=(
            "eval_steps and save_steps larger, a smaller val_size (or fewer eval_iters), per_device_eval_batch_size up",
            "save_only_model: true if you will not resume from these checkpoints; save to the node's own disk",
        ),
    ),
    Rule(
        id="host.memory",
        title="The host's memory is nearly full",
        look=_host_memory,
        limits={
            "samples": Limit(3, "samples in a row"),
            "free": Limit(0.05, "of all memory: below it the kernel starts to kill processes"),
        },
        fix=(
            "fewer data loader and preprocessing workers; no offloading to the CPU, or more nodes",
            "memory that grows from step to step is a leak in the script: log losses with .item()",
        ),
        leads=True,
    ),
    Rule(
        id="disk.low",
        title="The disk is nearly full",
        look=_disk,
        limits={"free": Limit(5e9, "bytes: less than a checkpoint of any model worth a cluster")},
        fix=(
            "save_total_limit: 2; clusterctl prune removes old releases; output_dir on a larger disk",
            "clusterctl resume RUN recognizes an incomplete checkpoint and skips it",
        ),
        leads=True,
    ),
)
