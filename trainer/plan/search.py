"""All setups of a training: which fit, and which is the fastest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import List, Optional, Tuple

from trainer.ds_config.build import reduce_elements
from trainer.plan.inputs import GIB, Cluster, Setup, Training
from trainer.plan.memory import Memory, disk, gpu_memory, host_memory, loading_memory
from trainer.plan.speed import Speed, speed

_EQUAL = 0.01  # of the speed
_ROOM = 0.85  # of a GPU's memory
LARGEST = 64  # samples per pass; larger ones are not faster

# Stage, device of Adam's states, device of parameters. Stage 1 with offload saves no more than stage 2.
PLACES: Tuple[Tuple[int, str, str], ...] = (
    (0, "gpu", "gpu"),
    (1, "gpu", "gpu"),
    (2, "gpu", "gpu"),
    (3, "gpu", "gpu"),
    (2, "cpu", "gpu"),
    (3, "cpu", "gpu"),
    (3, "cpu", "cpu"),
    (3, "nvme", "nvme"),
)


@dataclass(frozen=True)
class Option:
    """A setup with its costs.

    Attributes:
        setup: the setup.
        memory: of a GPU, in bytes.
        host: a node's memory that offloading needs, in bytes.
        disk: a node's disk that offloading needs, in bytes.
        speed: of a step.
        lacks: GiB that a GPU or the host lacks; 0 if it fits.
        why_not: why it does not fit or is not supported.
    """

    setup: Setup
    memory: Memory
    host: float
    disk: float
    speed: Speed
    lacks: float = 0.0
    why_not: str = ""

    @property
    def fits(self) -> bool:
        """Whether the setup can run."""
        return not self.why_not


def examine(training: Training, cluster: Cluster, setup: Setup) -> Option:
    """Compute the costs of a setup, and whether it fits."""
    memory = gpu_memory(training, cluster, setup)
    host = host_memory(training, cluster, setup)
    lacks, why = 0.0, ""
    if cluster.world == 1 and setup.stage > 0 and setup.optimizer_at == "gpu":
        why = "with one GPU it equals ZeRO-0"
    elif training.method == "qlora" and setup.stage == 3:
        # huggingface.co/docs/peft/accelerate/deepspeed allows it; github.com/deepspeedai/DeepSpeed/issues/5660 says
        # that every GPU first loads all weights, since transformers uses no zero.Init for quantized ones.
        why = "stage 3 shards 4-bit weights only after every GPU has loaded all of them"
    elif memory.total / GIB > cluster.usable:
        lacks = memory.total / GIB - cluster.usable
        why = f"a GPU lacks {lacks:.1f} GiB"
    elif cluster.host is not None and host / GIB > cluster.host:
        lacks = host / GIB - cluster.host
        why = f"a node lacks {lacks:.0f} GiB of memory"
    elif cluster.host is not None and loading_memory(training, cluster, setup) / GIB > cluster.host:
        lacks = loading_memory(training, cluster, setup) / GIB - cluster.host
        why = f"a node lacks {lacks:.0f} GiB of memory while every process loads the whole checkpoint"
    elif training.eight_bit and setup.optimizer_at != "gpu":
        why = "8-bit Adam runs only on the GPU"
    time = speed(training, cluster, setup)
    return Option(setup, memory, host, disk(training, cluster, setup), time, lacks, why)


def micro_batches(training: Training, cluster: Cluster) -> List[int]:
    """Samples per pass that divide the global batch, ascending."""
    share = training.global_batch // cluster.world
    return [each for each in range(1, min(share, LARGEST) + 1) if share % each == 0]


def bucket(training: Training, cluster: Cluster) -> int:
    """Elements of a bucket, as ``ds-config`` chooses them."""
    return reduce_elements(training.shape.hidden, cluster.bus, cluster.world)


def chunks(training: Training) -> bool:
    """Whether the program can compute the loss in chunks: LLaMA-Factory with Liger, except for GPT-2.

    A custom loop may do so too; nanoGPT's and trainer.lm do not.
    """
    return training.program == "trainer" and training.shape.family != "gpt2"


def all_of(
    training: Training, cluster: Cluster, place: Tuple[int, str, str], *, overlap: bool, chunked_loss: bool = False
) -> List[Option]:
    """Return every option of one stage and offload, fitting or not: first without checkpointing, then with it."""
    stage, optimizer_at, parameters_at = place
    plain = Setup(
        *(stage, optimizer_at, parameters_at),
        chunked_loss=chunked_loss,
        bucket=bucket(training, cluster),
        overlap=overlap or stage == 3,
    )
    return [
        examine(training, cluster, plain.with_(checkpointing=checkpointing, micro_batch=samples))
        for checkpointing in (False, True)
        for samples in micro_batches(training, cluster)
    ]


def best_of(
    training: Training, cluster: Cluster, place: Tuple[int, str, str], *, overlap: bool, chunked_loss: bool = False
) -> Option:
    """Return the fastest fitting option of one stage and offload, or the smallest if none fits.

    Among equally fast options it is the one with the largest batch that leaves a safety margin, because larger matrix
    products are never slower.
    """
    options = all_of(training, cluster, place, overlap=overlap, chunked_loss=chunked_loss)
    fitting = [each for each in options if each.fits]
    if not fitting:
        return min(options, key=lambda each: each.memory.total)
    fastest = max(each.speed.tokens for each in fitting)
    equal = [each for each in fitting if each.speed.tokens >= (1 - _EQUAL) * fastest]
    roomy = [each for each in equal if each.memory.total / GIB <= _ROOM * cluster.usable]
    return max(roomy, key=lambda each: each.setup.micro_batch, default=min(equal, key=lambda each: each.memory.total))


def survey(
    training: Training, cluster: Cluster, *, overlap: bool = False, chunked_loss: bool = False
) -> Tuple[Option, ...]:
    """Return the best option of every stage and offload, in the order of ``PLACES``."""
    return tuple(best_of(training, cluster, place, overlap=overlap, chunked_loss=chunked_loss) for place in PLACES)


def pick(options: Tuple[Option, ...]) -> Optional[Option]:
    """Return the fastest option that fits, or None.

    Among options within 1 % of the fastest, one without offload comes first, then the lowest stage except stage 0. On
    several GPUs stage 0 is no faster than stage 1, uses more memory, and in DeepSpeed 0.19 its 16-bit optimizer starts
    with an empty step. On one GPU it is the only stage without offload.
    """
    fitting = [each for each in options if each.fits]
    if not fitting:
        return None
    fastest = max(each.speed.tokens for each in fitting)
    equal = [each for each in fitting if each.speed.tokens >= (1 - _EQUAL) * fastest]
    return min(equal, key=lambda each: (each.setup.optimizer_at != "gpu", each.setup.stage == 0))


def nearest(options: Tuple[Option, ...]) -> Option:
    """Return the pick; if nothing fits, the option that lacks least."""
    best = pick(options)
    return best or min(options, key=lambda each: each.lacks or math.inf)
