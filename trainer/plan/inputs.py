"""The input of a plan: the machines, the training, and a setup of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Mapping, Optional

from trainer.bounds import Bound
from trainer.ds_config import Gpu
from trainer.plan.shape import PlanError, Shape

METHODS = ("full", "lora", "qlora", "pretrain")
PROGRAMS = ("trainer", "own")
GIB = float(1 << 30)

BOUNDS: Mapping[str, Bound] = MappingProxyType({
    "--nodes": Bound(low=1, high=100_000),
    "--gpus": Bound(low=1, high=1000),
    "--gpu-memory": Bound(low=1, high=10_000),
    "--seq": Bound(low=1, high=100_000_000),
    "--global-batch": Bound(low=1, high=100_000_000),
    "--link": Bound(low=0.001, high=100_000),
    "--lora-rank": Bound(low=1, high=100_000),
    "--efficiency": Bound(low=0.01, high=1),
    "--host-memory": Bound(low=0, high=1_000_000),
    "--cores": Bound(low=1, high=100_000),
    "--disk": Bound(low=0.001, high=10_000),
    "--failures": Bound(low=0.0001, high=100_000),
})  # fmt: skip
"""The range of every number, by its option."""


@dataclass(frozen=True)
class Cluster:
    """The machines.

    Attributes:
        nodes: number of nodes.
        gpus: per node.
        gpu: the card.
        memory: of a card, in GiB, as nvidia-smi shows it (80 for an A100 80GB).
        link: bus bandwidth between nodes, GB/s, as ``bench nccl`` measures it.
        host: memory of a node in GiB; None if unknown.
        cores: per node; None if unknown.
        disk: GB/s at which a node writes checkpoints.
        failures: failures per 1,000 node hours; None: the published rate.
    """

    nodes: int
    gpus: int
    gpu: Gpu
    memory: float
    link: float = 25.0
    host: Optional[float] = None
    cores: Optional[int] = None
    disk: float = 1.0
    failures: Optional[float] = None

    @property
    def world(self) -> int:
        """All GPUs."""
        return self.nodes * self.gpus

    @property
    def bus(self) -> float:
        """Bandwidth of the slowest link in a ring of all GPUs, GB/s."""
        return self.gpu.peer if self.nodes == 1 else min(self.link, self.gpu.peer)

    @property
    def usable(self) -> float:
        """GiB of a card that a process can use: nvidia-smi shows 80 GiB on an A100, 79.6 on an H100."""
        return 0.99 * self.memory


@dataclass(frozen=True)
class Training:
    """What to train.

    Attributes:
        shape: the model.
        method: one of ``METHODS``.
        seq: tokens per sample.
        global_batch: samples per optimizer step, over all GPUs.
        program: ``trainer``: LLaMA-Factory and transformers' models, eager; ``own``: a lean GPT such as nanoGPT's.
        rank: of LoRA.
        precision: ``bf16`` or ``fp16``.
        efficiency: fraction of the card's peak that large matrix products reach.
        half_loss: the loss is computed in 16 bits, as in nanoGPT when DeepSpeed has cast the whole model.
        eight_bit: Adam's states have 8 bits (``optim: adamw_bnb_8bit``), which may change the loss.
    """

    shape: Shape
    method: str = "full"
    seq: int = 4096
    global_batch: int = 256
    program: str = "trainer"
    rank: int = 8
    precision: str = "bf16"
    efficiency: float = 0.65
    half_loss: bool = False
    eight_bit: bool = False

    @property
    def adapters(self) -> bool:
        """Whether only adapters are trained."""
        return self.method in {"lora", "qlora"}

    @property
    def trained(self) -> int:
        """Number of trained parameters. A vision tower is frozen, as in LLaMA-Factory."""
        if self.adapters:
            return self.shape.adapter_parameters(self.rank)
        return self.shape.parameters - self.shape.vision

    @property
    def tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.global_batch * self.seq


@dataclass(frozen=True)
class Setup:
    """A way to run the training.

    Attributes:
        stage: of ZeRO, 0 to 3.
        optimizer_at: device of the optimizer states: ``gpu``, ``cpu`` or ``nvme``.
        parameters_at: device of unused parameters in stage 3.
        checkpointing: recompute activations in the backward pass.
        micro_batch: samples per GPU and pass.
        flash: attention keeps no seq x seq matrix.
        chunked_loss: compute the loss in chunks, without the logits of a whole batch (Liger).
        bucket: elements that are reduced at once.
        overlap: reduce gradients during the backward pass.
        live: largest number of parameters that stage 3 gathers at a time.
        wide: weights and gradients have 32 bits, and autocast copies the weights to 16 bits in every pass:
            LLaMA-Factory's ``bf16: true`` without DeepSpeed. Only in stage 0.
        kernels: Liger's norms and SwiGLU, which keep less for the backward pass.
    """

    stage: int
    optimizer_at: str = "gpu"
    parameters_at: str = "gpu"
    checkpointing: bool = False
    micro_batch: int = 1
    flash: bool = True
    chunked_loss: bool = False
    bucket: int = 200_000_000
    overlap: bool = False
    live: int = 1_000_000_000
    wide: bool = False
    kernels: bool = False

    @property
    def name(self) -> str:
        """The name: ``ZeRO-2``, ``ZeRO-2 Adam on cpu``, ``ZeRO-3 all on nvme``."""
        if self.stage == 0:
            return "ZeRO-0 (DDP)"
        if self.parameters_at != "gpu":
            return f"ZeRO-{self.stage} all on {self.parameters_at}"
        return f"ZeRO-{self.stage}" + (f" Adam on {self.optimizer_at}" if self.optimizer_at != "gpu" else "")

    def with_(self, **changes: object) -> Setup:
        """Return a copy with changes."""
        return replace(self, **changes)  # type: ignore[arg-type]


def accumulation(training: Training, cluster: Cluster, setup: Setup) -> int:
    """Return the number of passes per optimizer step.

    Raises:
        PlanError: the global batch is not divisible.
    """
    each = setup.micro_batch * cluster.world
    if training.global_batch % each:
        raise PlanError(f"a global batch of {training.global_batch} is not divisible by {each}")
    return training.global_batch // each


def check(training: Training, cluster: Cluster) -> None:
    """Check the input.

    Raises:
        PlanError: the first problem.
    """
    for option, value in (
        ("--nodes", cluster.nodes),
        ("--gpus", cluster.gpus),
        ("--gpu-memory", cluster.memory),
        ("--link", cluster.link),
        ("--host-memory", cluster.host),
        ("--cores", cluster.cores),
        ("--disk", cluster.disk),
        ("--failures", cluster.failures),
        ("--seq", training.seq),
        ("--global-batch", training.global_batch),
        ("--lora-rank", training.rank),
        ("--efficiency", training.efficiency),
    ):
        problem = "" if value is None else BOUNDS[option].problem(value)
        if problem:
            raise PlanError(f"{option} {problem}", hint="clusterctl plan --help")
    if training.adapters and training.rank > training.shape.hidden:
        raise PlanError(
            f"--lora-rank {training.rank} is larger than the width of {training.shape.name}, {training.shape.hidden}",
            hint="--lora-rank 8",
        )
    if training.method not in METHODS:
        raise PlanError(f"--method {training.method}: must be one of {', '.join(METHODS)}")
    if training.shape.family == "gpt2" and training.seq > training.shape.context:
        raise PlanError(
            f"--seq {training.seq}: {training.shape.name} has {training.shape.context} learned positions",
            hint=f"--seq {training.shape.context}",
        )
    if training.global_batch % cluster.world:
        below = training.global_batch // cluster.world * cluster.world
        fitting = [each for each in (below, below + cluster.world) if each]
        raise PlanError(
            f"--global-batch {training.global_batch} is not divisible by {cluster.world} GPUs",
            hint=" or ".join(f"--global-batch {each}" for each in fitting),
        )
