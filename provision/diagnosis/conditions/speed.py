"""The run's speed, how busy the GPUs are and what they wait for, and what is about to run out.

nvidia-smi's "use" is the share of time in which any kernel ran, including NCCL's waiting kernels. So low use means
idle, but high use proves nothing (https://docs.nvidia.com/deploy/nvml-api/structnvmlUtilization__t.html).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from provision.diagnosis.conditions.rules import Limit, Rule, numbers, quantile, rates, steps
from provision.output_text import size

if TYPE_CHECKING:
    from provision.diagnosis.evidence import Evidence, Record


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


def _straggler(evidence: Evidence, _: Mapping[str, Limit]) -> Iterator[str]:
    for record in evidence.records:
        found = [event for event in record.events if event.get("event") == "straggler" and event.get("text")]
        if found and found[-1].get("state") == "slow":
            yield str(found[-1]["text"])
            yield from _stack(evidence, found[-1].get("rank"))


def _stack(evidence: Evidence, rank: object) -> Iterator[str]:
    """Where the agent of the rank's node last saw it."""
    events = [event for record in evidence.records for event in record.events if event.get("event") == "stack"]
    texts = [str(event["text"]) for event in events if event.get("rank") == rank and event.get("text")]
    yield from texts[-1:]


def _unexpected(evidence: Evidence, _limits: Mapping[str, Limit]) -> Iterator[str]:
    for record in evidence.records[:1]:
        yield from (text for key in ("slow", "full") if isinstance(text := record.state.get(key), str) and text)


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
        id="speed.straggler",
        title="The other ranks wait for one rank",
        look=_straggler,
        fix=(
            "run the named command on that node, and clusterctl check --limit NODE",
            "if nothing helps: clusterctl stop RUN --save, then clusterctl resume RUN --exclude NODE",
        ),
    ),
    Rule(
        id="speed.expected",
        title="The run as a whole is slower than expected, or holds more memory",
        look=_unexpected,
        fix=(
            "clusterctl check finds hot and throttled GPUs, other users' processes, lost links and swapping",
            "clusterctl report RUN GOOD lists what differs from a GOOD run: configuration, release, nodes",
            "clusterctl bench nccl compares pairs of nodes; one slow node or link slows every rank equally",
            "if the band was wrong: train --expected GOOD takes the measurement of a GOOD run, --expected none no band",
        ),
    ),
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


# --- the GPUs -------------------------------------------------------------------------------------

_SAMPLES = Limit(6, "samples, one every 10 s: a minute of training")
_BUSY = Limit(80, "per cent: a training that keeps its GPUs fed is above 90")
_PACKED = "packing: true and flash_attn: fa2, so that no padding is computed; bf16 instead of fp32"


def _mean_use(rows: list[Mapping[str, Any]]) -> float | None:
    use = numbers(rows, "use")
    return sum(use) / len(use) if use else None


def _low(record: Record, limits: Mapping[str, Limit]) -> dict[int, float]:
    """The GPUs of a node with low mean use, without unused GPUs."""
    if len(record.training) < limits["samples"].value:
        return {}
    found = {index: _mean_use(rows) for index, rows in record.gpus.items() if not _unused(rows)}
    return {index: use for index, use in found.items() if use is not None and use < limits["busy"].value}


def _unused(rows: list[Mapping[str, Any]]) -> bool:
    return max(numbers(rows, "use"), default=100) == 0 and max(numbers(rows, "memory"), default=1e12) < 1e9


def _network(record: Record, limits: Mapping[str, Limit]) -> tuple[str, float, float | None] | None:
    """The interface that is at its limit, its traffic and its capacity."""
    low: dict[int, float] | None = None  # the same for every interface, and slow to find
    for name, values in rates(record.training):
        if len(values) < limits["samples"].value:
            continue
        carried, can = median(values), record.links.get(name)
        if can and carried >= limits["link"].value * can:
            return name, carried, can
        if not can and carried >= limits["unknown"].value:
            low = _low(record, limits) if low is None else low
            if low:
                return name, carried, None
    return None


def _processors(record: Record, limits: Mapping[str, Limit]) -> float | None:
    """The number of cores that the run's ranks use, if the GPUs may wait for them; else None."""
    samples = [sample["cpu"] for sample in record.training if sample.get("cpu")]
    if len(samples) < limits["samples"].value:
        return None
    used = median(sum(each.values()) for each in samples)
    ranks = max(len(each) for each in samples)
    full = record.cores is not None and used >= limits["cores"].value * record.cores
    return used if full or used / ranks >= limits["rank"].value else None


def _bound_by_network(evidence: Evidence, limits: Mapping[str, Limit]) -> Iterator[str]:
    for record in evidence.records:
        if found := _network(record, limits):
            name, carried, can = found
            of = f" of the {size(can)}/s that the link can carry" if can else " while the GPUs wait"
            yield f"{record.node}: {name} carries {size(carried)}/s{of}"


