"""Whether a run can continue on fewer nodes (``train --min-nodes``): not from checkpoints of DeepSpeed's ZeRO. Pure.

From stage 1 on, each rank saves its part of the optimizer's states. For another number of data-parallel ranks
``DeepSpeedEngine._load_zero_checkpoint`` raises ``ZeRORuntimeException`` (DeepSpeed 0.19, ``runtime/engine.py``), also
with ``elastic_checkpoint``. Only with ``"checkpoint": {"load_universal": true}`` it reads a universal checkpoint, which
``ds_to_universal.py`` makes from another one. transformers' Trainer always loads the optimizer's states
(``integrations/deepspeed.py``, ``deepspeed_load_checkpoint``), and the agents skip checkpoints of another number of
ranks (``trainer/agent/checkpoints/layouts.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_ACCELERATE_STAGE = 2  # of accelerate's DeepSpeedPlugin, if its configuration names none
_NEVER = ("no", "false")  # transformers' save_strategy; YAML reads a bare "no" as false
_WHY = (
    "DeepSpeed resumes a ZeRO checkpoint only on as many ranks as saved it, so the run would end when a node is lost "
    "and no spare is left"
)


@dataclass(frozen=True)
class Zero:
    """A DeepSpeed configuration of a job.

    Attributes:
        where: its name, for messages.
        stage: ZeRO's stage; None if the configuration cannot be read on this machine.
        universal: it loads universal checkpoints.
    """

    where: str
    stage: int | None = None
    universal: bool = False


@dataclass(frozen=True)
class Obstacle:
    """Why a run cannot continue on fewer nodes. ``certain``: it is known, not only possible."""

    text: str
    certain: bool


def zero_of(where: str, config: Mapping[str, Any]) -> Zero:
    """What a DeepSpeed configuration says."""
    zero, checkpoint = config.get("zero_optimization"), config.get("checkpoint")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else int(zero is True)  # true: an old form of stage 1
    universal = isinstance(checkpoint, Mapping) and checkpoint.get("load_universal") is True
    return Zero(where, stage if isinstance(stage, int) else None, universal)


def zero_of_accelerate(where: str, settings: Mapping[str, Any], arguments: Mapping[str, Any]) -> Zero | None:
    """What accelerate's configuration and options say without a DeepSpeed file; None: DeepSpeed is not used.

    Args:
        where: the name of the configuration.
        settings: its values.
        arguments: the options of ``accelerate launch``.
    """
    inner = settings.get("deepspeed_config")
    inner = inner if isinstance(inner, Mapping) else {}
    if settings.get("distributed_type") != "DEEPSPEED" and not arguments.get("use_deepspeed"):
        return None
    stage = str(arguments.get("zero_stage", inner.get("zero_stage", _ACCELERATE_STAGE)))
    return Zero("--zero_stage" if "zero_stage" in arguments else where, int(stage) if stage.isdecimal() else None)


def saves_states(arguments: Mapping[str, Any]) -> bool:
    """Whether transformers' Trainer saves checkpoints with the optimizer's states."""
    only_model, strategy = arguments.get("save_only_model"), arguments.get("save_strategy", "steps")
    return str(only_model).lower() != "true" and str(strategy).lower() not in _NEVER


def obstacles(found: Mapping[str, Zero], *, trainer: bool, arguments: Mapping[str, Any]) -> Iterator[Obstacle]:
    """Why a run cannot, or may not, continue on fewer nodes.

    Args:
        found: the DeepSpeed configurations of the job, by name.
        trainer: transformers' Trainer saves and loads its checkpoints.
        arguments: of the training.
    """
    if trainer and not saves_states(arguments):
        return  # it starts from the first step
    for each in found.values():
        if each.stage is None:
            yield Obstacle(f"{each.where} is not read on this machine. If it uses ZeRO: {_WHY}", certain=False)
        elif each.stage and each.universal:
            text = f"{each.where} loads universal checkpoints: the program must make them itself (ds_to_universal.py)"
            yield Obstacle(text, certain=False)
        elif each.stage:
            text = f"{each.where} uses ZeRO stage {each.stage}: {_WHY}"
            yield Obstacle(text if trainer else f"{text}. This holds if its checkpoints are DeepSpeed's", trainer)
