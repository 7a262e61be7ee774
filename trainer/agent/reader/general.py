"""Reads steps and losses in lines of programs that no special format knows.

A line counts if it has a loss and its place: a step, an iteration, a position in a progress bar, or at least an epoch.
Names and numbers may be written ``name=1``, ``name: 1``, ``name 1``, ``name | 1``, as JSON (nested one level) or as a
Python dictionary, also with ``tensor(1)`` and ``np.float32(1)``.

A wrong reading is worse than none. These rules protect from one:

- every word of a name is known: ``train/loss`` and ``lm loss`` are losses; ``loss_scale``, ``aux_loss``,
  ``packet loss`` and ``max_steps`` are not. The word before a name belongs to it
- a step is a whole number, and the end of each number is visible: ``0%``, ``5s`` and ``1.2.3`` are none
- the name of an evaluation, or the word before the loss ("Test: … loss 2.1"), keeps its loss out of the training's
- the summary at the end of a training (``train_runtime``) is skipped

The step in an epoch is not the step of the training; ``Places`` computes that. Patterns have no unbounded
repetition, and each begins where a word begins, so that the time is linear in the length of the line.
"""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

# In each line with a loss; searching for them is cheap.
LOSSES = ("loss", "Loss", "LOSS", "损失")
MOST = 10**15  # more steps than any training has
_OBJECTS = 20  # JSON objects that are tried in a line

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
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_a-zA-Z]+")
_BAR = re.compile(r"\d{1,3}%\|[^|]{0,400}\| {0,2}(\d{1,15})/(\d{1,15}) \[")
_TORCHTUNE = re.compile(r"^\D{0,60}?(\d{1,9})\|(\d{1,15})\|Loss: ")
_KERAS = re.compile(r"^\s{0,9}(\d{1,12})/(\d{1,12}) {1,4}[━=\[]")
_BRACKET = re.compile(r"\[ {0,8}(\d{1,12}) ?/ ?(\d{1,12})\b")
_EXAMPLES = re.compile(
    r"\bTrain(?:ing)? Epoch:? {0,4}\d{1,9} {0,4}\["
)  # examples/mnist of PyTorch: [examples/all (1%)]
_SPENT = re.compile(
    r"(?<![\w/.\-])(?:dt|iter time|step time|iter_time|step_time|time)['\"]?[:= ] ?(\d{1,12}(?:\.\d{1,20})?) ?(ms|s)\b"
)
_COMPILER = re.compile(r"[^\s:]{1,200}:\d{1,9}:\d{1,9}: (?:note|warning|error): ")
_EVALUATES = re.compile(
    r"(?<![\w/.])(?:test|testing|eval|evaluating|evaluation|val|valid|validating|validation|dev)(?![\w/])"
)

_EVAL = frozenset(
    ["eval", "evaluation", "val", "valid", "validation", "dev", "验证", "评估", "验证集", "验证损失", "评估损失"]
)
_TEST = frozenset(["test", "testing", "best", "min", "max", "测试", "测试损失"])
_PLAIN = frozenset(
    [
        "train",
        "training",
        "trainer",
        "lm",
        "total",
        "avg",
        "average",
        "mean",
        "running",
        "current",
        "cur",
        "reduced",
        "step",
        "batch",
        "iter",
        "iteration",
        "global",
        "metrics",
        "cross",
        "entropy",
        "ce",
        "language",
        "model",
        "modeling",
        "smoothed",
        "nll",
        "info",
        "debug",
        "训练",
        "平均",
        "当前",
        "总",
    ]
)
_LOSS = frozenset(["loss", "losses", "损失", "训练损失", "平均损失", "损失值"])
_STEPS = {"step": 1, "steps": 1, "updates": 1, "iteration": 2, "iterations": 2, "iter": 2, "iters": 2, "it": 2,
          "步骤": 1, "步数": 1, "步": 1, "迭代": 2, "batch": 4}  # fmt: skip
_OF_STEP = frozenset(
    [
        "train",
        "training",
        "trainer",
        "global",
        "optimizer",
        "opt",
        "current",
        "cur",
        "num",
        "idx",
        "index",
        "at",
        "info",
        "第",
        "当前",
        "训练",
        "in",
    ]
)
_EPOCH = frozenset(["epoch", "epochs", "轮", "轮次", "轮数"])
_OTHERS = {  # words of a name: field
    frozenset(words.split()): field
    for words, field in (
        ("lr", "lr"),
        ("learning rate", "lr"),
        ("train lr", "lr"),
        ("train learning rate", "lr"),
        ("学习率", "lr"),
        ("grad norm", "grad_norm"),
        ("gradient norm", "grad_norm"),
        ("gnorm", "grad_norm"),
        ("train grad norm", "grad_norm"),
        ("optim total grad norm", "grad_norm"),
        ("tokens per second", "tokens_per_second"),
        ("tokens per sec", "tokens_per_second"),
        ("tok sec", "tokens_per_second"),
        ("tokens s", "tokens_per_second"),
        ("tok s", "tokens_per_second"),
        ("tokens sec", "tokens_per_second"),
    )
}


