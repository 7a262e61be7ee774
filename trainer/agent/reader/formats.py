"""Parses single lines of trainers' logs.

==============  ==================================================================================================
``trainer_log`` LLaMA-Factory's ``trainer_log.jsonl`` (0.9.5, ``train/callbacks.py``), which ``trainer.lm`` writes too
``progress``    an event of clusterctl's own agent, with the values of ``trainer_log``
``trainer``     transformers' Trainer, 4.x and 5.x (``trainer_callback.py``): a dictionary, ``{'loss': …}``
``deepspeed``   DeepSpeed 0.19 (``runtime/engine.py``, ``utils/timer.py``, ``runtime/pipe/engine.py``)
``nanogpt``     nanoGPT's ``train.py``, and ``trainer.lm``, which adds more values to the same line
``megatron``    Megatron-LM's ``training/training.py``
==============  ==================================================================================================

Colour codes and other escape sequences are removed from a line first. A number counts only if the format shows its end.
So a line that another process interrupts gives no value rather than a part of a number. Times are milliseconds per
step.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Callable, Dict, Iterator, NamedTuple, Optional, Pattern

from ..contract.untrusted import whole

# Every line with values has one of these words. Searching for them is much cheaper than parsing.
MARKS = ("loss", "Loss", "LOSS", "损失", "step", "tokens per iteration", "train_batch_size .")

# CSI (colours, cursor), OSC (window titles) and two-character sequences of ECMA-48; an incomplete one stays.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]+[0-~]|[0-Z\\^_c])")

_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf|NAN|INF)"
_BEGINS, _ENDS = r"(?<![A-Za-z_])", r"(?![\w.+-])"

_DICTIONARY = re.compile(r"\{'[^{}\n]*\}")
_PAIR = re.compile(rf"'(\w+)': '?({_NUMBER})'?(?=[,}}])")
_STEP = re.compile(rf"{_BEGINS}step=(\d{{1,15}}), skipped=\d+, lr=\[(?:np\.float\d+\()?({_NUMBER})?[,)\]]")
_SPEED = re.compile(
    rf"{_BEGINS}global_step=(\d{{1,15}}), RunningAvgSamplesPerSec=[^,]{{1,40}}, CurrSamplesPerSec=({_NUMBER}),"
)
_TIMES = re.compile(
    rf"time \(ms\) \| fwd: ({_NUMBER}) \| bwd: ({_NUMBER}) \|[^\n]{{0,200}}? \| step: (\d+\.\d\d){_ENDS}"
)
_PIPE = re.compile(
    rf"{_BEGINS}steps: (\d{{1,15}}) loss: ({_NUMBER}) (?:[^|]{{0,200}}? )?iter time \(s\): ({_NUMBER}) "
    rf"samples/sec: \d+\.\d{{3}}{_ENDS}"
)
_BATCH = re.compile(r"\] +train_batch_size \.+ (\d{1,15})\s*$")
_ITER = re.compile(rf"{_BEGINS}iter (\d{{1,15}}): loss ({_NUMBER}), time ({_NUMBER})ms\b")
_MORE = re.compile(rf"(?:, mfu [-\w.]+%)?, lr ({_NUMBER}), norm ({_NUMBER}), tokens/s ({_NUMBER}),")
_EVALUATED = re.compile(rf"{_BEGINS}step (\d{{1,15}}): (?:train loss {_NUMBER}, )?val loss ({_NUMBER}){_ENDS}")
_TOKENS = re.compile(_BEGINS + r"tokens per iteration will be: (\d[\d,]{0,18})\s*$")
_ITERATION = re.compile(_BEGINS + r"iteration +(\d{1,15})/ *(\d{1,15}) \|(.*)\|")
_COLUMN = re.compile(rf" *([\w ()]+?): +({_NUMBER}) *")
_VALIDATED = re.compile(
    rf"{_BEGINS}validation loss at iteration (\d{{1,15}})(?: on validation set)? \| lm loss value: ({_NUMBER}) \|"
)
_LOGGING_STEPS = re.compile(_BEGINS + r"logging_steps=(\d{1,15})(?:\.0)?,")
_FIRST_STEP = re.compile(r"logging_first_step=True,")
_RESUMED = re.compile(_BEGINS + r"(?:Continuing training from|with epoch \d+ and) global step (\d{1,15})\s*$")

_TRAINER_LOG = {  # theirs: ours
    "current_steps": "step",
    "total_steps": "total",
    "loss": "loss",
    "lr": "lr",
    "epoch": "epoch",
    "eval_loss": "eval_loss",
    "throughput": "tokens_per_second",
    "tokens_per_second": "tokens_per_second",
    "grad_norm": "grad_norm",
    "ms": "ms",
}
_PROGRESS = {**{ours: ours for ours in _TRAINER_LOG.values()}, "throughput": "tokens_per_second"}
_OF_ALL = re.compile(r"'global_step/max_steps': '(\d{1,15})/(\d{1,15})'")  # ms-swift
_TRAINER = {
    "iter": "step",
    "iteration": "step",
    "step": "step",
    "global_step": "step",
    "lr": "lr",
    "loss": "loss",
    "eval_loss": "eval_loss",
    "learning_rate": "lr",
    "grad_norm": "grad_norm",
    "epoch": "epoch",
    "train_tokens_per_second": "tokens_per_second",
    "throughput": "tokens_per_second",
}
_MEGATRON = {
    "lm loss": "loss",
    "lm_loss": "loss",  # GPT-NeoX
    "learning rate": "lr",
    "grad norm": "grad_norm",
    "elapsed time per iteration (ms)": "ms",
}
_WHOLE = {"step", "total"}
_MOST = 10**15  # more steps than any training has
_DECODER = json.JSONDecoder()


class LogLine(NamedTuple):
    """The values in one line.

    ``values`` has, as far as the line contains them, ``step`` and ``total`` (whole numbers), ``loss``, ``eval_loss``,
    ``lr``, ``grad_norm``, ``epoch``, ``ms`` and ``tokens_per_second`` (floats, also NaN and infinity). It also has
    facts about other lines: ``batch`` (examples per step), ``tokens`` (per step), ``samples_per_second``,
    ``logging_steps``, ``first_step`` (1: the first step has a line too), ``from_step`` (the step from which a resumed
    run continues), ``elapsed`` (whole seconds).
    """

    source: str
    values: Dict[str, Any]
    at: int  # the start of the values in the line without escape sequences


def plain(text: str) -> str:
    """Remove the escape sequences of terminals."""
    return _ESCAPES.sub("", text) if "\x1b" in text else text


def parse_all(text: str) -> Iterator[LogLine]:
    """All values in a line: processes that write at the same time may join their lines."""
    text = plain(text)
    for mark, parse in _PARSERS:
        if mark in text:
            yield from parse(text)


def _dictionary(text: str) -> Iterator[LogLine]:
    for found in _DICTIONARY.finditer(text):
        values = {_TRAINER[name]: float(value) for name, value in _PAIR.findall(found.group()) if name in _TRAINER}
        if "loss" in values or "eval_loss" in values:
            number = values.pop("step", -1.0)
            if 0 <= number < _MOST and number == int(number):
                values["step"] = int(number)
            place = _OF_ALL.search(found.group())
            if place:
                values.update(step=int(place.group(1)), total=int(place.group(2)))
            yield LogLine("trainer", values, found.start())


def _json(text: str) -> Iterator[LogLine]:
    at = text.find("{")
    while at >= 0:
        try:
            content, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):  # incomplete: another object may start inside
            at = text.find("{", at + 1)
            continue
        if "current_steps" in content or content.get("event") == "progress":
            yield from _record(content, at)
        at = text.find("{", end)


def _record(content: Dict[str, Any], at: int) -> Iterator[LogLine]:
    source, names = ("trainer_log", _TRAINER_LOG) if "current_steps" in content else ("progress", _PROGRESS)
    values = {ours: _plain(content[theirs], ours) for theirs, ours in names.items() if theirs in content}
    values["elapsed"] = _seconds(content.get("elapsed_time"))
    values = {name: value for name, value in values.items() if value is not None}
    if "step" in values:
        yield LogLine(source, values, at)


def _nanogpt(text: str) -> Iterator[LogLine]:
    for found in _ITER.finditer(text):
        number, loss, ms = found.groups()
        values = {"step": int(number), "loss": float(loss), "ms": float(ms)}
        more = _MORE.match(text, found.end())  # trainer.lm adds these
        if more:
            lr, norm, speed = map(float, more.groups())
            values.update(lr=lr, grad_norm=norm, tokens_per_second=speed)
        yield LogLine("nanogpt", values, found.start())


def _megatron(text: str) -> Iterator[LogLine]:
    for found in _ITERATION.finditer(text):
        columns = filter(None, map(_COLUMN.fullmatch, found.group(3).split("|")))
        values = {_MEGATRON[each.group(1)]: float(each.group(2)) for each in columns if each.group(1) in _MEGATRON}
        if values:
            values.update(step=int(found.group(1)), total=int(found.group(2)))
            yield LogLine("megatron", values, found.start())


def _pipeline(text: str) -> Iterator[LogLine]:
    for found in _PIPE.finditer(text):
        number, loss, seconds = found.groups()
        yield LogLine(
            "deepspeed", {"step": int(number), "loss": float(loss), "ms": float(seconds) * 1e3}, found.start()
        )


def _times(text: str) -> Iterator[LogLine]:
    for found in _TIMES.finditer(text):  # the global timers: the sum over a step's micro-steps
        yield LogLine("deepspeed", {"ms": sum(map(float, found.groups()))}, found.start())


def _step_and(source: str, pattern: Pattern[str], name: str) -> Callable[[str], Iterator[LogLine]]:
    """A parser for a step and one number."""

    def parse(text: str) -> Iterator[LogLine]:
        for found in pattern.finditer(text):
            number, value = found.groups()
            yield LogLine(source, {"step": int(number), **({name: float(value)} if value else {})}, found.start())

    return parse


def _fact(source: str, pattern: Pattern[str], name: str) -> Callable[[str], Iterator[LogLine]]:
    """A parser for a fact about other lines."""

    def parse(text: str) -> Iterator[LogLine]:
        for found in pattern.finditer(text):
            number = int(found.group(1).replace(",", "")) if found.groups() else 1
            yield LogLine(source, {name: number}, found.start())

    return parse


_PARSERS = (  # by a word in each of its lines
    ("loss': ", _dictionary),
    ('"current_steps"', _json),
    ('"event": "progress"', _json),
    (": loss ", _nanogpt),
    ("val loss ", _step_and("nanogpt", _EVALUATED, "eval_loss")),
    ("skipped=", _step_and("deepspeed", _STEP, "lr")),
    ("CurrSamplesPerSec=", _step_and("deepspeed", _SPEED, "samples_per_second")),
    ("time (ms) | fwd: ", _times),
    ("iter time (s): ", _pipeline),
    (" iteration ", _megatron),
    ("validation loss at ", _step_and("megatron", _VALIDATED, "eval_loss")),
    ("train_batch_size .", _fact("deepspeed", _BATCH, "batch")),
    ("tokens per iteration", _fact("nanogpt", _TOKENS, "tokens")),
    ("logging_steps=", _fact("trainer", _LOGGING_STEPS, "logging_steps")),
    ("logging_first_step=True", _fact("trainer", _FIRST_STEP, "first_step")),
    (" global step ", _fact("trainer", _RESUMED, "from_step")),
)


def _plain(value: Any, name: str) -> Any:
    """A valid number, or None. null means a value that is not finite, as the agent writes it."""
    if name in _WHOLE:
        return whole(value, _MOST)
    if value is None:
        return math.nan
    if isinstance(value, int):
        return None if isinstance(value, bool) or value.bit_length() > 1000 else float(value)
    return value if isinstance(value, float) else None


def _seconds(text: Any) -> Optional[int]:
    """``1 day, 2:03:04`` or ``0:00:02`` (the text of a timedelta of whole seconds) as seconds."""
    found = re.fullmatch(r"(?:(\d{1,6}) days?, )?(\d{1,9}):(\d\d):(\d\d)", text) if isinstance(text, str) else None
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
