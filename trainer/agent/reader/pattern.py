r"""Reads a training's lines with the user's pattern: a regular expression whose groups have the names of values.

``训练步骤: (?P<step>\d+), 损失: (?P<loss>[\d.]+)`` reads step and loss. With a pattern, only the lines that it
matches count: the user says what a line of the training is.

A pattern can be slow. It is at most ``LIMIT`` characters long, a repeat must not contain another one, and it is
searched in the first ``LINE`` characters of a line. If ``TOGETHER`` lines take more than ``SECONDS`` of processor time,
the pattern is no longer used: Python's matcher checks for signals while it searches.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import re
import signal
import sys
import threading
import warnings
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from . import general
from .formats import plain
from .places import Places

GROUPS = ("step", "loss", "eval_loss", "lr", "grad_norm", "epoch", "total", "ms", "tokens_per_second")
NEEDED = ("step", "loss", "eval_loss")  # one of these, at least
LIMIT = 1000  # characters of a pattern
LINE = 4096  # characters of a line that are searched
TOGETHER = 100  # lines that are searched within one time limit
SECONDS = 1.0  # of processor time for them

_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_OURS = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]{8,16}Z \[(?:\d{1,9}|launcher)\] ")  # run.log
_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")


class PatternError(ValueError):
    """A pattern that cannot be used. The text says why."""


class Match(NamedTuple):
    """The values of a line, the line without escape sequences, and where the match starts in it."""

    values: Dict[str, Any]
    text: str
    at: int


class Pattern:
    """A pattern that can be used.

    Attributes:
        text: the pattern as the user wrote it.
        mark: text that every matching line has; "" if none is known.
        too_slow: the pattern took too long, and is no longer used.

    Raises:
        PatternError: the pattern cannot be used.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > LIMIT:
            raise PatternError("it has %d characters, and at most %d are allowed" % (len(text), LIMIT))
        found = _CONTROLS.search(text)
        if found:
            raise PatternError("character %d is not printable; a pattern is one line of text" % (found.start() + 1))
        self._regex, tree = _compile(text)
        unknown = [name for name in self._regex.groupindex if name not in GROUPS]
        if unknown:
            raise PatternError("(?P<%s>…) is not a value; the values are %s" % (unknown[0], ", ".join(GROUPS)))
        if not set(NEEDED) & set(self._regex.groupindex):
            raise PatternError(
                "it has none of the groups (?P<%s>…); %s" % (">…), (?P<".join(NEEDED), "at least one is needed")
            )
        _check_repeats(tree, inside=False)
        self.mark = "" if self._regex.flags & re.IGNORECASE else max(_literals(tree), key=len, default="")
        self.too_slow = False

    def read(self, data: bytes, *, finished: bool = True) -> List[Match]:
        """The lines of ``data`` that the pattern matches.

        ``finished``: the last line has ended. If not, a match at its end may have a part of a number, and is none.
        """
        found: List[Match] = []
        lines = data.split(b"\n")
        try:
            for start in range(0, 0 if self.too_slow else len(lines), TOGETHER):
                with _limited(SECONDS):
                    matches = [self._match(line, finished) for line in lines[start : start + TOGETHER] if line]
                found.extend(filter(None, matches))
        except _TooSlowError:
            self.too_slow = True
        return found

    def _match(self, line: bytes, finished: bool) -> Optional[Match]:
        whole = plain(line[: 4 * LINE].decode("utf-8", "replace"))
        ours = _OURS.match(whole)
        start = ours.end() if ours else 0
        text = whole[start : start + LINE]
        found = self._regex.search(text)
        if found is None or (found.end() == len(text) and (len(whole) > start + LINE or not finished)):
            return None
        values = _values(found.groupdict())
        return Match(values, whole, start + found.start()) if set(NEEDED) & set(values) else None


def place(places: Places, values: Dict[str, Any], rank: Optional[int]) -> Dict[str, Any]:
    """The values of a match with the step of the training.

    Steps that start again in every epoch continue, if the pattern has the epoch. An evaluation without a step belongs
    to the last one.
    """
    within = int("epoch" in values and "step" in values)
    placed = places.place({"loss": math.nan, **values, "within": within}, rank)  # a step without a loss counts too
    if placed is None:
        return values
    return {name: value for name, value in placed.items() if name != "loss" or "loss" in values}


def _values(parts: Dict[str, Optional[str]]) -> Dict[str, Any]:
    """The numbers of a match; other texts are skipped."""
    found: Dict[str, Any] = {}
    for name, part in parts.items():
        if part is None or not general.NUMBERS.fullmatch(part.strip()):
            continue
        whole = name in ("step", "total")
        value: Any = general.whole(part.strip()) if whole else general.decimal(part.strip())
        if value is not None and (name != "epoch" or 0 <= value < general.MOST):
            found[name] = value
    if found.get("total", 0) < found.get("step", 0):
        found.pop("total", None)
    return found


def _compile(text: str) -> Tuple[Any, Any]:
    """The regular expression and its syntax tree."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(text), _parser.parse(text)
    except re.error as error:
        where = "" if error.pos is None else " at character %d" % (error.pos + 1)
        raise PatternError("%s%s" % (error.msg, where)) from None
    except (OverflowError, RecursionError) as error:
        raise PatternError("it is too large: %s" % error) from None


def _check_repeats(tree: Any, *, inside: bool) -> None:
    """Refuse a repeat in a repeat: the ways to divide a line between both are countless."""
    for operation, argument in tree:
        varies = str(operation).endswith("REPEAT") and argument[1] > max(1, argument[0])
        if varies and inside:
            raise PatternError("a repeat inside a repeat, such as (a+)+, may take years; omit one of them")
        for part in _parts(argument):
            _check_repeats(part, inside=inside or varies)


def _parts(argument: Any) -> Iterator[Any]:
    """The trees in the argument of an operation."""
    if isinstance(argument, _parser.SubPattern):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for each in argument:
            yield from _parts(each)


def _literals(tree: Any) -> Iterator[str]:
    """The texts that every match contains."""
    text = ""
    for operation, argument in tree:
        if str(operation) == "LITERAL":
            text += chr(argument)
            continue
        yield text
        text = ""
        if str(operation) == "SUBPATTERN" and not argument[1]:
            yield from _literals(argument[3])
    yield text


class _TooSlowError(Exception):
    pass


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise after seconds of processor time. Only the main thread receives signals; others are not limited."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_error(*_: Any) -> None:
        raise _TooSlowError

    before = signal.signal(signal.SIGVTALRM, raise_error)
    collects = gc.isenabled()
    gc.disable()  # its time is not the pattern's, and an error in a destructor would be lost
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        if collects:
            gc.enable()
