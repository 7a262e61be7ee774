"""fp8 for the matrices where it is faster: torchao's float8 training, chosen for each size by measuring it.

torchao (https://github.com/pytorch/ao/tree/main/torchao/float8) scales inputs, weights and gradients to 8 bits in every
step. ``tensorwise`` has one scale per tensor and is the fastest; ``rowwise`` has one per row and is more precise. Small
matrices lose more time to scaling than they gain. Weights, optimizer and checkpoints stay as they are.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import torch
from torch import nn

from trainer.lm.errors import RefusedError

RECIPES = ("tensorwise", "rowwise")
_DIVISOR = 16  # sizes must be multiples of it
_FIX = "--fp8 off"
GAIN = 0.95  # of bf16's time that fp8 may take at most: the times of single matrices vary by a few percent
_ROUNDS = 5


class Choice(NamedTuple):
    """What was measured for matrices of one size: milliseconds forward and backward, and the names of the layers."""

    out: int
    width: int
    recipe: str  # "" if bf16 is the fastest
    times: Dict[str, float]  # by recipe; "" is bf16
    names: List[str]


def check(device: torch.device) -> None:
    """Refuse fp8 where it cannot work.

    Raises:
        RefusedError: no GPU, one without fp8 (before Ada and Hopper), or torchao is not installed.
    """
    if device.type != "cuda":
        raise RefusedError("--fp8 needs a GPU, not %s" % device.type, _FIX)
    if torch.cuda.get_device_capability(device) < (8, 9):
        raise RefusedError("--fp8: %s has no fp8" % torch.cuda.get_device_name(device), _FIX)
    if importlib.util.find_spec("torchao") is None:
        raise RefusedError("--fp8 needs the package torchao, which is not installed", "pip install torchao; " + _FIX)


def convert(
    model: nn.Module,
    recipe: str,
    tokens: int,
    device: torch.device,
    agree: Callable[[Sequence[float]], Sequence[float]] = list,
) -> List[Choice]:
    """Replace the matrices of the layers that are faster in fp8. Return what was measured.

    Args:
        model: a decoder; its output layer and embedding stay as they are.
        recipe: ``auto`` measures both recipes; else only this one is compared with bf16.
        tokens: of a micro-step.
        device: a GPU.
        agree: returns times that all ranks have in common for those of this rank.
    """
    by_size: Dict[Tuple[int, int], List[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.startswith("layers."):
            by_size.setdefault((module.out_features, module.in_features), []).append(name)
    choices = []
    for (out, width), names in by_size.items():
        recipes = [] if out % _DIVISOR or width % _DIVISOR else [each for each in RECIPES if recipe in ("auto", each)]
        kinds = ["", *recipes]
        measured = agree([_measured(out, width, tokens, device, each) for each in kinds])
        times = dict(zip(kinds, measured))  # noqa: B905 - one for each
        best = min(times, key=lambda each: times[each] * (1 if each else GAIN))
        choices.append(Choice(out, width, best, times, names))
        if best:
            _replace(model, set(names), best)
    return choices


def _config(recipe: str) -> Any:
    from torchao.float8 import Float8LinearConfig  # noqa: PLC0415 - torchao is optional

    return Float8LinearConfig.from_recipe_name(recipe)


def _replace(model: nn.Module, names: Any, recipe: str) -> None:
    from torchao.float8 import convert_to_float8_training  # noqa: PLC0415 - torchao is optional

    convert_to_float8_training(model, config=_config(recipe), module_filter_fn=lambda _, name: name in names)


def _measured(out: int, width: int, tokens: int, device: torch.device, recipe: str) -> float:
    """Return the milliseconds of a matrix forward and backward, compiled, the median of a few rounds."""
    layer = nn.Sequential(nn.Linear(width, out, bias=False, device=device, dtype=torch.bfloat16))
    if recipe:
        _replace(layer, {"0"}, recipe)
    torch._dynamo.reset()  # noqa: SLF001 - else a new size counts as a dynamic one, whose kernels are slower
    run: Callable[..., torch.Tensor] = torch.compile(layer, dynamic=False)
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(tokens, out, device=device, dtype=torch.bfloat16)
    times = []
    for _ in range(_ROUNDS + 2):  # the first compiles
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run(x).backward(gradient)
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return sorted(times[2:])[_ROUNDS // 2]


def described(choice: Choice) -> str:
    """Return a line about a size: ``fp8: 512 x 256 (32 layers): tensorwise; bfloat16 4.10 ms, tensorwise 2.91 ms``."""
    size = "fp8: %d x %d (%d layers)" % (choice.out, choice.width, len(choice.names))
    times = ", ".join("%s %.2f ms" % (name or "bfloat16", time) for name, time in choice.times.items())
    return "%s: %s; %s" % (size, choice.recipe or "bfloat16", times)