def _bound_by_data(evidence: Evidence, limits: Mapping[str, Limit]) -> Iterator[str]:
    for record in evidence.records:
        low, used = _low(record, limits), _processors(record, limits)
        if low and used is not None and not _network(record, limits):
            of = f" of {record.cores}" if record.cores else ""
            yield f"{record.node}: {_list_low(low)}, while the ranks' processes keep {used:.1f}{of} cores busy"


def _idle(evidence: Evidence, limits: Mapping[str, Limit]) -> Iterator[str]:
    for record in evidence.records:
        low = _low(record, limits)
        if low and not _network(record, limits) and _processors(record, limits) is None:
            yield f"{record.node}: {_list_low(low)}"


def _list_low(low: Mapping[int, float]) -> str:
    use = sum(low.values()) / len(low)
    return f"GPU {','.join(map(str, sorted(low)))} {'is' if len(low) == 1 else 'are'} busy {use:.0f} % of the time"


def _partly_unused(evidence: Evidence, limits: Mapping[str, Limit]) -> Iterator[str]:
    for record in evidence.records:
        found = record.gpus
        unused = [index for index, rows in found.items() if len(rows) >= limits["samples"].value and _unused(rows)]
        if unused and len(unused) < len(found):
            names = ",".join(map(str, unused))
            yield f"{record.node}: GPU {names} {'is' if len(unused) == 1 else 'are'} not used at all"


def _full(evidence: Evidence, limits: Mapping[str, Limit]) -> Iterator[str]:
    for record in evidence.records:
        for index, rows in sorted(record.gpus.items()):
            parts = [
                row["memory"] / row["memory_total"] for row in rows if row.get("memory") and row.get("memory_total")
            ]
            if len(parts) >= limits["samples"].value and (full := quantile(parts, 0.9)) > limits["memory"].value / 100:
                yield f"{record.node}: the memory of GPU {index} is {full:.0%} full: one longer batch may not fit"


_NETWORK = {
    "samples": _SAMPLES,
    "busy": _BUSY,
    "link": Limit(0.8, "of the link's rate: TCP reaches at most 0.94 of it, and traffic comes in bursts"),
    "unknown": Limit(100e6, "bytes/s if the link's rate is unknown: a link of 1 Gbit/s carries 118e6"),
}
_CORES = {
    **_NETWORK,
    "cores": Limit(0.8, "of the node's cores: workers that do more wait for a core themselves"),
    "rank": Limit(1.5, "cores for each rank: a rank whose workers are idle uses about 1, for launching kernels"),
}

GPU_RULES = (
    Rule(
        id="gpu.memory",
        title="GPU memory is nearly full",
        look=_full,
        limits={"samples": _SAMPLES, "memory": Limit(95, "per cent: fragmentation and longer batches need some room")},
        fix=(
            (
                "gradient_checkpointing: true, or per_device_train_batch_size down and "
                "gradient_accumulation_steps up by the "
                "same factor, which does not change the training"
            ),
            "the next ZeRO stage, more nodes; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation",
        ),
    ),
    Rule(
        id="gpu.unused",
        title="A GPU is not used",
        look=_partly_unused,
        limits={"samples": _SAMPLES},
        fix=(
            (
                "start as many processes as GPUs: gpus: of that node in the inventory, or --gpus-per-node; check "
                "CUDA_VISIBLE_DEVICES in train.env"
            ),
        ),
    ),
    Rule(
        id="bound.network",
        title="The network is the bottleneck",
        look=_bound_by_network,
        limits=_NETWORK,
        fix=(
            (
                "clusterctl bench nccl --tune measures what the network can do, and sets NCCL_SOCKET_NTHREADS, "
                "NCCL_NSOCKS_PERTHREAD and NCCL_MIN_NCHANNELS (up to 4 times faster on sockets)"
            ),
            "use InfiniBand if there is one: the log must have NET/IB, not NET/Socket (clusterctl check: ib.state)",
            (
                "gradient_accumulation_steps up: gradients are sent once per step; ZeRO stage 2 instead of "
                "3 if it fits: stage 3 sends the parameters too"
            ),
            "a small model that fits on one node trains as fast on that node alone",
        ),
    ),
    Rule(
        id="bound.data",
        title="Loading the data is the bottleneck",
        look=_bound_by_data,
        limits=_CORES,
        fix=(
            "tokenize once before the training: tokenized_path in LLaMA-Factory; data on the node's own disk, not NFS",
            (
                "dataloader_num_workers: 4 to 8 per GPU, but not more than the node's cores in total; "
                "dataloader_pin_memory and dataloader_prefetch_factor: 2"
            ),
            "OMP_NUM_THREADS must not exceed cores / processes (clusterctl train sets it)",
        ),
    ),
    Rule(
        id="gpu.idle",
        title="The GPUs are not busy",
        look=_idle,
        limits=_CORES,
        fix=(
            (
                "per_device_train_batch_size up (and gradient_accumulation_steps down by the same "
                "factor) as far as memory "
                "allows"
            ),
            "dataloader_num_workers: 4 instead of 0: with 0 the rank itself loads the data while its GPU waits",
            "larger eval_steps, save_steps, logging_steps; offload to the CPU only if the model does not fit otherwise",
            _PACKED,
        ),
    ),
)
