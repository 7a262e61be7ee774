"""The command-line options of ``clusterctl ds-config`` and ``python -m trainer.ds_config``."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Dict, Mapping, Optional, Tuple, Type

from trainer.bounds import Bound
from trainer.ds_config.gpus import ConfigError
from trainer.ds_config.request import DEVICES, PRECISIONS, PRESETS, SCHEDULES, TARGETS, Request


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
    given: Dict[str, Any] = {key: value for key, value in values.items() if key in known and value is not None}
    base = Request() if like is None else PRESETS[like]
    if base.lr is None and ("lr" in given or given.get("schedule", "none") != "none"):
        given.setdefault("optimizer", True)  # a rate or a schedule needs the optimizer
    return replace(base, **given)
