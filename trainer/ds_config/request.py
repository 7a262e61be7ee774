"""The request for a DeepSpeed configuration: its options, also on the command line, and the check that they agree."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Dict, Mapping, Optional, Tuple, Type

from trainer.bounds import Bound
from trainer.ds_config.gpus import ConfigError, find

TARGETS = ("trainer", "own")
PRECISIONS = ("auto", "bf16", "fp16", "fp32")
DEVICES = ("none", "cpu", "nvme")
SCHEDULES = ("none", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


@dataclass(frozen=True)
class Request:
    """The options of a configuration. None leaves a value to the trainer or to DeepSpeed.

    Attributes:
        stage: of ZeRO, 0 to 3.
        target: ``trainer``: for transformers' Trainer and LLaMA-Factory, which fill in "auto";
            ``own``: for a script that passes it to ``deepspeed.initialize``, which does not know "auto".
        precision: ``auto`` follows ``gpu``, or leaves it to the Trainer.
        gpu: name of a card, as in nvidia-smi.
        offload_optimizer: device of the optimizer states: ``none`` (the GPU), ``cpu``, ``nvme``.
        offload_param: device of the parameters, stage 3 only.
        nvme_path: a folder on a fast local disk of every node.
        pin_memory: page-lock the host memory for offload.
        overlap: reduce gradients during the backward pass; None: in stage 3 only.
        round_robin: spread gradients so that all ranks copy them to the host at once; None: with offload in
            stages 1 and 2.
        hidden: the model's hidden size, for the sizes of the buckets.
        link: bus bandwidth of the slowest link, GB/s, for the sizes of the buckets.
        world: number of processes.
        reduce_bucket: elements; None: from ``hidden`` and ``link``.
        allgather_bucket: elements; None: equal to ``reduce_bucket``.
        micro_batch: samples per GPU and pass.
        accumulation: passes per optimizer step.
        clip: largest gradient norm.
        optimizer: DeepSpeed creates an AdamW optimizer.
        lr: its learning rate.
        weight_decay: its weight decay.
        schedule: one of ``SCHEDULES``.
        warmup: steps until the full learning rate.
        steps: of the whole training, for schedules that decay.
        steps_per_print: steps between DeepSpeed's progress lines.
    """

    stage: int = 2
    target: str = "trainer"
    precision: str = "auto"
    gpu: Optional[str] = None
    offload_optimizer: str = "none"
    offload_param: str = "none"
    nvme_path: Optional[str] = None
    pin_memory: bool = True
    overlap: Optional[bool] = None
    round_robin: Optional[bool] = None
    hidden: Optional[int] = None
    link: Optional[float] = None
    world: Optional[int] = None
    reduce_bucket: Optional[int] = None
    allgather_bucket: Optional[int] = None
    micro_batch: Optional[int] = None
    accumulation: Optional[int] = None
    clip: Optional[float] = None
    optimizer: bool = False
    lr: Optional[float] = None
    weight_decay: Optional[float] = None
    schedule: str = "none"
    warmup: Optional[int] = None
    steps: Optional[int] = None
    steps_per_print: Optional[int] = None

    @property
    def auto(self) -> bool:
        """Whether the trainer fills in "auto"."""
        return self.target == "trainer"


def precision_of(request: Request) -> str:
    """Return the precision of a request; ``auto`` if the Trainer decides.

    Raises:
        ConfigError: nothing determines it, or the card does not support it.
    """
    gpu = find(request.gpu) if request.gpu is not None else None
    if request.precision == "bf16" and gpu is not None and not gpu.bf16:
        name = f"{gpu.name} (compute capability {gpu.capability[0]}.{gpu.capability[1]})"
        raise ConfigError(f"--precision bf16: {name} does not support it; Ampere (8.0) is the first that does",
                          hint="--precision fp16")  # fmt: skip
    if request.precision != "auto":
        return request.precision
    if gpu is not None:
        return "bf16" if gpu.bf16 else "fp16"
    if not request.auto:
        raise ConfigError(
            "--precision auto: without --gpu only transformers' Trainer can choose it",
            hint="use --gpu A100, or --precision bf16 (Ampere and later), or --precision fp16",
        )
    return "auto"


def check(request: Request) -> None:
    """Check that the options agree.

    Raises:
        ConfigError: the first contradiction.
    """
    _values(request)
    _offload(request)
    _schedule(request)
    precision_of(request)


def _values(request: Request) -> None:
    for value, allowed, option in (
        (request.stage, (0, 1, 2, 3), "--stage"),
        (request.target, TARGETS, "--for"),
        (request.precision, PRECISIONS, "--precision"),
        (request.offload_optimizer, DEVICES, "--offload-optimizer"),
        (request.offload_param, DEVICES, "--offload-param"),
        (request.schedule, SCHEDULES, "--schedule"),
    ):
        if value not in allowed:
            raise ConfigError(f"{option} {value}: must be one of {', '.join(map(str, allowed))}")


def _offload(request: Request) -> None:
    devices = (request.offload_optimizer, request.offload_param)
    if request.offload_param != "none" and request.stage < 3:
        raise ConfigError(
            f"--offload-param {request.offload_param} with --stage {request.stage}: only stage 3 shards parameters",
            hint=f"--stage 3, or --offload-optimizer {request.offload_param} alone",
        )
    if request.offload_optimizer != "none" and request.stage == 0:
        raise ConfigError(
            f"--offload-optimizer {request.offload_optimizer} with --stage 0: that stage keeps everything on every GPU",
            hint="--stage 2 --offload-optimizer cpu",
        )
    if request.offload_optimizer == "nvme" and request.stage < 3:
        raise ConfigError(
            f"--offload-optimizer nvme with --stage {request.stage}: below stage 3 DeepSpeed uses host memory instead",
            hint="--stage 3 --offload-optimizer nvme, or --offload-optimizer cpu",
        )
    if "nvme" in devices and request.nvme_path is None:
        raise ConfigError(
            "offload to nvme needs a path", hint="--nvme-path DIR: a folder on a fast local disk of every node"
        )
    if request.nvme_path is not None and "nvme" not in devices:
        raise ConfigError("--nvme-path: nothing is offloaded to nvme", hint="--stage 3 --offload-optimizer nvme")
    if request.nvme_path is not None and not request.nvme_path.startswith("/"):
        raise ConfigError(f"--nvme-path {request.nvme_path}: must be absolute, and the same on every node")
    if request.precision == "fp32" and request.stage == 3 and "nvme" in devices:
        raise ConfigError("--precision fp32 with nvme: DeepSpeed swaps only 16-bit parameters", hint="--precision bf16")


def _schedule(request: Request) -> None:
    if request.schedule != "none" and not request.optimizer:
        raise ConfigError(f"--schedule {request.schedule}: DeepSpeed only schedules its own optimizer",
                          hint=f"--optimizer --schedule {request.schedule}")  # fmt: skip
    if request.warmup is not None and request.steps is not None and request.warmup > request.steps:
        raise ConfigError(f"--warmup {request.warmup} must be at most --steps, which is {request.steps}",
                          hint=f"--warmup {request.steps // 10}")  # fmt: skip
    if request.auto:
        return
    if request.optimizer and request.lr is None:
        raise ConfigError("--optimizer with --for own needs a learning rate", hint="--lr 3e-5")
    if request.schedule not in {"none", "WarmupLR"} and request.steps is None:
        raise ConfigError(
            f"--schedule {request.schedule} with --for own needs the number of steps", hint="--steps 1000"
        )
    if request.schedule != "none" and request.warmup is None:
        raise ConfigError(f"--schedule {request.schedule} with --for own needs the warm-up steps", hint="--warmup 100")
    if request.micro_batch is None:
        raise ConfigError("--for own needs the samples per GPU", hint="--micro-batch 1")


_FACTORY = 500_000_000  # elements of LLaMA-Factory's buckets in stages 0 to 2

PRESETS: Dict[str, Request] = {
    "z0": Request(stage=0, reduce_bucket=_FACTORY, overlap=False, round_robin=True),
    "z2": Request(stage=2, reduce_bucket=_FACTORY, overlap=False, round_robin=True),
    "z2-offload": Request(stage=2, reduce_bucket=_FACTORY, overlap=False, round_robin=True, offload_optimizer="cpu"),
    "z3": Request(stage=3, overlap=False),
    "z3-offload": Request(stage=3, overlap=False, offload_optimizer="cpu", offload_param="cpu"),
    "llama-7b": Request(
        stage=3,
        precision="fp16",
        offload_optimizer="cpu",
        offload_param="cpu",
        overlap=True,
        optimizer=True,
        lr=2e-5,
        weight_decay=0.0,
        schedule="WarmupDecayLR",
        warmup=1000,
        clip=1.0,
        steps_per_print=50,
    ),
    "13b": Request(
        stage=2,
        precision="bf16",
        offload_optimizer="cpu",
        overlap=True,
        reduce_bucket=200_000_000,
        round_robin=False,
    ),
    "70b": Request(stage=3, precision="bf16", offload_optimizer="cpu", offload_param="cpu", overlap=True),
    "gpt2-xl": Request(stage=2, target="own", precision="fp16", micro_batch=1, accumulation=32, clip=1.0, overlap=True),
}


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        flag: as typed, ``--stage``.
        field: the field of ``Request``.
        type: type of its value; bool: a switch, with ``--no-…`` for the opposite.
        choices: the allowed values; empty: any value of the type.
        help: one line of help.
        metavar: name of its value.
        bound: range of a number.
    """

    flag: str
    field: str
    type: Type[Any]
    help: str
    choices: Tuple[str, ...] = ()
    metavar: Optional[str] = None
    bound: Optional[Bound] = None

    @property
    def ranged_help(self) -> str:
        """The help with the range of a number."""
        return self.help if self.bound is None else "%s  [%s]" % (self.help, self.bound)


