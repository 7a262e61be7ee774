"""Contradictions between a DeepSpeed file and the arguments of transformers' Trainer, and what resolves them.

transformers (5.6, ``integrations/deepspeed.py``, ``HfTrainerDeepSpeedConfig``) compares the two after it has loaded the
model, and refuses to train. An argument that is not given counts with its default.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from trainer.ds_config.check.context import TRAINER, Context
from trainer.ds_config.check.finding import ERROR, Finding
from trainer.ds_config.check.keys import AUTO, finding
from trainer.ds_config.check.reading import Document, plain
from trainer.ds_config.check.rules import whole
from trainer.words import read

# Defaults of TrainingArguments (transformers 5.6).
DEFAULTS: Dict[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "learning_rate": 5e-5,
    "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0, "warmup_steps": 0,
    "max_steps": -1, "fp16": False, "bf16": False, "fp16_full_eval": False, "bf16_full_eval": False,
    "auto_find_batch_size": False,
}  # fmt: skip
_BOOLS = frozenset({"fp16", "bf16", "fp16_full_eval", "bf16_full_eval", "auto_find_batch_size"})
_TRUE, _FALSE = frozenset({"true", "yes", "y", "t", "1"}), frozenset({"false", "no", "n", "f", "0"})
_SHORT = {"per_gpu_train_batch_size": "per_device_train_batch_size"}
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Rule:
    """A key that must equal arguments.

    Attributes:
        key: with dots.
        names: of the arguments.
    """

    key: str
    names: Tuple[str, ...]

    @property
    def path(self) -> Tuple[str, ...]:
        """The key as a path."""
        return tuple(self.key.split("."))


RULES = (
    Rule("train_micro_batch_size_per_gpu", ("per_device_train_batch_size",)),
    Rule("gradient_accumulation_steps", ("gradient_accumulation_steps",)),
    Rule("gradient_clipping", ("max_grad_norm",)),
    Rule("optimizer.params.lr", ("learning_rate",)),
    Rule("optimizer.params.betas", ("adam_beta1", "adam_beta2")),
    Rule("optimizer.params.eps", ("adam_epsilon",)),
    Rule("optimizer.params.weight_decay", ("weight_decay",)),
    Rule("scheduler.params.warmup_max_lr", ("learning_rate",)),
    Rule("scheduler.params.warmup_num_steps", ("warmup_steps",)),
    Rule("scheduler.params.total_num_steps", ("max_steps",)),
    Rule("fp16.enabled", ("fp16", "fp16_full_eval")),
    Rule("bf16.enabled", ("bf16", "bf16_full_eval")),
)


def parse(words: Sequence[str]) -> Dict[str, Any]:
    """The arguments of a command line that the rules compare, and all others as text; a flag is ``true``."""
    found: Dict[str, Any] = {}
    for option in read(words):
        name = option.name
        if not name.isidentifier():  # plain words, or the key of a nested configuration
            continue
        value = option.values[0] if option.values else "true"
        if name.startswith("no_") and name[3:] in _BOOLS:
            name, value = name[3:], "false"
        found[_SHORT.get(name, name)] = typed(name, value)
    return found


def typed(name: str, value: Any) -> Any:
    """The value of an argument as the Trainer has it; a text that is no value of this argument stays text."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if name in _BOOLS or name not in DEFAULTS:
        lowered = text.lower()
        if name in _BOOLS and lowered in _TRUE | _FALSE:
            return lowered in _TRUE
        return {"true": True, "false": False}.get(lowered, value)
    if len(text) > 40 or not _NUMBER.fullmatch(text):
        return value
    number = float(text)
    return int(number) if isinstance(DEFAULTS[name], int) and number.is_integer() and name != "warmup_steps" else number


def check_arguments(document: Document, context: Context) -> Iterator[Finding]:
    """The contradictions."""
    if context.program != TRAINER or context.arguments is None or not isinstance(document.data, dict):
        return
    for rule in RULES:
        given = _get(document.data, rule.path)
        if given is None or given == AUTO or not set(rule.names).isdisjoint(context.unknown):
            continue
        wanted = _wanted(rule, context)
        if wanted is not None and given != wanted:
            yield _contradiction(document, rule, given, wanted, context)
    yield from _total(document, context)


def _get(data: Any, path: Sequence[str]) -> Any:
    for name in path:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _argument(name: str, context: Context) -> Any:
    value = context.value(name)
    return DEFAULTS[name] if value is None else value


