"""The parts of a model, which may train at different rates or be frozen, and the highest rate of each.

A model says which part a parameter belongs to: ``part_of(name)`` returns one of ``config.PARTS``. ``--parts`` freezes
the others: they need no gradients and no optimizer state, and are held in the data type of the computation.

A part's rate follows the schedule of ``learning_rate``, times a factor: the highest rate of the part over
``learning_rate``. ``--scale-lr`` multiplies all rates, whatever the schedule, by the ranks of the training's start.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Mapping, Protocol, Tuple, cast

import torch
from torch import nn

from trainer.lm.checkpoint import FROZEN, Piece, Reader
from trainer.lm.config import Config, trained_parts
from trainer.lm.errors import RefusedError
from trainer.lm.options import option
from trainer.lm.ranks import Ranks


class Parted(Protocol):
    """A model with parts."""

    def part_of(self, name: str) -> str:
        """Return the part that a parameter belongs to: one of ``config.PARTS``."""


def of_model(model: nn.Module) -> Dict[str, int]:
    """Return the parameters of each part of a model."""
    counts: Dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = cast("Parted", model).part_of(name)
        counts[part] = counts.get(part, 0) + int(getattr(parameter, "ds_numel", parameter.numel()))  # of ZeRO-3
    return counts


def freeze(model: nn.Module, config: Config, dtype: torch.dtype) -> None:
    """Freeze the parts that ``--parts`` does not name, in the data type of the computation.

    Raises:
        RefusedError: an option names a part that the model does not have.
    """
    found = of_model(model)
    for name in ("vision", "projector"):
        if getattr(config, name + "_lr") >= 0 and name not in found:
            what = "%s %g: the model has no part %s" % (option(name + "_lr"), getattr(config, name + "_lr"), name)
            raise RefusedError(what, "remove %s, or use a vision-language model" % option(name + "_lr"))
    if config.parts == "all":
        return
    trained = trained_parts(config.parts)
    missing = [name for name in trained if name not in found]
    if missing:
        what = "--parts %s: the model has no part %s, only %s" % (config.parts, missing[0], ",".join(found))
        raise RefusedError(what, "--parts all, or use a vision-language model")
    for name, parameter in model.named_parameters():
        if cast("Parted", model).part_of(name) not in trained:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)


def rate(config: Config, part: str) -> float:
    """Return the highest rate of a part, before ``--scale-lr``."""
    own = {"vision": config.vision_lr, "projector": config.projector_lr}.get(part, -1.0)
    return config.learning_rate if own < 0 else own


def factors(model: nn.Module, config: Config) -> Dict[str, float]:
    """Return what the learning rate is multiplied by for each trained parameter, by name."""
    trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return {name: rate(config, cast("Parted", model).part_of(name)) / config.learning_rate for name in trained}


def scale(config: Config, ranks: int) -> float:
    """Return what ``--scale-lr`` multiplies all rates by, for a training that started on ``ranks`` ranks."""
    return {"none": 1.0, "linear": float(ranks), "sqrt": math.sqrt(ranks)}[config.scale_lr]


def groups(
    trained: Mapping[str, nn.Parameter],
    factors: Mapping[str, float],
    decay: float,
    dims: Callable[[str], int],
) -> List[Dict[str, Any]]:
    """Return the groups of torch's AdamW: weights decay if they are matrices; ``factor`` is that of the rate."""
    found: Dict[Tuple[bool, float], List[nn.Parameter]] = {}
    for name, parameter in trained.items():
        found.setdefault((dims(name) >= 2, factors[name]), []).append(parameter)
    return [
        {"params": held, "weight_decay": decay if is_matrix else 0.0, "factor": times}
        for (is_matrix, times), held in sorted(found.items(), key=lambda each: each[0], reverse=True)
    ]


class Frozen:
    """The frozen weights of a model that every rank holds whole. Each rank writes a share into checkpoints.

    The frozen weights of LoRA are not here: they are in the base of the adapters.
    """

    def __init__(self, model: nn.Module, config: Config, ranks: Ranks) -> None:
        named = () if config.lora_rank else model.named_parameters()
        self._held = {name: parameter for name, parameter in named if not parameter.requires_grad}
        self._ranks = ranks

    def pieces(self) -> List[Piece]:
        """Return the pieces that this rank writes."""
        found = []
        for name, parameter in self._held.items():
            each = -(-parameter.numel() // self._ranks.world)
            start = min(self._ranks.rank * each, parameter.numel())
            numel = min(each, parameter.numel() - start)
            if numel:
                found.append(Piece(name, start, numel, FROZEN))
        return found

    def numbers(self, piece: Piece) -> torch.Tensor:
        """Return a piece's numbers."""
        return self._held[piece.name].detach().view(-1)[piece.start : piece.start + piece.numel]

    @torch.no_grad()
    def load(self, reader: Reader) -> None:
        """Load the weights of a checkpoint."""
        for name, parameter in self._held.items():
            parameter.copy_(reader.whole(name, parameter.shape))


def described(model: nn.Module, config: Config, ranks: int) -> List[str]:
    """Return lines about the highest rates, and about the parts if there are several."""
    times = scale(config, ranks)
    ours = " (--scale-lr %s: %g x the rates of one rank, for %d ranks)" % (config.scale_lr, times, ranks)
    lines = ["highest learning rate %g%s" % (config.learning_rate * times, "" if config.scale_lr == "none" else ours)]
    found = of_model(model)
    if len(found) == 1:
        return lines
    trained = trained_parts(config.parts)
    for name, count in found.items():
        state = "highest learning rate %g" % (rate(config, name) * times) if name in trained else "frozen"
        lines.append("part %s: %.1f M parameters, %s" % (name, count / 1e6, state))
    return lines
