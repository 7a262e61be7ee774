"""A run as a TensorBoard event file: its numbers by step, and the samples of its nodes. Pure.

A file is a sequence of records (TFRecord): the length in 8 bytes, its checksum, the data, its checksum. The data is an
``Event`` (tensorflow/core/util/event.proto) with a time, a step and tagged values. The checksums are CRC-32C, masked.
``trainer/agent/reader/scalars.py`` reads such files. TensorBoard itself needs gRPC, protobuf and NumPy to write one.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

from provision.report.data import RunData, Sample, is_finite, row_times
from trainer.agent.contract.throttle import LOWERS, slowing
from trainer.reader import Row

VERSION = "brain.Event:2"
SAMPLES = 20_000  # of all nodes together; of more, every second, third and so on is written
TAGS = {  # fields of a row; the first five are the names of transformers' and Lightning's users
    "loss": "train/loss",
    "lr": "train/learning_rate",
    "grad_norm": "train/grad_norm",
    "eval_loss": "eval/loss",
    "tokens_per_second": "throughput/tokens_per_second",
    "ms": "throughput/ms_per_step",
}
_GIB = 1 << 30
_MB = 1e6
_GPU = {  # fields of a GPU's sample: the tag's end, and its unit
    "use": ("utilisation", 1),
    "memory": ("memory_gib", _GIB),
    "power": ("power_watts", 1),
    "temperature": ("temperature_celsius", 1),
    "clock": ("sm_clock_mhz", 1),
}
_NODE = {"rss": ("processes_gib", _GIB), "load": ("load", 1), "disk_free": ("disk_free_gib", _GIB)}
_MOST = 256  # GPUs, ranks or interfaces of a node
_TAG = 300  # characters
_STEP = (1 << 63) - 1
_FLOAT = 3.4028234e38  # the largest float of four bytes

Values = Mapping[str, float]


class Moment(NamedTuple):
    """The values of one step or sample, by tag."""

    time: float
    step: int
    values: Values


def event_file(run: RunData) -> Iterator[bytes]:
    """The records of a run's event file."""
    yield record(_fixed64(1, run.began or 0.0) + _bytes(3, VERSION.encode()))
    for moment in moments(run):
        yield record(encode(moment))


def moments(run: RunData) -> Iterator[Moment]:
    """The steps in their order, then the samples of each node.

    Of steps that a run repeats after a restart, the last values count, as in ``clusterctl metrics``. A sample belongs
    to the last step of the run before it, whichever node has reported the step.
    """
    times = _without_gaps(row_times(run), run.began or 0.0)
    for row, time in zip(run.rows, times, strict=True):
        if values := _row_values(row):
            yield Moment(time, row.step, values)
    latest = list(accumulate(times, max))  # a clock may go back
    steps = [row.step for row in run.rows]
    by = -(-sum(len(node.samples) for node in run.nodes) // SAMPLES) or 1
    for node in run.nodes:
        yield from _samples(node.name, node.samples[::by], latest, steps)


def _row_values(row: Row) -> Values:
    known = row._asdict()
    return {tag: float(known[name]) for name, tag in TAGS.items() if known[name] is not None}


def _without_gaps(times: Sequence[float | None], start: float) -> list[float]:
    """Times of all steps: agents report at most two steps a second, and those between them are evenly spaced."""
    known = [(place, time) for place, time in enumerate(times) if time is not None]
    if not known:
        return [start] * len(times)
    found = [known[0][1]] * known[0][0]
    for (place, time), (later, then) in pairwise(known):
        count = later - place
        found += [time + (then - time) * offset / count for offset in range(count)]
    last, time = known[-1]
    return found + [time] * (len(times) - last)


def _samples(node: str, samples: Iterable[Sample], times: Sequence[float], steps: Sequence[int]) -> Iterator[Moment]:
    for sample in samples:
        values = {f"node/{node}/{end}": value for end, value in _sampled(sample.fields)}
        if values:
            place = bisect.bisect_right(times, sample.time)
            yield Moment(sample.time, steps[place - 1] if place else 0, values)


def _sampled(fields: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The values of a sample (``trainer/agent/metrics.py``), by the end of their tags."""
    for gpu in _gpus(fields):
        if isinstance(gpu.get("index"), int):
            yield from _scaled(f"gpu{gpu['index']}/", _GPU, gpu)
    yield from _slowed(fields)
    total, free = fields.get("memory_total"), fields.get("memory_available")
    if total is not None and free is not None and is_finite(total) and is_finite(free):
        yield "memory_gib", (total - free) / _GIB
    yield from _scaled("", _NODE, fields)
    for rank, cores in _items(fields.get("cpu")):
        if is_finite(cores):
            yield f"rank{rank}/cores", float(cores)
    for kind in ("network", "infiniband"):
        for name, rates in _items(fields.get(kind)):
            for way in ("in", "out"):
                if isinstance(rates, dict) and is_finite(rates.get(way)):
                    yield f"{kind}/{name}/{way}_mb_per_second", rates[way] / _MB


def _gpus(fields: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    gpus = fields.get("gpus")
    return [gpu for gpu in gpus[:_MOST] if isinstance(gpu, dict)] if isinstance(gpus, list) else []


def _slowed(fields: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """How many GPUs each reason slows down."""
    throttles = [each for gpu in _gpus(fields) if isinstance(each := gpu.get("throttle"), list)]
    for reason in LOWERS if throttles else ():
        yield f"gpus_slowed_down/{reason}", float(sum(reason in slowing(each) for each in throttles))


def _scaled(
    start: str, named: Mapping[str, tuple[str, float]], fields: Mapping[str, Any]
) -> Iterator[tuple[str, float]]:
    for name, (end, unit) in named.items():
        if is_finite(fields.get(name)):
            yield start + end, fields[name] / unit


def _items(value: object) -> Iterable[tuple[Any, Any]]:
    return islice(value.items(), _MOST) if isinstance(value, dict) else ()


def encode(moment: Moment) -> bytes:
    """An ``Event`` with scalars. As the format has four bytes for a value, larger ones become infinite."""
    summary = b"".join(
        _bytes(1, _bytes(1, tag[:_TAG].encode("utf-8", "replace")) + b"\x15" + struct.pack("<f", _float(value)))
        for tag, value in moment.values.items()
    )
    step = min(max(0, moment.step), _STEP)
    return _fixed64(1, moment.time) + (b"\x10" + _varint(step) if step else b"") + _bytes(5, summary)


def record(data: bytes) -> bytes:
    """A record with its checksums."""
    size = struct.pack("<Q", len(data))
    return b"".join((size, _checksum(size), data, _checksum(data)))


def _float(value: float) -> float:
    return value if not abs(value) > _FLOAT else value * float("inf")


def _fixed64(field: int, value: float) -> bytes:
    return bytes([field << 3 | 1]) + struct.pack("<d", value)


def _bytes(field: int, data: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


@cache
def _table() -> tuple[int, ...]:
    """The remainders of the Castagnoli polynomial, bits reversed (RFC 3720)."""
    found = list(range(256))
    for _ in range(8):
        found = [value >> 1 ^ (0x82F63B78 if value & 1 else 0) for value in found]
    return tuple(found)


def _checksum(data: bytes) -> bytes:
    table, value = _table(), 0xFFFFFFFF
    for byte in data:
        value = table[(value ^ byte) & 255] ^ value >> 8
    value ^= 0xFFFFFFFF
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)
