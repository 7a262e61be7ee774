"""Options that commands share: ``--json``, ``--quiet``, and options with a number; and errors in a command line.

A usage error of click's becomes a ``UsageError`` with the command that was probably meant.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from types import MappingProxyType
from typing import Any

import click
from click.core import ParameterSource

from provision.cli import SEPARATED, Leaving
from provision.errors import UsageError
from provision.model import CommandLine
from provision.output import Reporter
from trainer.bounds import Bound

_LONG = 40  # characters; no option needs a longer number, and Python refuses to parse very long ones
_NONSENSE = 10_000  # a higher limit is not worth a place in the help
_NO_COMMAND = re.compile(r"No such command '(.*)'", re.DOTALL)
_NO_CHOICE = re.compile(r"'(.*)' is not one of ", re.DOTALL)
_EXTRA = re.compile(r"Got unexpected extra arguments? \((.*)\)", re.DOTALL)
_VALUE = "--env"  # its value may be a secret, which must not be printed


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


def importing() -> Leaving:
    """In this block, a command imports what only it needs. Ctrl-C ends the program, as during every other import."""
    return Leaving(sys.argv[1:])


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


def usage_error(error: click.ClickException, words: Sequence[str]) -> UsageError:
    """A ``UsageError`` for an error of click's.

    Args:
        error: what click has raised.
        words: the command line, without ``clusterctl``.
    """
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    path = _path(ctx, words)
    text = _sentence(error.message)
    wrong = ""
    known: tuple[str, ...] = ()
    if isinstance(error, click.NoSuchOption):
        wrong, known = error.option_name, _options(ctx)
        text = f"{path} has no option {wrong}"
    elif found := _NO_COMMAND.match(error.message):
        wrong, known = found[1], _commands(ctx)
        text = f"{path} has no command {wrong}"
    elif isinstance(error, click.BadOptionUsage):
        text = f"{error.option_name} of {path} needs a value" if "requires" in error.message else text
    elif found := _EXTRA.match(error.message):
        text = f"{path} takes no further argument: {found[1]}"
    elif isinstance(error, click.MissingParameter):
        text = f"{path} needs {_name(error)}"
    elif isinstance(error, click.BadParameter):
        if (found := _NO_CHOICE.match(error.message)) and isinstance(error.param, click.Parameter):
            choices = getattr(error.param.type, "choices", ())
            wrong, known = found[1], tuple(map(str, choices))
            text = f"{wrong!r} is not one of {', '.join(known)}"
        text = f"{_name(error)}: {text}"
    return UsageError(text, hint=_corrected(words, wrong, known) or f"{path} --help")


def _path(ctx: click.Context | None, words: Sequence[str]) -> str:
    """The command that is meant; click does not always know it."""
    if ctx is None:  # of an option that lacks its value
        return " ".join(["clusterctl", *(word for word in words[:1] if word[:1] != "-")])
    below = words[len(ctx.command_path.split()) - 1 :][:1]
    return f"{ctx.command_path} {below[0]}" if below and below[0] in _commands(ctx) else ctx.command_path


def _sentence(text: str) -> str:
    """Click's message without capital letter and full stop."""
    text = " ".join(text.split()).removesuffix(".")
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def _name(error: click.BadParameter) -> str:
    """How an option or argument is written."""
    if isinstance(error.param, click.Option):
        return max(error.param.opts, key=len)
    if error.param is not None:
        return error.param.metavar or (error.param.name or "an argument").upper()
    return str(error.param_hint or "an argument")


def _options(ctx: click.Context | None) -> tuple[str, ...]:
    return tuple(name for each in ctx.command.get_params(ctx) for name in each.opts if name[:1] == "-") if ctx else ()


def _commands(ctx: click.Context | None) -> tuple[str, ...]:
    return tuple(ctx.command.list_commands(ctx)) if ctx and isinstance(ctx.command, click.Group) else ()


def _corrected(words: Sequence[str], wrong: str, known: Iterable[str]) -> str:
    """The command line with the wrong word replaced by the closest known one; empty if none is close."""
    bare = {each.lstrip("-"): each for each in known}
    found = get_close_matches(wrong.lstrip("-"), list(bare), n=1) if wrong else []
    if not found or any(word.startswith(_VALUE) for word in words):
        return ""
    near = bare[found[0]]
    for at, word in enumerate(words):
        if word == wrong:
            fixed = near
        elif word.startswith(f"{wrong}="):
            fixed = near + word.removeprefix(wrong)
        elif word.startswith("--") and word.endswith(f"={wrong}"):
            fixed = word.removesuffix(wrong) + near
        else:
            continue
        return shlex.join(["clusterctl", *words[:at], fixed, *words[at + 1 :]])
    return ""


class ListGroup(click.Group):
    """A group whose name alone, or with options, is its command ``list``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put ``list`` before what names no command."""
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)
