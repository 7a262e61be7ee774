"""Reads steps and losses in lines of programs that no special format knows.

A line counts if it has a loss and its place: a step, an iteration, a position in a progress bar, or at least an epoch.
Names and numbers may be written ``name=1``, ``name: 1``, ``name 1``, ``name | 1``, as JSON (nested one level) or as a
Python dictionary, also with ``tensor(1)`` and ``np.float32(1)``.

A wrong reading is worse than none. These rules protect from one:

- every word of a name is known: ``train/loss`` and ``lm loss`` are losses; ``loss_scale``, ``aux_loss``,
  ``packet loss`` and ``max_steps`` are not. The word before a name belongs to it
- a step is a whole number, and the end of each number is visible: ``0%``, ``5s`` and ``1.2.3`` are none
- a loss has a decimal point (``loss 2310`` is an amount), no unit and no groups of digits
- the name of an evaluation, or the word before the loss ("Test: … loss 2.1"), keeps its loss out of the training's
- the summary at the end of a training (``train_runtime``) is skipped

The step in an epoch is not the step of the training; ``places`` computes that. Patterns have no unbounded
repetition, and each begins where a word begins, so that the time is linear in the length of the line.

Most lines of a log differ from an earlier one in digits only: they have the same shape. What to read in a shape, its
plan, is found once; in each line only the numbers are then taken from their places.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from functools import lru_cache
from typing import Any, Dict, Iterable, Iterator, List, Match, NamedTuple, Optional, Tuple

from . import names
from .names import Role, role

MOST = 10**15  # more steps than any training has
_OBJECTS = 20  # JSON objects that are tried in a line
_SHAPE = 2000  # characters of a line whose shape is kept

NUMBER = (
    r"[-+]?(?:\d{1,3}(?:,\d{3}){1,6}|\d{1,40})(?:\.\d{0,40})?(?:[eE][-+]?\d{1,3})?|[-+]?\.\d{1,40}|[-+]?(?i:nan|inf)"
)
NUMBERS = re.compile(NUMBER)
_END = r"(?![\w]|\.\d|,\d{3}(?!\d)|[-+]\d| ?%)"
_NAME = r"(?<![\w/.\-?&])(?=([^\W\d][\w/.\-]{0,80}))\1"
_BETWEEN = (
    r"""['"]?(?:[ \t]{0,9}[:=|\uff1a][ \t]{0,9}|[ \t]{1,9})['"\[]?(?:(?:tensor|array|np\.float\d{1,3})\()?['"]?"""
)
_PAIR = re.compile(rf"{_NAME}{_BETWEEN}({NUMBER}){_END}(?:[ ]?(?:/|of )[ ]?(\d{{1,15}})(?![\w.]))?")
_BEFORE = re.compile(r"([^\W\d_]{1,20}) {1,2}$")
_BAR = re.compile(r"\d{1,3}%\|[^|]{0,400}\| {0,2}(\d{1,15})/(\d{1,15}) \[")
_TORCHTUNE = re.compile(r"^\D{0,60}?(\d{1,9})\|(\d{1,15})\|Loss: ")
_KERAS = re.compile(r"^\s{0,9}(\d{1,12})/(\d{1,12}) {1,4}[━=\[]")
_IN_EPOCH = re.compile(r" ?\[ {0,8}\d")
_AFTER_EPOCH = re.compile(  # Epoch: [0][ 10/100], Epoch(train)  [1][ 10/100], Epoch:[1/2](0/100), Train: 0 [ 10/100
    r"(?:(?i:epoch)(?:\(train\))?|轮次|\bTrain:)[ :\[]{0,9}(\d{1,9})(?: ?/ ?\d{1,9})?[\s|:,;\-()\[\]]{1,9}"
    r"(\d{1,12}) ?/ {0,4}(\d{1,12})\b"
)
_ITER = re.compile(r"\bIter\(train\) {1,4}\[ {0,9}(\d{1,12})/(\d{1,12})\]")
_EXAMPLES = re.compile(r"\bTrain(?:ing)? Epoch:? {0,4}\d{1,9} {0,4}\[")  # PyTorch's examples/mnist: examples/all (1%)
_UNIT = re.compile(  # not in front of a number: it is a name there
    r" ?(?:[€$£¥%°元]|(?:EUR|USD|GBP|CHF|CNY|RMB|JPY|INR|[Dd]ollars?|[Ee]uros?|[Pp]ounds?|yuan|million|billion|[Mm]io"
    r"|kg|lbs?|dBm?|[Pp]oints?|pts|percent|pct|packets?|[KMGT]?i?B|bytes|k?Wh?|[cmk]?m|ms|s|sec|seconds|min|minutes"
    r"|hours|days|weeks|per|of)(?![\w/]| ?[:=]? ?[-+.\d]))"
)
_WHOLE = re.compile(r"[-+]?\d+|.*,.*")
_SPENT = re.compile(
    r"(?<![\w/.\-])(?:dt|iter time|step time|iter_time|step_time|time)['\"]?[:= ] ?(\d{1,12}(?:\.\d{1,20})?) ?(ms|s)\b"
)
_SOURCE = re.compile(r"[^\s:]{1,200}:\d{1,9}:\d{1,9}: (?:note|warning|error): |\s{0,20}>>> ")  # a quoted program
_EVALUATES = re.compile(
    r"(?<![\w/.])(?:test|testing|eval|evaluating|evaluation|val|valid|validating|validation|validate|dev)(?![\w/])"
)

_DIGITS = re.compile(  # of numbers, not of names and exponents; starts with a digit, which makes the search fast
    r"([0-9](?<!\w.)(?<![eE][-+].)[0-9]*)"
)
_GROUPS = re.compile(r"[0-9],[0-9]")
_KEY = re.compile(r"""["'][\w/ .\-]{1,80}["'] ?: """)
_NEAR = re.compile(  # the name of a loss near a number: nearly all lines without a reading have none
    rf"(?:loss|Loss|LOSS|损失)[\w/.\-]{{0,80}}(?: {{1,2}}[^\W\d_]{{1,20}})?{_BETWEEN}[-+]?(?:[.\d]|(?i:nan|inf))"
)


class _Values:
    """Collects the values of a line: the best name of each field."""

    def __init__(self) -> None:
        self.found: Dict[str, Any] = {}
        self.at = 0  # the start of the values in the line
        self.evaluates = False  # whether the words before the loss name an evaluation
        self._orders: Dict[str, int] = {}

    def add(self, role: Role, number: str, total: Optional[str] = None) -> bool:
        """Add a number unless a better name of its field has one."""
        order, field = role.order, role.field
        if field in ("step", "rank"):
            value: Any = whole(number)
        else:
            value = decimal(number)
            if field == "epoch" and value is not None and not 0 <= value < MOST:
                return False
        if value is None:
            return False
        if field == "eval_loss" and role.name:
            order += 100
        if field in self._orders and self._orders[field] <= order:
            return False
        self._orders[field], self.found[field] = order, value
        if field == "eval_loss":
            self.found["set"] = role.name
        elif field == "epoch" and total and whole(total):
            self.found["epochs"] = whole(total)
        elif field == "step":
            self.found.pop("total", None)
            last = whole(total) if total else None
            if last is not None and last >= value:
                self.found["total"] = last
            self.found["within"] = order  # 0: a global step
        return True


class _Number(NamedTuple):
    """Where a number is in the parts of a line: its digits, and the characters before and after them."""

    before: str
    first: int
    end: int
    after: str

    def text(self, parts: List[str]) -> str:
        """The number in a line of this shape."""
        if self.end - self.first == 1:
            return self.before + parts[self.first] + self.after
        return self.before + "".join(parts[self.first : self.end]) + self.after


class _Pair(NamedTuple):
    role: Role
    number: _Number
    total: Optional[_Number]
    evaluates: bool


class _Plan(NamedTuple):
    """What to read in lines of one shape.

    ``numbered``: names have digits, so that lines of this shape may have different names. ``part`` and ``offset``:
    where the first pair starts. ``spent``: a time per step; ``unit``: its milliseconds.
    """

    pairs: Tuple[_Pair, ...]
    numbered: bool = False
    part: int = 0
    offset: int = 0
    spent: Optional[_Number] = None
    unit: float = 1.0


def values(text: str) -> Tuple[Dict[str, Any], int]:
    """The values in a line without escape sequences, and where they start; empty without any.

    Besides the names of ``Reading`` there are ``within`` (the step counts from the start of an epoch, or may do so),
    ``set`` (the data set of the evaluation) and ``rank``.
    """
    if "train_runtime" in text or _torn(text):
        return {}, 0
    found = _json(text) if '{"' in text else None
    if found is None and _NEAR.search(text):
        found = _pairs(text)
    result = _judge(found, text) if found else {}
    return result, found.at if found and result else 0


def _torn(text: str) -> bool:
    """Whether a line has a part of an object, whose step or last digits may be missing."""
    opened, closed = text.count("{"), text.count("}")
    if closed > opened:
        return True
    return (opened != closed or not opened) and ('"' in text or "'" in text) and _KEY.search(text) is not None


def _pairs(text: str) -> Optional[_Values]:
    parts = _DIGITS.split(text)
    if _GROUPS.search(text):  # the lengths of groups matter: 7,282
        same = parts.copy()
        same[1::2] = ["0" * len(digits) for digits in parts[1::2]]
        shape = "".join(same)
    else:
        shape = "0".join(parts[::2])
    plan = (_plan if len(shape) <= _SHAPE else _plan.__wrapped__)(shape)
    if plan.numbered:
        plan = _plan.__wrapped__(text)
    if not plan.pairs:
        return None
    found = _Values()
    for pair in plan.pairs:
        if found.add(pair.role, pair.number.text(parts), pair.total and pair.total.text(parts)):
            found.evaluates = pair.evaluates if pair.role.field == "loss" else found.evaluates
    if plan.spent:
        found.found["ms"] = float(plan.spent.text(parts)) * plan.unit
    found.at = sum(map(len, parts[: plan.part])) + plan.offset
    return found


@lru_cache(maxsize=512)  # most lines of a log differ in their digits only
def _plan(shape: str) -> _Plan:
    """What to read in lines that are equal to ``shape``, but for the digits of numbers."""
    pairs, numbered, starts = [], False, []
    digits = [found.span() for found in _DIGITS.finditer(shape)]
    tested = _evaluates(shape)
    for pair in () if _SOURCE.match(shape) else _PAIR.finditer(shape):
        name, at = pair.group(1), pair.start()
        before = _BEFORE.search(shape, max(0, at - 24), at)
        total = _number(shape, pair.span(3), digits) if pair.group(3) else None
        known = role(name, before.group(1) if before else "")
        if name.lower() in names.FOREIGN:
            return _Plan(())
        if name in ("Train", "train") and _IN_EPOCH.match(shape, pair.end()):
            known, total = Role("epoch", 1), None  # timm: Train: 0 [ 100/1251 (  8%)]
        if known is None or (known.order == names.BATCH and known.field == "step" and total is None):
            continue
        if known.field in ("loss", "eval_loss") and not _is_loss(shape, pair):
            continue
        evaluates = known.field == "loss" and tested <= at and "train" not in name.lower()
        pairs.append(_Pair(known, _number(shape, pair.span(2), digits), total, evaluates))
        numbered = numbered or any(map(str.isdigit, name))
        starts.append(before.start() if before else at)
    if not {"loss", "eval_loss"} & {pair.role.field for pair in pairs}:
        return _Plan((), numbered)
    part = sum(start < starts[0] for start, _ in digits)
    offset = starts[0] - (digits[part - 1][1] if part else 0)
    spent = _SPENT.search(shape)
    where = _number(shape, spent.span(1), digits) if spent else None
    return _Plan(tuple(pairs), numbered, 2 * part, offset, where, 1e3 if spent and spent.group(2) == "s" else 1.0)


def _is_loss(shape: str, pair: Match[str]) -> bool:
    """Whether a number is written as that of a loss: no unit, and a decimal point unless the name is quoted."""
    quoted = shape[pair.end(1) : pair.end(1) + 1] in ("'", '"')
    return not _UNIT.match(shape, pair.end()) and (quoted or not _WHOLE.fullmatch(pair.group(2)))


def _number(shape: str, span: Tuple[int, int], digits: List[Tuple[int, int]]) -> _Number:
    """A number by the parts of its line."""
    first, last = bisect_left(digits, (span[0], 0)), bisect_left(digits, (span[1], 0)) - 1
    if last < first:  # nan, inf
        return _Number(shape[span[0] : span[1]], 0, 0, "")
    before, after = shape[span[0] : digits[first][0]], shape[digits[last][1] : span[1]]
    return _Number(before, 2 * first + 1, 2 * last + 2, after)


_DECODER = json.JSONDecoder()


def _json(text: str) -> Optional[_Values]:
    """The values of the first JSON object with a loss in a line; None if there is no object."""
    at, seen = text.find('{"'), False
    for _ in range(_OBJECTS):
        if at < 0:
            break
        try:
            content, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            break
        seen = True
        found = fields(content.items())
        if "loss" in found.found or "eval_loss" in found.found:
            found.at, found.evaluates = at, at > 0 and _evaluates(text) <= at
            return found
        at = text.find('{"', end)
    return _Values() if seen else None


def fields(items: Iterable[Tuple[Any, Any]]) -> _Values:
    """The values of a JSON object, nested one level: ``{"train": {"loss": 1}}`` is ``train/loss``."""
    found = _Values()
    for name, value in items:
        if isinstance(value, dict):
            for inner, number in value.items():
                _field(found, "%s/%s" % (name, inner), number)
        else:
            _field(found, name, value)
    return found


def _field(found: _Values, name: Any, value: Any) -> None:
    known = role(str(name))
    if known is None or isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return
    if known.field != "step" or known.order != names.BATCH:
        found.add(known, str(value)[:60])


def _judge(found: _Values, text: str) -> Dict[str, Any]:
    """The values, if the line has a loss and its place."""
    result = found.found
    if "loss" not in result and "eval_loss" not in result:
        return {}
    keyed = "step" in result
    if keyed:
        result["within"] = int(result["within"] > 0 and ("epoch" in result or result["within"] >= names.INDEX))
    else:
        _position(text, result)
    if "loss" in result and found.evaluates:
        loss = result.pop("loss")
        if keyed and "eval_loss" not in result:
            result["eval_loss"] = loss
        elif "eval_loss" not in result:
            return {}
    epoch = result.get("epoch")
    if epoch is not None and not math.isfinite(epoch):
        del result["epoch"]
    return result


def _evaluates(text: str) -> float:
    """The end of the first word of a line that names an evaluation."""
    found = _EVALUATES.search(text.lower())
    return found.end() if found else math.inf


def _position(text: str, result: Dict[str, Any]) -> None:
    """Find the place in a line that has no step by name."""
    tune = _TORCHTUNE.match(text)
    if tune:
        result.update(step=int(tune.group(2)), epoch=float(tune.group(1)), within=0)
        return
    if _EXAMPLES.search(text):
        result["examples"] = 1
        return
    bar = _BAR.search(text)
    if bar and not int(bar.groups()[-2]):  # a bar that starts again still has the loss of its end
        result.clear()
        return
    found = bar or _KERAS.search(text) or _ITER.search(text)
    after = None if found else _AFTER_EPOCH.search(text)
    if after:
        result.setdefault("epoch", float(after.group(1)))
    place = found or after
    if place:
        step, total = map(int, place.groups()[-2:])
        if step <= total:
            result.update(step=step, total=total, within=1)


def whole(number: str) -> Optional[int]:
    """A step: a whole number, also ``188.0``; rounded ones (``2e+3``) are none."""
    if number.isdigit() and len(number) < 16:  # nearly all
        return int(number)
    try:
        value = float(number.replace(",", "")) if "e" not in number.lower() else math.nan
    except ValueError:
        return None
    return int(value) if 0 <= value < MOST and value == int(value) else None


def decimal(number: str) -> Optional[float]:
    """A number as text, or None."""
    try:
        return float(number.replace(",", "") if "," in number else number)
    except ValueError:
        return None


def read_line(text: str) -> Iterator[Tuple[Dict[str, Any], int]]:
    """The values in a line, if there are any that count."""
    found, at = values(text)
    if found:
        yield found, at
