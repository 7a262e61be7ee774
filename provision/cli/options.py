"""Options that commands share: ``--json``, ``--quiet``, and options with a number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any

import click
from click.core import ParameterSource

from provision.cli import SEPARATED
from provision.model import CommandLine
from provision.output import Reporter
from trainer.bounds import Bound


def reporting(command: Callable[..., None]) -> Callable[..., None]:
    """Adds ``--json`` and ``--quiet``. The command receives the configured reporter as its first argument."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
    @click.option("--quiet", "-q", is_flag=True, help="Print only results and errors.")
    @wraps(command)
    def wrapped(*args: Any, as_json: bool, quiet: bool, **kwargs: Any) -> None:
        context = click.get_current_context()
        reporter: Reporter = context.obj
        reporter.configure(as_json=as_json, quiet=quiet, typed=typed(context))
        command(reporter, *args, **kwargs)

    return wrapped


def typed(context: click.Context) -> CommandLine:
    """The command line as the user typed it, from click's parsed parameters."""
    options: dict[str, tuple[str, ...]] = {}
    words: list[str] = []
    for param in context.command.params:
        value = context.params.get(param.name or "")
        if context.get_parameter_source(param.name or "") is not ParameterSource.COMMANDLINE or value is None:
            continue
        values = tuple(map(str, value)) if isinstance(value, tuple | list) else (str(value),)
        if isinstance(param, click.Argument):
            words += values
        elif isinstance(param, click.Option):
            names = param.secondary_opts if value is False else param.opts
            options[max(names, key=len)] = () if param.is_flag else values
    name = context.command_path.partition(" ")[2]
    return CommandLine(name, options, tuple(words), separated=context.meta.get(SEPARATED))


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
        """The range in the help: ``1 to 250``, or ``>= 1`` if the upper limit only rejects nonsense."""
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


class _NumberOption(click.Option):
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
    return click.option(*flags, cls=_NumberOption, type=type, **given)


COUNT = Number(int, Bound(low=1, high=1_000_000))
INDEX = Number(int, Bound(low=0, high=1_000_000))
SECONDS = Number(float, Bound(above=0, high=10_000_000))
DEADLINE = Number(float, Bound(low=1, high=10_000_000))
