"""``--json`` and ``--quiet``, and the command line as typed."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click
from click.core import ParameterSource

from provision.model import CommandLine
from provision.output import Reporter


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
    return CommandLine(context.command_path.partition(" ")[2], options, tuple(words))