class Role(NamedTuple):
    """What a name stands for: ``field`` of a reading, and its preference among names of this field (0: the best).

    ``name``: of an evaluation, the name of its data set; "": the only one.
    """

    field: str
    order: int = 0
    name: str = ""


@lru_cache(maxsize=4096)  # a log has few names, each of them in thousands of lines
def role(name: str, before: str = "") -> Optional[Role]:
    """The role of a name; ``before`` is the word in front of it. None: not a value of a training."""
    words = [word.lower() for word in _WORD.findall(name)]
    first = before.lower()
    if words in (["train"], ["training"], ["val"], ["valid"], ["validation"]) and first in _LOSS:
        words, first = [*words, "loss"], ""
    if not words:
        return None
    if _LOSS & set(words):
        return _loss([*([first] if first else []), *words])
    together = frozenset(words)
    if together in _OTHERS:
        return Role(_OTHERS[together])
    if frozenset((first, *words)) in _OTHERS:
        return Role(_OTHERS[frozenset((first, *words))])
    if together <= _EPOCH:
        return Role("epoch") if not first or first in _PLAIN else None
    if together == {"rank"}:
        return Role("rank")
    return _step(words, first)


def _loss(words: List[str]) -> Optional[Role]:
    others = [word for word in words if word not in _LOSS]
    if _TEST & set(others):
        return None
    evaluates = _EVAL & set(others)
    unknown = [word for word in others if word not in _PLAIN and word not in _EVAL and word != "epoch"]
    if evaluates:
        if unknown and others[0] not in _EVAL:  # "eval_wikitext_loss" names a data set, "packet_val_loss" does not
            return None
        return Role("eval_loss", len(others), " ".join(unknown))
    return None if unknown else Role("loss", len(others) + 5 * ("epoch" in others))


def _step(words: List[str], first: str) -> Optional[Role]:
    core = [word for word in words if word in _STEPS]
    if not core or any(word not in _STEPS and word not in _OF_STEP for word in words):
        return None
    if first and first not in _OF_STEP:
        return None
    if (core[-1] == "updates" and "num" not in words) or (core[-1] != "updates" and "num" in words):
        return None  # num_updates counts; num_steps is a total
    if core[-1] in ("batch", "步") and core == words and first not in ("", "第"):
        return None
    return Role("step", 0 if "global" in (first, *words) else _STEPS[core[0]])


class _Values:
    """Collects the values of a line: the best name of each field."""

    def __init__(self) -> None:
        self.found: Dict[str, Any] = {}
        self.at: Dict[str, int] = {}
        self._orders: Dict[str, int] = {}

    def add(self, role: Role, number: str, total: Optional[str] = None, at: int = 0, name: str = "") -> None:
        """Add a number unless a better name of its field has one."""
        order, field = role.order, role.field
        if field in ("step", "rank"):
            value: Any = whole(number)
            if value is None or (role.order == _STEPS["batch"] and total is None and "idx" not in name):
                return
        else:
            value = decimal(number)
            if value is None or (field == "epoch" and not 0 <= value < MOST):
                return
        if field == "eval_loss" and role.name:
            order += 100
        if field in self._orders and self._orders[field] <= order:
            return
        self._orders[field], self.found[field], self.at[field] = order, value, at
        if field == "eval_loss":
            self.found["set"] = role.name
        if field == "step":
            self.found.pop("total", None)
            if total is not None and int(total) >= value:
                self.found["total"] = int(total)
            self.found["within"] = order  # 0: a global step


def values(text: str) -> Tuple[Dict[str, Any], int]:
    """The values in a line without escape sequences, and where they start; empty without any.

    Besides the names of ``Reading`` there are ``within`` (the step counts from the start of an epoch, or may do so),
    ``set`` (the data set of the evaluation) and ``rank``.
    """
    if not any(word in text for word in LOSSES) or "train_runtime" in text:
        return {}, 0
    if _COMPILER.match(text) or text.count("}") > text.count("{"):  # the end of a torn object: its step may be missing
        return {}, 0
    found = _json(text)
    if found is None and _FRAGMENT.search(text):
        return {}, 0  # a part of a JSON object: what it belongs to is unknown
    if found is None:
        found = _pairs(text)
    result = _judge(found, text)
    return result, min(found.at.values(), default=0) if result else 0