def _wanted(rule: Rule, context: Context) -> Any:
    """The value that the key must have; None if it is not known."""
    values = [_argument(name, context) for name in rule.names]
    if any(isinstance(value, str) for value in values):
        return None  # not a value of this argument: the script reports it
    if rule.key.endswith(".enabled"):
        return any(values)
    if rule.key == "train_micro_batch_size_per_gpu" and _argument("auto_find_batch_size", context) is True:
        return None
    if rule.key == "scheduler.params.total_num_steps":
        return values[0] if values[0] > 0 else None  # else the number of samples decides
    if rule.key == "scheduler.params.warmup_num_steps":
        return _warmup(values[0], context)
    return values if len(values) > 1 else values[0]


def _warmup(steps: float, context: Context) -> Optional[int]:
    """The warm-up steps; None if they are a share of an unknown number."""
    ratio = context.value("warmup_ratio")
    steps = ratio if isinstance(ratio, (int, float)) and not isinstance(ratio, bool) and ratio > 0 else steps
    if steps >= 1 or steps == 0:
        return int(steps)
    return None if context.steps is None else -int(-context.steps * steps // 1)


def _contradiction(document: Document, rule: Rule, given: Any, wanted: Any, context: Context) -> Finding:
    names = " and ".join(rule.names[:1] if rule.key.endswith(".enabled") else rule.names)
    how = "" if any(context.value(name) is not None for name in rule.names) else ", its default"
    what = f"{rule.key} is {_text(given)}, but {names} is {_text(wanted)}{how}"
    fix = resolving(rule, given, yaml=context.yaml)
    return finding(document, rule.path, ERROR, what, "transformers refuses to train",
                   f'{fix}; or write "auto"' if fix else 'write "auto"')  # fmt: skip


def resolving(rule: Rule, given: Any, *, yaml: bool) -> str:
    """The arguments that agree with a value of the file; empty if there are none."""
    if isinstance(given, bool) and rule.key.endswith(".enabled"):
        return _option(rule.names[0], given, yaml=yaml)
    values: List[Any] = list(given) if isinstance(given, list) else [given]
    numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in values)
    if len(values) != len(rule.names) or not numbers:
        return ""
    words = [_option(name, value, yaml=yaml) for name, value in zip(rule.names, values)]  # noqa: B905 - Python 3.8
    return ("; " if yaml else " ").join(words)


def _option(name: str, value: Any, *, yaml: bool) -> str:
    if yaml:
        return f"{name}: {_yaml(value)}"
    if value is True:
        return f"--{name}"
    return f"--{name} {_text(value) if not isinstance(value, bool) else value}"


def _yaml(value: Any) -> str:
    """A value in YAML 1.1, in which 1e-05 is a string."""
    text = _text(value)
    return text.replace("e", ".0e", 1) if isinstance(value, float) and "e" in text and "." not in text else text


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value[:8])) + "]"
    return plain(value)[:60]


def _total(document: Document, context: Context) -> Iterator[Finding]:
    """``train_batch_size``: the product of micro-batch, accumulation and ranks."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    given = whole(document.data.get("train_batch_size"))
    micro, accumulation = (whole(_argument(name, context)) for name in names)
    is_known = set(names).isdisjoint(context.unknown) and _argument("auto_find_batch_size", context) is not True
    if not given or not context.world or not micro or not accumulation or not is_known:
        return
    product = micro * accumulation * context.world
    if given == product:
        return
    what = f"train_batch_size is {given}, but {micro} * {accumulation} * {context.world} ranks are {product}"
    steps, rest = divmod(given, micro * context.world)
    fix = "" if rest or not steps else _option("gradient_accumulation_steps", steps, yaml=context.yaml) + "; or "
    yield finding(document, ("train_batch_size",), ERROR, what, "transformers refuses to train", f'{fix}write "auto"')


def matching(config: Mapping[str, Any], *, yaml: bool = False) -> List[str]:
    """The arguments that agree with a configuration, as options, or as lines of a LLaMA-Factory config."""
    found: Dict[str, str] = {}
    for rule in RULES:
        given = _get(config, rule.path)
        is_off = rule.key.endswith(".enabled") and given is not True
        if given is None or given == AUTO or is_off:
            continue
        option = resolving(rule, given, yaml=yaml)
        if option:
            found.setdefault(option, option)
    return list(found)
