"""Turns click's usage errors into ``UsageError``, with the command that was probably meant."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

import click

from provision.errors import UsageError

_NO_COMMAND = re.compile(r"No such command '(.*)'", re.DOTALL)
_NO_CHOICE = re.compile(r"'(.*)' is not one of ", re.DOTALL)
_EXTRA = re.compile(r"Got unexpected extra arguments? \((.*)\)", re.DOTALL)
_VALUE = "--env"  # its value may be a secret, which must not be printed


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