def _pairs(text: str) -> _Values:
    found = _Values()
    for pair in _PAIR.finditer(text):
        name, number, total = pair.groups()
        at = pair.start()
        before = _BEFORE.search(text, max(0, at - 24), at)
        if name in ("Train", "train") and re.match(r" ?\[ {0,8}\d", text[pair.end() : pair.end() + 12]):
            found.add(Role("epoch", 1), number, None, at)  # timm: Train: 0 [ 100/1251 (  8%)]
        known = role(name, before.group(1) if before else "")
        if known is not None:
            found.add(known, number, total, before.start() if before else at, name)
            if known.field == "epoch" and total:
                found.found["epochs"] = int(total)
    spent = _SPENT.search(text) if "dt" in text or "time" in text else None
    if spent:
        found.found["ms"] = float(spent.group(1)) * (1 if spent.group(2) == "ms" else 1e3)
    return found


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
        found = fields(content.items(), at)
        if "loss" in found.found or "eval_loss" in found.found:
            return found
        at = text.find('{"', end)
    return _Values() if seen else None


_DECODER = json.JSONDecoder()
_FRAGMENT = re.compile(r'"[\w/ .\-]{1,80}" ?: ')


def fields(items: Iterable[Tuple[Any, Any]], at: int = 0) -> _Values:
    """The values of a JSON object, nested one level: ``{"train": {"loss": 1}}`` is ``train/loss``."""
    found = _Values()
    for name, value in items:
        nested = value.items() if isinstance(value, dict) else ((None, value),)
        for inner, number in nested:
            if isinstance(number, bool) or not isinstance(number, (int, float, str)):
                continue
            known = role(str(name) if inner is None else "%s/%s" % (name, inner))
            if known is not None:
                found.add(known, str(number)[:60], None, at, str(name))
    return found


def _judge(found: _Values, text: str) -> Dict[str, Any]:
    """The values, if the line has a loss and its place."""
    result = dict(found.found)
    if "loss" not in result and "eval_loss" not in result:
        return {}
    keyed = "step" in result
    if keyed:
        result["within"] = int(result["within"] > 0 and ("epoch" in result or result["within"] == _STEPS["batch"]))
    else:
        _position(text, result)
    before = text[: found.at.get("loss", 0)]
    if "loss" in result and _EVALUATES.search(before.lower()) and "train" not in _named(text, found.at["loss"]):
        loss = result.pop("loss")
        if keyed and "eval_loss" not in result:
            result["eval_loss"] = loss
        elif "eval_loss" not in result:
            return {}
    epoch = result.get("epoch")
    if epoch is not None and not math.isfinite(epoch):
        del result["epoch"]
    return result


def _named(text: str, at: int) -> str:
    return text[at : at + 30].split(":", maxsplit=1)[0].split("=", maxsplit=1)[0].lower()


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
    if bar and not int(bar.group(1)):  # a bar that starts again still has the loss of its end
        result.clear()
        return
    found = bar or _KERAS.search(text) or ("epoch" in result and _BRACKET.search(text)) or None
    if found and int(found.group(1)) <= int(found.group(2)):
        result.update(step=int(found.group(1)), total=int(found.group(2)), within=1)


def whole(number: str) -> Optional[int]:
    """A step: a whole number, also ``188.0``; rounded ones (``2e+3``) are none."""
    try:
        value = float(number.replace(",", "")) if "e" not in number.lower() else math.nan
    except ValueError:
        return None
    return int(value) if 0 <= value < MOST and value == int(value) else None


def decimal(number: str) -> Optional[float]:
    """A number as text, or None."""
    try:
        return float(number.replace(",", ""))
    except ValueError:
        return None


class Placed(NamedTuple):
    """The place of a line in a log of one rank."""

    epoch: Optional[float]
    step: int
    total: Optional[int]


