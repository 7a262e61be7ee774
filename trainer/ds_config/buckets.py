"""The size of gradient buckets.

An all-reduce in a ring of W ranks takes 2 (W - 1) steps, each with a latency that does not depend on its size. A bucket
is large enough when the latencies are less than a twentieth of its time. A larger one only costs memory: 2 bytes per
element, again during the reduction, and twice with ``overlap_comm``. A bucket is never less than hidden^2, the
Trainer's value for "auto" (transformers 5.6, ``integrations/deepspeed.py``), and never more than DeepSpeed's default.
"""

from __future__ import annotations

import math
from typing import Optional

DEFAULT = 500_000_000  # elements; deepspeed 0.19 runtime/zero/config.py
ORDINARY = 200_000_000  # if neither the link nor the model is known
LEAST = 5_000_000
_SHARE = 20
_FAST = 100.0  # GB/s; above it is NVLink
_LATENCY = (20e-6, 5e-6)  # seconds a step: through a network card, and through NVLink; estimates
_WORLD = 8


def reduce_elements(hidden: Optional[int], link: Optional[float], world: Optional[int]) -> int:
    """Elements of a bucket for a model of ``hidden``, over ``link`` GB/s, with ``world`` ranks; None if unknown."""
    if link is None:
        return ORDINARY if hidden is None else _bounded(max(ORDINARY // 4, hidden * hidden))
    steps = 2 * max((world or _WORLD) - 1, 1)
    waiting = steps * _LATENCY[link > _FAST]
    return _bounded(max(_SHARE * waiting * link * 1e9 / 2, (hidden or 0) ** 2))


def prefetch_elements(hidden: int) -> int:
    """Parameters that stage 3 fetches ahead: the Trainer's rule, 0.9 hidden^2."""
    return int(0.9 * hidden * hidden)


def persistence_elements(hidden: int) -> int:
    """Smaller parameters (biases, norms) stay on every GPU in stage 3: the Trainer's rule, 10 hidden."""
    return 10 * hidden


def _bounded(elements: float) -> int:
    """Round and limit a number of elements. It stays even: DeepSpeed needs this for ``allgather_bucket_size``."""
    bounded = min(max(elements, LEAST), DEFAULT)
    return min(math.ceil(bounded / 1e6) * 1_000_000, DEFAULT)
