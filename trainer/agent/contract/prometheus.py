"""The samples of runs as Prometheus text, format 0.0.4: what ``metrics --prometheus`` and the agents' textfile contain.

Every metric is a gauge in the base units that Prometheus asks for: seconds, bytes, ratios. Each has the labels ``run``
and ``node``; ``gpu``, ``reason``, ``rank``, ``interface``, ``port`` or ``bound`` distinguish several values of a node.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Sequence, Tuple

from .expected import read as read_expected
from .throttle import REASONS

PREFIX = "clusterctl_"
MOST = 4096  # values of one metric of one node
_LABEL = 200  # characters of a label's value

Labels = Tuple[Tuple[str, str], ...]


class Source(NamedTuple):
    """A run on one node: whether its agent is running, and its newest sample (``trainer/agent/sampling.py``).

    The sample of rank 0's node also has ``expected`` (``expected.py``).
    """

    run: str
    node: str
    active: bool
    sample: Mapping[str, Any]


class Gauge(NamedTuple):
    """A metric: its name without the prefix, its help, its field of the sample, and the factor to the base unit."""

    name: str
    help: str
    field: str
    factor: float = 1


PLAIN = (
    Gauge("sample_timestamp_seconds", "Time of the sample, in seconds since the epoch.", "time"),
    Gauge("attempt", "Number of the attempt; above 1 after a restart.", "attempt"),
    Gauge("step", "Last step that the trainer reported.", "step"),
    Gauge("last_step", "Number of the last step of the training.", "total"),
    Gauge("epoch", "Epoch that the trainer reported.", "epoch"),
    Gauge("loss", "Training loss.", "loss"),
    Gauge("eval_loss", "Loss of the evaluation.", "eval_loss"),
    Gauge("learning_rate", "Learning rate.", "lr"),
    Gauge("grad_norm", "Norm of the gradient.", "grad_norm"),
    Gauge("step_duration_seconds", "Duration of one step.", "ms", 1e-3),
    Gauge("tokens_per_second", "Tokens per second of all ranks.", "tokens_per_second"),
    Gauge("memory_available_bytes", "Memory of the node that programs can still use.", "memory_available"),
    Gauge("memory_size_bytes", "Memory of the node.", "memory_total"),
    Gauge("processes_resident_bytes", "Memory of the run's processes on the node, without shared files.", "rss"),
    Gauge("load1", "Load average of the node over one minute.", "load"),
    Gauge("disk_free_bytes", "Free bytes on the disk of the run's folder.", "disk_free"),
)
GPU = (
    Gauge("gpu_utilization_ratio", "Share of the time in which a kernel was running on the GPU.", "use", 1e-2),
    Gauge("gpu_memory_used_bytes", "Used memory of the GPU.", "memory"),
    Gauge("gpu_memory_size_bytes", "Memory of the GPU.", "memory_total"),
    Gauge("gpu_power_watts", "Power that the GPU draws.", "power"),
    Gauge("gpu_temperature_celsius", "Temperature of the GPU.", "temperature"),
    Gauge("gpu_sm_clock_hertz", "Clock of the GPU's multiprocessors.", "clock", 1e6),
    Gauge("gpu_sm_clock_max_hertz", "Highest clock of the GPU's multiprocessors.", "clock_max", 1e6),
)
THROTTLE = Gauge("gpu_throttle_reason", "1 while the reason lowers the clock of the GPU, else 0.", "throttle")
CORES = Gauge("rank_cpu_cores", "Processor time of a rank with its workers; 1.5 is one and a half cores.", "cpu")
TRAFFIC = tuple(
    (Gauge("%s_%s_bytes_per_second" % (kind, name), "Bytes per second %s the %s." % (words, what), way), kind, label)
    for kind, label, what in (("network", "interface", "interface"), ("infiniband", "port", "InfiniBand port"))
    for name, words, way in (("receive", "into", "in"), ("transmit", "out of", "out"))
)
EXPECTED = (
    Gauge("expected_step_duration_seconds", "Expected duration of one step.", "step_seconds"),
    Gauge("expected_tokens_per_second", "Expected tokens per second of all ranks.", "tokens_per_second"),
    Gauge("expected_gpu_memory_used_bytes", "Expected used memory of the fullest GPU.", "memory_bytes"),
)
ACTIVE = Gauge("run_active", "1 while the run's agent is running on the node, 0 after the run's end.", "")
_ALL = (ACTIVE, *PLAIN, *EXPECTED, *GPU, THROTTLE, CORES, *(each[0] for each in TRAFFIC))
NAMES = tuple(PREFIX + gauge.name for gauge in _ALL)


def exposition(sources: Sequence[Source]) -> str:
    """The text, with the values of each metric together. Invalid values of a sample are omitted."""
    found: Dict[Gauge, List[str]] = {}
    for source in sources:
        base: Labels = (("run", source.run), ("node", source.node))
        for gauge, more, value in _values(source):
            lines = found.setdefault(gauge, [])
            lines.append("%s%s{%s} %s\n" % (PREFIX, gauge.name, _labels(base + more), _number(value)))
    return "".join(
        "# HELP {0}{1} {2}\n# TYPE {0}{1} gauge\n{3}".format(PREFIX, gauge.name, gauge.help, "".join(lines))
        for gauge, lines in found.items()
    )


def _values(source: Source) -> Iterator[Tuple[Gauge, Labels, float]]:
    sample = source.sample
    yield ACTIVE, (), int(source.active)
    yield from _read(PLAIN, (), sample)
    yield from _band(sample.get("expected"))
    for gpu in _bounded(sample.get("gpus") or ()):
        if isinstance(gpu, Mapping) and _valid(gpu.get("index")):
            index = ("gpu", str(gpu["index"]))
            yield from _read(GPU, (index,), gpu)
            throttle = gpu.get(THROTTLE.field)
            if isinstance(throttle, list):
                yield from ((THROTTLE, (index, ("reason", name)), int(name in throttle)) for name in REASONS)
    for rank, cores in _bounded(_items(sample.get("cpu"))):
        if _valid(cores):
            yield CORES, (("rank", str(rank)),), cores
    for gauge, kind, label in TRAFFIC:
        for name, rates in _bounded(_items(sample.get(kind))):
            if isinstance(rates, Mapping):
                yield from _read((gauge,), ((label, str(name)),), rates)


def _band(expected: Any) -> Iterator[Tuple[Gauge, Labels, float]]:
    band = read_expected(expected)
    for gauge in EXPECTED if band else ():
        for bound, value in zip(("low", "high"), getattr(band, gauge.field) or ()):  # noqa: B905 - Python 3.8
            yield gauge, (("bound", bound),), value


def _read(gauges: Iterable[Gauge], labels: Labels, values: Mapping[str, Any]) -> Iterator[Tuple[Gauge, Labels, float]]:
    for gauge in gauges:
        value: Any = values.get(gauge.field)
        if _valid(value):
            yield gauge, labels, value if gauge.factor == 1 else round(value * gauge.factor, 9)


def _items(value: Any) -> Iterable[Tuple[Any, Any]]:
    return value.items() if isinstance(value, Mapping) else ()


def _bounded(values: Iterable[Any]) -> Iterator[Any]:
    for _, value in zip(range(MOST), values):  # noqa: B905 - Python 3.8
        yield value


def _valid(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: float) -> str:
    if isinstance(value, int) or math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _labels(labels: Labels) -> str:
    return ",".join('%s="%s"' % (name, _escaped(value)) for name, value in labels)


def _escaped(value: str) -> str:
    """A label's value: backslashes, quotes and line breaks are escaped, and what is not UTF-8 is replaced."""
    text = value[:_LABEL].encode("utf-8", "replace").decode("utf-8")
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