class Places:
    """Turns the steps of a log into steps of the training.

    Steps that start again in every epoch continue: by the length of the epoch where the log has it (``10/100``), else
    at the distance of the last two steps. An epoch is the step only in a log without steps. An evaluation without a
    step belongs to the last one. The first data set of several evaluations counts.
    """

    def __init__(self) -> None:
        self._last: Dict[Optional[int], Placed] = {}  # by rank
        self._distance: Dict[Optional[int], int] = {}
        self._offset: Dict[Optional[int], int] = {}
        self._goes_on = False  # steps do not start again in an epoch, although the lines have both
        self._guessed: Set[Optional[int]] = set()  # ranks whose log started in a later epoch, until the next one starts
        self._steps = False
        self._set: Optional[str] = None

    def first_set(self, values: Dict[str, Any]) -> Dict[str, Any]:
        """The values without those of another evaluation's data set."""
        name = values.get("set")
        if name is None:
            return values
        if self._set is None or name == "":
            self._set = name
        kept = {key: value for key, value in values.items() if key != "set"}
        if name != self._set:
            kept.pop("eval_loss", None)
        return kept

    def place(self, values: Dict[str, Any], rank: Optional[int]) -> Optional[Dict[str, Any]]:
        """The values with the step of the training, or None if they have no place."""
        values = self.first_set(values)
        rank = values.get("rank", rank)
        if "loss" not in values and "eval_loss" not in values:
            return None
        if "step" not in values:
            return self._without(values, rank)
        self._steps = True
        step, total, epoch = values["step"], values.get("total"), values.get("epoch")
        if not values.get("within"):
            self._last[rank] = Placed(epoch, step, total)
            return {**values, "rank": rank}
        last = self._last.get(rank)
        self._restart(rank, last, Placed(epoch, step, total), values)
        if last is not None and step > last.step:
            self._distance[rank] = step - last.step
        self._last[rank] = Placed(epoch, step, total)
        offset = self._offset.get(rank, 0)
        placed = {**values, "step": step + offset, "rank": rank}
        if total is not None and "epochs" in values and not self._goes_on:
            if _counts_on(self._last[rank], values):
                del placed["total"]  # of the training or of an epoch: the next epoch will show it
            else:
                placed["total"] = total * values["epochs"]
        elif offset:
            placed.pop("total", None)
        return placed

    def _restart(self, rank: Optional[int], last: Optional[Placed], now: Placed, values: Dict[str, Any]) -> None:
        """Notice a new epoch."""
        if last is None:
            if now.epoch and now.total and now.epoch == int(now.epoch):
                self._guessed.add(rank)
                self._offset[rank] = 0 if _counts_on(now, values) else _epochs_before(now, values) * now.total
            return
        distance = self._distance.get(rank, 1)
        guessed = False
        if now.epoch is not None and last.epoch is not None:
            if now.epoch <= last.epoch or now.epoch != int(now.epoch):
                return
            guessed = rank in self._guessed
            self._guessed.discard(rank)
            if now.step > last.step:
                if (guessed or not self._offset.get(rank)) and now.total != last.step:
                    self._goes_on = True
                    self._offset[rank] = 0
                return
        elif now.step >= last.step or last.total is None or last.step + distance < last.total:
            return
        if self._goes_on:
            return
        more = last.total if last.total is not None else last.step + distance - now.step
        self._offset[rank] = _epochs_before(now, values) * more if guessed else self._offset.get(rank, 0) + more

    def _without(self, values: Dict[str, Any], rank: Optional[int]) -> Optional[Dict[str, Any]]:
        epoch = values.get("epoch")
        if "examples" in values:
            return {key: value for key, value in values.items() if key != "epoch"}
        if self._steps:
            last = self._last.get(rank)
            if "eval_loss" not in values or last is None:
                return None  # the mean of an epoch, after its steps
            kept = {key: value for key, value in values.items() if key != "loss"}
            return {**kept, "step": last.step + self._offset.get(rank, 0), "rank": rank}
        if epoch is None or epoch != int(epoch):
            return None
        return {**values, "step": int(epoch), "rank": rank}


def _epochs_before(now: Placed, values: Dict[str, Any]) -> int:
    """How many epochs are over: ``Epoch [1/3]`` counts from 1, ``Epoch: [0]`` from 0."""
    return max(0, int(now.epoch or 0) - ("epochs" in values))


def _counts_on(now: Placed, values: Dict[str, Any]) -> bool:
    """Whether a step is where it must be if ``total`` is that of all epochs: ``Epoch [6/8] Step [41/64]``."""
    epochs = values.get("epochs")
    before = _epochs_before(now, values)
    return bool(epochs and now.total and before * now.total < now.step * epochs <= (before + 1) * now.total)


def read_line(text: str) -> Iterator[Tuple[Dict[str, Any], int]]:
    """The values in a line, if there are any that count."""
    found, at = values(text)
    if found:
        yield found, at
