"""What the names in a line stand for.

``train/loss`` and ``lm loss`` are losses; ``loss_scale``, ``aux_loss``, ``packet loss`` and ``max_steps`` are not.
Every word of a name must be known, also the word before it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import FrozenSet, List, NamedTuple, Optional

_CHINESE = (
    "训练|验证|评估|测试|平均|当前|损失值|损失|步骤|步数|迭代|轮次|轮数|学习率|第"  # words without spaces between
)
_WORD = re.compile(rf"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|{_CHINESE}|[^\W\d_a-zA-Z]")


def _set(words: str) -> FrozenSet[str]:
    return frozenset(words.split())


_EVAL = _set("eval evaluation val valid validation dev 验证 评估 集")
_TEST = _set("test testing best min max 测试")
_PLAIN = _set(
    "train training trainer lm total avg average mean running current cur reduced step batch iter iteration global"
    " metrics cross entropy ce language model modeling smoothed nll info debug 训练 平均 当前 总"
)
_LOSS = _set("loss losses 损失 损失值")
FOREIGN = _set("win wins draw draws profit")  # a line with one of them has another kind of losses
INDEX, BATCH = 3, 4  # orders of a batch's number: ``batch_idx``; ``batch``, which counts only with a total
_STEPS = {"step": 1, "steps": 1, "updates": 1, "iteration": 2, "iterations": 2, "iter": 2, "iters": 2, "it": 2,
          "步骤": 1, "步数": 1, "步": 1, "迭代": 2, "batch": BATCH}  # fmt: skip
_OF_STEP = _set(
    "train training trainer global optimizer opt current cur num idx index at info in completed validate 第 当前 训练"
)
_EPOCH = _set("epoch epochs 轮 轮次 轮数")
_AROUND = _set("train training metrics optim optimizer adam w sgd lion muon")  # around the words of the other fields
_OTHERS = {  # words of a name: field
    _set(words): field
    for words, field in (
        ("lr", "lr"),
        ("learning rate", "lr"),
        ("学习率", "lr"),
        ("grad norm", "grad_norm"),
        ("gradient norm", "grad_norm"),
        ("gnorm", "grad_norm"),
        ("total grad norm", "grad_norm"),
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
    other = _OTHERS.get(together - _AROUND) or _OTHERS.get(together | {first})
    if other:
        return Role(other)
    if together <= _EPOCH:
        return Role("epoch") if not first or first in _PLAIN else None
    if together == {"rank"}:
        return Role("rank")
    return _step(words, first)


def _loss(words: List[str]) -> Optional[Role]:
    others = [word for word in words if word not in _LOSS]
    if _TEST & set(others) or words == ["losses"] or ("entropy" in others and "cross" not in others):
        return None  # wins and losses; the loss of a policy's entropy
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
    if core == ["batch"]:
        return Role("step", INDEX if {"idx", "index"} & set(words) else BATCH)
    return Role("step", 0 if "global" in (first, *words) else _STEPS[core[0]])
