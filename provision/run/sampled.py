"""One sample of a node (``trainer/agent/sampling.py``), as screens show it. Pure: every value is checked and bounded.

Fields that an older agent does not write are None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from provision.masking import mask_words
from provision.output_text import clean
from trainer.agent.contract.throttle import slowing

GPUS = 64  # of a node
PORTS = 64  # network interfaces of a node, and as many InfiniBand ports
PROCESSES = 256  # on the GPUs of a node
WIDE = 400  # characters of a line


@dataclass(frozen=True)
class Gpu:
    """A GPU's last sample: percent, bytes, watts, degrees Celsius and MHz; None if the driver does not report it.

    ``throttle`` are the reasons that slow it down, the worst first (``trainer/agent/contract/throttle.py``).
    """

    index: int
    use: float | None = None
    memory: float | None = None
    memory_total: float | None = None
    power: float | None = None
    temperature: float | None = None
    clock: float | None = None
    clock_max: float | None = None
    throttle: tuple[str, ...] = ()

    @property
    def filled(self) -> float | None:
        """Percent of its memory in use."""
        return 100 * self.memory / self.memory_total if self.memory is not None and self.memory_total else None


@dataclass(frozen=True)
class Traffic:
    """Bytes per second of a network interface, or of an InfiniBand port such as ``mlx5_0/1``."""

    port: str
    received: float | None = None
    sent: float | None = None


@dataclass(frozen=True)
class Process:
    """A process on a GPU; ``gpu`` is the GPU's index, ``memory`` are bytes of it. Unknown values are None or empty."""

    pid: int
    gpu: int | None = None
    user: str = ""
    command: str = ""
    memory: float | None = None


def processes(sample: Mapping[str, Any]) -> tuple[Process, ...]:
    """The processes on the GPUs of a sample of ``trainer/agent/top.py``, without secrets. Skips invalid ones."""
    found = sample.get("users")
    ones = found[:PROCESSES] if isinstance(found, list) else ()
    return tuple(_process(one) for one in ones if isinstance(one, Mapping) and isinstance(one.get("pid"), int))


def _process(one: Mapping[str, Any]) -> Process:
    gpu, user, command = (one.get(name) for name in ("gpu", "user", "command"))
    return Process(
        one["pid"],
        gpu if isinstance(gpu, int) else None,
        short(user) if isinstance(user, str) else "",
        short(" ".join(mask_words(command.split()))) if isinstance(command, str) else "",
        finite(one.get("memory")),
    )


def gpus(sample: Mapping[str, Any]) -> tuple[Gpu, ...]:
    """The GPUs of a sample. Skips invalid ones."""
    found = sample.get("gpus")
    ones = found[:GPUS] if isinstance(found, list) else ()
    return tuple(_gpu(one, place) for place, one in enumerate(ones) if isinstance(one, Mapping))


def _gpu(sample: Mapping[str, Any], place: int) -> Gpu:
    index = sample.get("index")
    names = ("use", "memory", "memory_total", "power", "temperature", "clock", "clock_max")
    values = {name: finite(sample.get(name)) for name in names}
    return Gpu(index if isinstance(index, int) else place, **values, throttle=slowing(sample.get("throttle")))


def traffic(sample: Mapping[str, Any]) -> tuple[Traffic, ...]:
    """The interfaces and ports of a sample. Skips invalid ones."""
    kinds = (sample.get(key) for key in ("network", "infiniband"))
    rates = [pair for kind in kinds if isinstance(kind, Mapping) for pair in islice(kind.items(), PORTS)]
    return tuple(
        Traffic(_port(port), finite(rate.get("in")), finite(rate.get("out")))
        for port, rate in rates
        if isinstance(rate, Mapping)
    )


@lru_cache(maxsize=1024)  # the same few names are in every sample
def _port(name: str) -> str:
    return short(name)


def finite(value: Any) -> float | None:
    """A finite number from a sample; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def short(text: str) -> str:
    """A line from a node without control characters, and not too long."""
    return " ".join(clean(text[:4096]).split("\n"))[:WIDE]
