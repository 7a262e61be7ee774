"""The options of the command line, once for ``clusterctl ds-config`` and ``python -m trainer.ds_config``."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Dict, Mapping, Optional, Tuple, Type

from trainer.bounds import Bound
from trainer.ds_config.errors import ConfigError
from trainer.ds_config.presets import PRESETS
from trainer.ds_config.request import DEVICES, PRECISIONS, SCHEDULES, TARGETS, Request


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        flag: as it is typed, ``--stage``.
        field: of ``Request``.
        type: what its value is; bool: a switch, with ``--no-…`` for the other way.
        choices: what it may be; empty: anything of the type.
        help: a line about it.
        metavar: what its value is called.
        bound: of a number: its range.
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
    Option("--stage", "stage", int, "ZeRO's stage; 2.", ("0", "1", "2", "3")),
    Option("--for", "target", str, "Who reads it: transformers' Trainer, or an own script.", TARGETS),
    Option("--precision", "precision", str, "auto: by --gpu, else the Trainer says it.", PRECISIONS),
    Option("--gpu", "gpu", str, "The card, as nvidia-smi names it: bf16 from Ampere on, else fp16.", metavar="NAME"),
    Option("--offload-optimizer", "offload_optimizer", str, "Where optimizer states are kept.", DEVICES),
    Option("--offload-param", "offload_param", str, "Where parameters are kept, in stage 3.", DEVICES),
    Option("--nvme-path", "nvme_path", str, "A folder on a fast local disk of every node.", metavar="DIR"),
    Option("--pin-memory", "pin_memory", bool, "Page-lock the host memory that is offloaded to; on."),
    Option("--overlap", "overlap", bool, "Reduce gradients while others are computed; in stage 3 only."),
    Option("--round-robin", "round_robin", bool, "Spread gradients over the ranks; with offload."),
    Option("--hidden", "hidden", int, "The model's hidden size, for the buckets.", metavar="N", bound=_COUNT),
    Option(
        "--link",
        "link",
        float,
        "Bandwidth of the slowest link in GB/s, for the buckets.",
        metavar="GB/S",
        bound=Bound(above=0, high=100_000),
    ),
    Option("--world", "world", int, "How many GPUs take part, for the buckets.", metavar="N", bound=_COUNT),
    Option("--reduce-bucket", "reduce_bucket", int, "Elements that are reduced at once.", metavar="N", bound=_ELEMENTS),
    Option(
        "--allgather-bucket",
        "allgather_bucket",
        int,
        "Elements that are gathered at once.",
        metavar="N",
        bound=_ELEMENTS,
    ),
    Option("--micro-batch", "micro_batch", int, "Samples of a GPU in one pass.", metavar="N", bound=_COUNT),
    Option("--accumulation", "accumulation", int, "Passes before an optimizer step.", metavar="N", bound=_COUNT),
    Option(
        "--clip",
        "clip",
        float,
        "The largest norm of the gradient.",
        metavar="NORM",
        bound=Bound(above=0, high=1_000_000),
    ),
    Option("--optimizer", "optimizer", bool, "DeepSpeed makes the AdamW."),
    Option("--lr", "lr", float, "Its learning rate.", metavar="RATE", bound=Bound(above=0, high=1000)),
    Option("--weight-decay", "weight_decay", float, "Its weight decay.", metavar="RATE", bound=Bound(low=0, high=1)),
    Option("--schedule", "schedule", str, "How its learning rate changes.", SCHEDULES),
    Option(
        "--warmup",
        "warmup",
        int,
        "Steps until the learning rate is reached.",
        metavar="STEPS",
        bound=Bound(low=0, high=1_000_000_000),
    ),
    Option(
        "--steps",
        "steps",
        int,
        "Steps of the whole training, for schedules with an end.",
        metavar="STEPS",
        bound=_STEPS,
    ),
    Option(
        "--steps-per-print",
        "steps_per_print",
        int,
        "How often DeepSpeed says where it is.",
        metavar="STEPS",
        bound=_STEPS,
    ),
)


def check_bounds(request: Request) -> None:
    """Compare every number of a request with the range of its option.

    Raises:
        ConfigError: the first that is outside.
    """
    for option in OPTIONS:
        value = getattr(request, option.field)
        if option.bound is None or value is None:
            continue
        if problem := option.bound.problem(value):
            raise ConfigError(f"{option.flag} {problem}")


def request_of(values: Mapping[str, Any], like: Optional[str] = None) -> Request:
    """The request that options make: those that were given, over the preset ``like``, over the defaults.

    Args:
        values: by field of ``Request``; None: not given.
        like: a name of ``PRESETS``.

    Raises:
        ConfigError: there is no such preset.
    """
    if like is not None and like not in PRESETS:
        raise ConfigError(f"--like {like}: there is no such configuration", hint=f"--like of {', '.join(PRESETS)}")
    known = {each.name for each in fields(Request)}
    given: Dict[str, Any] = {key: value for key, value in values.items() if key in known and value is not None}
    base = Request() if like is None else PRESETS[like]
    if base.lr is None and ("lr" in given or given.get("schedule", "none") != "none"):
        given.setdefault("optimizer", True)  # a rate or a schedule is the optimizer's
    return replace(base, **given)
