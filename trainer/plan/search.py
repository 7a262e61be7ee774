"""All ways to set a training up, what fits of them, and which is fastest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import List, Optional, Tuple

from trainer.ds_config.buckets import reduce_elements
from trainer.plan.memory import Memory, disk, gpu_memory, host_memory
from trainer.plan.speed import Speed, speed
from trainer.plan.wish import GIB, Cluster, Setup, Training

_EQUAL = 0.01  # of the speed
_ROOM = 0.85  # of a GPU's memory
LARGEST = 64  # samples of a pass; beyond it nothing gets faster

# Stage, where Adam's states are, where parameters are. Stage 1 with offload saves nothing that stage 2 does not.
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
    """One way, with what it costs.

    Attributes:
        setup: the way.
        memory: of a GPU, in bytes.
        host: of a node's memory, in bytes, that offloading takes.
        disk: of a node's disk, in bytes.
        speed: of a step.
        lacks: GiB that a GPU, or the host, has too little; 0: it fits.
        why_not: what lacks, or what else forbids it.
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
        """Whether it can run."""
        return not self.why_not


def examine(training: Training, cluster: Cluster, setup: Setup) -> Option:
    """What a setup costs, and whether it fits."""
    memory = gpu_memory(training, cluster, setup)
    host = host_memory(training, cluster, setup)
    lacks, why = 0.0, ""
    if cluster.world == 1 and setup.stage > 0 and setup.optimizer_at == "gpu":
        why = "one GPU has nothing to shard: ZeRO-0 is the same"
    elif training.method == "qlora" and setup.stage == 3:
        # huggingface.co/docs/peft/accelerate/deepspeed says that it works; github.com/deepspeedai/DeepSpeed/issues/5660
        # that weights are whole on every GPU first, since transformers uses no zero.Init for quantized ones.
        why = "stage 3 shards 4-bit weights only after every GPU has loaded them all; not planned"
    elif memory.total / GIB > cluster.usable:
        lacks = memory.total / GIB - cluster.usable
        why = f"a GPU lacks {lacks:.1f} GiB"
    elif cluster.host is not None and host / GIB > cluster.host:
        lacks = host / GIB - cluster.host
        why = f"a node lacks {lacks:.0f} GiB of memory"
    made = speed(training, cluster, setup)
    return Option(setup, memory, host, disk(training, cluster, setup), made, lacks, why)


def micro_batches(training: Training, cluster: Cluster) -> List[int]:
    """Samples of a pass that the global batch can be made of, ascending."""
    share = training.global_batch // cluster.world
    return [each for each in range(1, min(share, LARGEST) + 1) if share % each == 0]


def bucket(training: Training, cluster: Cluster) -> int:
    """Elements of a bucket, as ``ds-config`` chooses them."""
    return reduce_elements(training.shape.hidden, cluster.bus, cluster.world)


def chunks(training: Training) -> bool:
    """Whether the program can compute the loss in pieces: LLaMA-Factory with Liger, which knows no GPT-2.

    A loop that someone wrote may do it too; nanoGPT's and trainer.gpt do not.
    """
    return training.program == "trainer" and training.shape.family != "gpt2"


def all_of(
    training: Training, cluster: Cluster, place: Tuple[int, str, str], *, overlap: bool, chunked_loss: bool = False
) -> List[Option]:
    """Every option of one stage and offload, whether it fits or not: without checkpointing first, then with it."""
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
    """The fastest that fits of one stage and offload; the one that needs least, where none fits.

    Among equals the largest batch of a GPU that leaves room for a mistake of the prediction: larger matrix products are
    never slower.
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
    """The best of every stage and offload, in the order of ``PLACES``."""
    return tuple(best_of(training, cluster, place, overlap=overlap, chunked_loss=chunked_loss) for place in PLACES)


def pick(options: Tuple[Option, ...]) -> Optional[Option]:
    """The fastest option that fits; None: nothing fits.

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
    """The pick; where nothing fits, the option that lacks least."""
    best = pick(options)
    return best or min(options, key=lambda each: each.lacks or math.inf)
