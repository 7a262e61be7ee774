"""Reads steps from the names of checkpoints, and separates checkpoints from the files beside them.

A step follows a word of ``_STEP`` or ``_EPOCH`` (``epoch=1-step=200.ckpt``, ``global_step12``, ``model_step_100.pt``),
or ends the name (``checkpoint-20``, ``00300``). Other numbers do not count: ``gpt2-xl-1558M.pt`` has no step.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Optional

LARGE = (".distcp", ".safetensors", ".pt", ".pth", ".ckpt", ".bin")  # suffixes of files with tensors
COPIES = ".clusterctl-copies"  # a folder in the output folder: copies of other nodes' files, see ``keeping/held.py``
KEPT = re.compile(r"kept-(\d{1,9})$")  # a folder in the output folder: what a restart moved aside, see ``aside.py``
_SINGLE = (".pt", ".pth", ".ckpt")  # one of these alone may be a checkpoint, whatever its name

_END = r"s?[-_=. ]?(\d{1,18})(?![\dA-Za-z]|\.\d)"
_STEP = re.compile(r"(?:step|iter|iteration|update|batch|itr)" + _END, re.IGNORECASE)
_EPOCH = re.compile(r"(?:epoch|(?<![A-Za-z])ep)" + _END, re.IGNORECASE)
_LAST = re.compile(r"(?:^|[-_=. ]|ckpt|checkpoint)(\d{1,18})$", re.IGNORECASE)
_TAG = re.compile(r"(best|last|latest|final|newest|current|ckpt|checkpoint|stage\d*)([-_.].*)?", re.IGNORECASE)
_WHOLE = re.compile(r"(pytorch_)?(model|weights|state|state_dict)([-_.].*)?", re.IGNORECASE)
_SHARE = re.compile(r"rank[-_=]?\d+|\d+-of-\d+", re.IGNORECASE)  # of a rank, or of several files
_SUFFIX = re.compile("(%s)$" % "|".join(map(re.escape, LARGE)))
_PART = re.compile(
    r"optim|sched|scaler|(^|[-_.])(rng|random|sampler|args|config|vocab|tokenizer|train|val|test|ema)([-_.]|$)",
    re.IGNORECASE,
)


class Number(NamedTuple):
    """A number in a name. ``epochs``: it counts epochs, not steps."""

    value: int
    epochs: bool


def number_in(name: str) -> Optional[Number]:
    """The step or epoch in a name, or None."""
    base = name.rpartition("/")[2]
    base = _SHARE.sub("", _SUFFIX.sub("", base))
    for pattern, epochs in ((_STEP, False), (_EPOCH, True), (_LAST, False)):
        found = pattern.findall(base)
        if found:
            return Number(int(found[-1]), epochs)
    return None


def names_a_checkpoint(name: str) -> bool:
    """Whether a folder's name says that it is a checkpoint: it has a step, or is a tag such as ``best``."""
    return number_in(name) is not None or _TAG.fullmatch(name) is not None


def is_single(name: str) -> bool:
    """Whether a file may be a whole checkpoint. A file of one part of the state (an optimizer, say) is none."""
    stem, dot, suffix = name.rpartition(".")
    if "." + suffix not in LARGE or not dot or _PART.search(stem):
        return False
    return "." + suffix in _SINGLE or (
        suffix != "distcp" and (names_a_checkpoint(stem) or _WHOLE.fullmatch(stem) is not None)
    )


def is_share(name: str) -> bool:
    """Whether the name of a single file says that it is only one of several, such as a rank's."""
    return _SHARE.search(name) is not None
