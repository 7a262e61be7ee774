"""How long a step takes: arithmetic, exposed communication, and the optimizer.

A pass consists of matrix products, at ``Training.efficiency`` of the card's peak, and the operations between them, at
the speed of its memory: torch without a compiler reads and writes each kept activation about eight times. The lower
limit is the time that Python takes to launch a block's kernels. The constants are fitted to the points of
measured.json: about a hundred options of three models on H200s (docs/benchmarks.md has a table). Other estimates are
marked as such.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Tuple

from trainer.plan.inputs import Cluster, Setup, Training, accumulation
from trainer.plan.memory import kept_bytes, logits, weight_bytes

_MOVED = 8.0  # reads and writes of each byte of ``kept_bytes`` and ``logits``, forward and backward; fitted
# Seconds to launch the kernels of a block, forward and backward, for any batch. A block of transformers' models has
# more kernels than one of a lean GPT. Checkpointing, and DeepSpeed's hooks from stage 2 on, add to it. Fitted; another
# machine's processor may take twice as long (docs/benchmarks.md).
_START = {"own": 1.3e-3, "trainer": 2.3e-3}
_START_AGAIN = {"own": 1.9e-3, "trainer": 3.0e-3}
_HOOKS = {"own": (0.0, 0.0, 0.9e-3, 9.4e-3), "trainer": (0.0, 0.0, 2.1e-3, 14e-3)}
_HOOKS_AGAIN = {"own": 3.6e-3, "trainer": 10e-3}  # of stage 3, which fetches parameters again
_ADAM = 34  # bytes a parameter that a fused Adam reads and writes
_COPIED = 12  # bytes a wide parameter that autocast reads and writes per pass: to 16 bits, and the gradient to 32
_ADAM_WHOLE = 320  # the equivalent for DeepSpeed's 16-bit stage 0, which works tensor by tensor; fitted
_CONTENTION = 0.2  # fraction of an overlapped collective's time, for its use of processors and bandwidth; an estimate
_DEQUANTIZING = 0.7  # speed with 4-bit weights relative to 16-bit ones; an estimate
_CPU_ADAM = 4e9  # parameters a second and node; ZeRO-Offload, arXiv 2101.06840, table 4: 1 B in 0.22 s, 10 B in 2.57 s
_PCIE = 20e9  # bytes a second between a GPU and its host's pinned memory; an estimate, for 16 lanes of generation 4
_NVME = 5e9  # bytes a second of a node's fast disks; an estimate


@dataclass(frozen=True)
class Speed:
    """The time of an optimizer step.

    Attributes:
        compute: seconds of arithmetic, on every GPU.
        waiting: seconds of communication that arithmetic does not hide.
        optimizer: seconds of the optimizer, including copies between GPU and host.
        volume: bytes that each GPU sends per step.
        network: bytes that leave each node; 0 with one node.
        tokens: per second, all GPUs together.
        mfu: the model's arithmetic, as a fraction of all peaks.
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
        """Seconds of the whole step."""
        return self.compute + self.waiting + self.optimizer


def volumes(training: Training, cluster: Cluster, setup: Setup) -> Tuple[float, float]:
    """Bytes that each GPU sends in every pass, and once per step.

    A collective among W ranks sends (W - 1) / W of the data over each link, an all-reduce twice that. DeepSpeed 0.19
    all-reduces its buckets in stages 1 and 2 too (``use_multi_rank_bucket_allreduce``), stage 2 in every pass, and then
    gathers the new weights. Stage 3 gathers the weights for the forward and for the backward pass, and scatters
    gradients: 3 (arXiv 1910.02054, section 7).
    """
    ring = (cluster.world - 1) / cluster.world
    gradients = (4.0 if setup.wide else 2.0) * training.trained * ring
    if setup.stage == 3:
        return 2 * weight_bytes(training) * ring + gradients, 0.0
    if setup.stage == 2:
        return 2 * gradients, gradients
    return 0.0, 2 * gradients + (gradients if setup.stage else 0.0)


def speed(training: Training, cluster: Cluster, setup: Setup) -> Speed:
    """Return the time of a step. ``micro_batch`` must divide the global batch."""
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
    """The part of a collective's time that adds to the step, given ``hidden`` seconds of overlapping arithmetic."""
    return max(0.0, seconds - hidden) + _CONTENTION * min(seconds, hidden)


def _pass(training: Training, cluster: Cluster, setup: Setup) -> float:
    """Seconds of a forward and a backward pass.

    Arithmetic and kernel launches overlap, and the longer hides most of the shorter. The root of the sum of squares
    fits the measurements in between.
    """
    return math.hypot(_arithmetic(training, cluster, setup), training.shape.layers * _start(training, setup))


def _arithmetic(training: Training, cluster: Cluster, setup: Setup) -> float:
    """Seconds of all kernels of a pass. With adapters frozen weights get no gradients, which saves a third."""
    tokens = setup.micro_batch * training.seq
    whole, head = training.shape.flops(training.seq), training.shape.head_flops
    again = (whole - head) if setup.checkpointing else 0.0  # the loss is not recomputed
    flops = tokens * ((2 if training.adapters else 3) * whole + again)
    peak = cluster.gpu.tflops * 1e12 * training.efficiency * (_DEQUANTIZING if training.method == "qlora" else 1)
    moved = _MOVED * (kept_bytes(training, setup.with_(checkpointing=False)) + logits(training, setup))
    moved += _COPIED * training.trained if setup.wide else 0.0
    return flops / peak + moved / (cluster.gpu.bandwidth * 1e9)


def _start(training: Training, setup: Setup) -> float:
    """Seconds to launch the kernels of a block."""
    seconds = _START[training.program] + _HOOKS[training.program][setup.stage]
    if setup.checkpointing:
        seconds += _START_AGAIN[training.program] + (_HOOKS_AGAIN[training.program] if setup.stage == 3 else 0.0)
    return seconds


def _optimizer(training: Training, cluster: Cluster, setup: Setup, passes: int) -> float:
    """Seconds of Adam: reads and writes on the GPU; arithmetic and transfers on the host."""
    share = training.trained / (cluster.world if setup.stage else 1)
    moved = passes * 2 * weight_bytes(training) / cluster.world if setup.parameters_at != "gpu" else 0.0
    seconds = moved / _PCIE
    if setup.parameters_at == "nvme":
        seconds += passes * 2 * weight_bytes(training) / cluster.nodes / _NVME
    if setup.optimizer_at == "gpu":
        return seconds + (_ADAM if setup.stage or setup.wide else _ADAM_WHOLE) * share / (cluster.gpu.bandwidth * 1e9)
    seconds += (passes + 1) * 2 * share / _PCIE + training.trained / cluster.nodes / _CPU_ADAM
    if setup.optimizer_at == "nvme":
        seconds += 2 * 12 * training.trained / cluster.nodes / _NVME
    return seconds
