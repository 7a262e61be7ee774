"""How long a step takes: arithmetic, what the network adds to it, and the optimizer.

A pass is matrix products at ``Training.efficiency`` of the card's peak, and what lies between them, at the speed of its
memory: torch without a compiler reads and writes each activation that is kept about eight times. Below all of it is the
time that Python takes to start a block's kernels. The figures were fitted to measured.json's points: about a hundred
options of three models on H200s (docs/benchmarks.md has a table); other estimates say so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Tuple

from trainer.plan.activations import kept, logits
from trainer.plan.memory import weight_bytes
from trainer.plan.wish import Cluster, Setup, Training, accumulation

_MOVED = 8.0  # times that each byte of ``kept`` and ``logits`` is read or written, forward and backward; fitted
# Seconds of a block, forward and backward, however small the batch: the time to start its kernels. A block of
# transformers' models has more of them than one of a lean GPT. Checkpointing, and DeepSpeed's hooks from stage 2 on,
# come on top. Fitted; another machine's processor may take twice as long (docs/benchmarks.md).
_START = {"own": 1.3e-3, "trainer": 2.3e-3}
_START_AGAIN = {"own": 1.9e-3, "trainer": 3.0e-3}
_HOOKS = {"own": (0.0, 0.0, 0.9e-3, 9.4e-3), "trainer": (0.0, 0.0, 2.1e-3, 14e-3)}
_HOOKS_AGAIN = {"own": 3.6e-3, "trainer": 10e-3}  # of stage 3, which fetches parameters once more
_ADAM = 34  # bytes a parameter that a fused Adam reads and writes
_ADAM_WHOLE = 320  # and that of DeepSpeed's stage 0 in 16 bits, tensor by tensor: as if it were so many; fitted
_CONTENTION = 0.2  # of a hidden collective's time: its kernels take processors and bandwidth; an estimate
_DEQUANTIZING = 0.7  # of the speed of 16-bit weights, with 4-bit ones: an estimate
_CPU_ADAM = 4e9  # parameters a second and node; ZeRO-Offload, arXiv 2101.06840, table 4: 1 B in 0.22 s, 10 B in 2.57 s
_PCIE = 20e9  # bytes a second between a GPU and its host's pinned memory; an estimate, for 16 lanes of generation 4
_NVME = 5e9  # bytes a second of a node's fast disks; an estimate


@dataclass(frozen=True)
class Speed:
    """An optimizer step.

    Attributes:
        compute: seconds of arithmetic, on every GPU.
        waiting: seconds of communication that nothing hides.
        optimizer: seconds of the optimizer, with what it moves between GPU and host.
        volume: bytes that each GPU sends in the step's collectives.
        network: bytes that leave each node; 0 with one node.
        tokens: a second, all GPUs together.
        mfu: the model's own arithmetic, as a part of all peaks.
    """

    compute: float
    waiting: float
    optimizer: float
    volume: float
    network: float
    tokens: float
    mfu: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.compute + self.waiting + self.optimizer


def volumes(training: Training, cluster: Cluster, setup: Setup) -> Tuple[float, float]:
    """Bytes each GPU sends in every pass, and once a step.

    Of a collective among W ranks (W - 1) / W of the data passes each link, of an all-reduce twice that. DeepSpeed 0.19
    all-reduces its buckets in stages 1 and 2 too (``use_multi_rank_bucket_allreduce``), stage 2 in every pass, and then
    gathers the new weights. Stage 3 gathers the weights for the forward and for the backward pass, and scatters
    gradients: 3 (arXiv 1910.02054, section 7).
    """
    ring = (cluster.world - 1) / cluster.world
    gradients = 2.0 * training.trained * ring
    if setup.stage == 3:
        return 2 * weight_bytes(training) * ring + gradients, 0.0
    if setup.stage == 2:
        return 2 * gradients, gradients
    return 0.0, 2 * gradients + (gradients if setup.stage else 0.0)


def speed(training: Training, cluster: Cluster, setup: Setup) -> Speed:
    """The step of a setup. ``micro_batch`` has to divide the global batch."""
    passes = accumulation(training, cluster, setup)
    one = _pass(training, cluster, setup)
    each, once = volumes(training, cluster, setup)
    bus = cluster.bus * 1e9
    # The backward pass is two thirds of the time. Stage 3 fetches ahead in both.
    hidden = one if setup.stage == 3 else one * 2 / 3 if setup.overlap else 0.0
    gathering = once / 3 if setup.stage == 1 else once if setup.stage == 2 else 0.0
    waiting = passes * _shown(each / bus, hidden) + _shown((once - gathering) / bus, hidden) + gathering / bus
    compute = passes * one
    optimizer = _optimizer(training, cluster, setup, passes)
    seconds = compute + waiting + optimizer
    tokens = training.tokens / seconds
    model = (2 if training.adapters else 3) * training.shape.flops(training.seq)
    volume = passes * each + once
    return Speed(
        compute,
        waiting,
        optimizer,
        volume,
        volume if cluster.nodes > 1 else 0.0,
        tokens,
        model * tokens / (cluster.world * cluster.gpu.tflops * 1e12),
    )


def _shown(seconds: float, hidden: float) -> float:
    """What of a collective adds to the step, when ``hidden`` seconds of arithmetic can go on meanwhile."""
    return max(0.0, seconds - hidden) + _CONTENTION * min(seconds, hidden)


def _pass(training: Training, cluster: Cluster, setup: Setup) -> float:
    """Seconds of a forward and a backward pass.

    Arithmetic and the start of kernels run beside each other, the longer hides most of the shorter: the root of the sum
    of squares fits what was measured between the two.
    """
    return math.hypot(_arithmetic(training, cluster, setup), training.shape.layers * _start(training, setup))


def _arithmetic(training: Training, cluster: Cluster, setup: Setup) -> float:
    """Seconds of all kernels of a pass. With adapters frozen weights get no gradients, which saves a third."""
    tokens = setup.micro_batch * training.seq
    whole, head = training.shape.flops(training.seq), training.shape.head_flops
    again = (whole - head) if setup.checkpointing else 0.0  # the loss is not computed again
    flops = tokens * ((2 if training.adapters else 3) * whole + again)
    peak = cluster.gpu.tflops * 1e12 * training.efficiency * (_DEQUANTIZING if training.method == "qlora" else 1)
    moved = _MOVED * (kept(training, setup.with_(checkpointing=False)) + logits(training, setup))
    return flops / peak + moved / (cluster.gpu.bandwidth * 1e9)


def _start(training: Training, setup: Setup) -> float:
    """Seconds of a block before any arithmetic."""
    seconds = _START[training.program] + _HOOKS[training.program][setup.stage]
    if setup.checkpointing:
        seconds += _START_AGAIN[training.program] + (_HOOKS_AGAIN[training.program] if setup.stage == 3 else 0.0)
    return seconds


def _optimizer(training: Training, cluster: Cluster, setup: Setup, passes: int) -> float:
    """Seconds of Adam: on the GPU what it reads and writes, on the host its arithmetic and the way there and back."""
    share = training.trained / (cluster.world if setup.stage else 1)
    moved = passes * 2 * weight_bytes(training) / cluster.world if setup.parameters_at != "gpu" else 0.0
    seconds = moved / _PCIE
    if setup.parameters_at == "nvme":
        seconds += passes * 2 * weight_bytes(training) / cluster.nodes / _NVME
    if setup.optimizer_at == "gpu":
        return seconds + (_ADAM if setup.stage else _ADAM_WHOLE) * share / (cluster.gpu.bandwidth * 1e9)
    seconds += (passes + 1) * 2 * share / _PCIE + training.trained / cluster.nodes / _CPU_ADAM
    if setup.optimizer_at == "nvme":
        seconds += 2 * 12 * training.trained / cluster.nodes / _NVME
    return seconds
