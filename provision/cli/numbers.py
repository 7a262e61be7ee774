"""Options with a number: each has a range, rejects values outside it, and shows it in the help."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import click

from trainer.bounds import Bound

_LONG = 40  # characters; no option needs a longer number, and Python refuses to parse very long ones
_NONSENSE = 10_000  # a higher limit is not worth a place in the help


class Number(click.ParamType[float]):
    """A number in a range.

    Args:
        kind: ``int`` or ``float``.
        bound: the allowed range.
        words: words that are also allowed, each with its number, such as ``all`` for -1.
    """

    def __init__(self, kind: type[int | float], bound: Bound, words: Mapping[str, int] = MappingProxyType({})) -> None:
        self.kind = kind
        self.bound = bound
        self.words = words
        self.name = "integer" if kind is int else "number"

    @property
    def range(self) -> str:
        """``at least 1, or all``: the range in an error."""
        return ", or ".join([str(self.bound), *self.words])

    @property
    def brief_range(self) -> str:
        """``1 to 250``, or ``>= 1`` where the upper limit only rejects nonsense: the range in the help."""
        bound = self.bound
        if bound.low is not None and bound.high is not None and bound.high < _NONSENSE:
            return f"{bound.low} to {bound.high}"
        return f"> {bound.above}" if bound.low is None else f">= {bound.low}"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        text = str(value)
        if text in self.words:
            return self.words[text]
        if len(text) > _LONG:
            self.fail(f"must be {self.range}, not {text[:_LONG]}…", param, ctx)
        try:
            number = self.kind(text)
        except ValueError:
            kind = "a whole number" if self.kind is int else "a number"
            self.fail(f"{text!r} is not {kind}; it must be {self.range}", param, ctx)
        if not self.bound.allows(number):
            self.fail(f"must be {self.range}, not {text}", param, ctx)
        return number


class _Option(click.Option):
    """An option whose help ends with the range of its number."""

    def get_help_extra(self, ctx: click.Context) -> click.types.OptionHelpExtra:
        """The usual extras, with the range."""
        extra = super().get_help_extra(ctx)
        if isinstance(self.type, Number):
            extra["range"] = self.type.brief_range
        return extra


def number(*flags: str, type: Number, **given: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:  # noqa: A002 - click's name for it
    """``click.option`` for a number."""
    if type.kind is int:
        given.setdefault("metavar", "N")
    return click.option(*flags, cls=_Option, type=type, **given)


COUNT = Number(int, Bound(low=1, high=1_000_000))
INDEX = Number(int, Bound(low=0, high=1_000_000))
SECONDS = Number(float, Bound(above=0, high=10_000_000))
DEADLINE = Number(float, Bound(low=1, high=10_000_000))