_COUNT = Bound(low=1, high=1_000_000)
_STEPS = Bound(low=1, high=1_000_000_000)
_ELEMENTS = Bound(low=2, high=100_000_000_000)

OPTIONS = (
    Option("--stage", "stage", int, "ZeRO stage.  [default: 2]", ("0", "1", "2", "3")),
    Option("--for", "target", str, "Configure the transformers Trainer, or your own script.", TARGETS),
    Option("--precision", "precision", str, "auto: from --gpu, else from the Trainer.", PRECISIONS),
    Option("--gpu", "gpu", str, "GPU model, as nvidia-smi names it (bf16 since Ampere, else fp16).", metavar="NAME"),
    Option("--offload-optimizer", "offload_optimizer", str, "Offload optimizer states to this device.", DEVICES),
    Option("--offload-param", "offload_param", str, "Offload parameters to this device (stage 3).", DEVICES),
    Option("--nvme-path", "nvme_path", str, "Directory on a fast local disk of every node.", metavar="DIR"),
    Option("--pin-memory", "pin_memory", bool, "Pin host memory of offloaded states.  [default: on]"),
    Option(
        "--overlap", "overlap", bool, "Overlap gradient reduction with the backward pass.  [default: on in stage 3]"
    ),
    Option(
        "--round-robin", "round_robin", bool, "Partition gradient copies among the ranks.  [default: on with offload]"
    ),
    Option("--hidden", "hidden", int, "Hidden size of the model, for bucket sizes.", metavar="N", bound=_COUNT),
    Option(
        "--link",
        "link",
        float,
        "Bandwidth of the slowest link, for bucket sizes.",
        metavar="GB/S",
        bound=Bound(above=0, high=100_000),
    ),
    Option("--world", "world", int, "Number of GPUs, for bucket sizes.", metavar="N", bound=_COUNT),
    Option("--reduce-bucket", "reduce_bucket", int, "Elements per reduce bucket.", metavar="N", bound=_ELEMENTS),
    Option(
        "--allgather-bucket",
        "allgather_bucket",
        int,
        "Elements per allgather bucket.",
        metavar="N",
        bound=_ELEMENTS,
    ),
    Option("--micro-batch", "micro_batch", int, "Samples per GPU and pass.", metavar="N", bound=_COUNT),
    Option("--accumulation", "accumulation", int, "Passes per optimizer step.", metavar="N", bound=_COUNT),
    Option(
        "--clip",
        "clip",
        float,
        "Clip gradients to this norm.",
        metavar="NORM",
        bound=Bound(above=0, high=1_000_000),
    ),
    Option("--optimizer", "optimizer", bool, "Let DeepSpeed create AdamW."),
    Option("--lr", "lr", float, "Learning rate of AdamW.", metavar="RATE", bound=Bound(above=0, high=1000)),
    Option(
        "--weight-decay", "weight_decay", float, "Weight decay of AdamW.", metavar="RATE", bound=Bound(low=0, high=1)
    ),
    Option("--schedule", "schedule", str, "Learning rate schedule.", SCHEDULES),
    Option(
        "--warmup",
        "warmup",
        int,
        "Warm-up steps of the schedule.",
        metavar="STEPS",
        bound=Bound(low=0, high=1_000_000_000),
    ),
    Option(
        "--steps",
        "steps",
        int,
        "Total steps, for schedules with an end.",
        metavar="STEPS",
        bound=_STEPS,
    ),
    Option(
        "--steps-per-print",
        "steps_per_print",
        int,
        "Steps between DeepSpeed's progress lines.",
        metavar="STEPS",
        bound=_STEPS,
    ),
)


def check_bounds(request: Request) -> None:
    """Check every number of a request against the range of its option.

    Raises:
        ConfigError: the first number outside its range.
    """
    for option in OPTIONS:
        value = getattr(request, option.field)
        if option.bound is None or value is None:
            continue
        if problem := option.bound.problem(value):
            raise ConfigError(f"{option.flag} {problem}")


def request_of(values: Mapping[str, Any], like: Optional[str] = None) -> Request:
    """Return the request of the given options, over the preset ``like``, over the defaults.

    Args:
        values: by field of ``Request``; None if not given.
        like: a name of ``PRESETS``.

    Raises:
        ConfigError: there is no such preset.
    """
    if like is not None and like not in PRESETS:
        raise ConfigError(f"--like {like}: no such preset", hint=f"use --like with one of {', '.join(PRESETS)}")
    known = {each.name for each in fields(Request)}
    chosen: Dict[str, Any] = {key: value for key, value in values.items() if key in known and value is not None}
    base = Request() if like is None else PRESETS[like]
    if base.lr is None and ("lr" in chosen or chosen.get("schedule", "none") != "none"):
        chosen.setdefault("optimizer", True)  # a rate or a schedule needs the optimizer
    return replace(base, **chosen)
