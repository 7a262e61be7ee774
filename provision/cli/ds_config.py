"""The command that writes DeepSpeed's configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from provision.cli.options import Number, number, reporting
from provision.errors import UsageError
from provision.model import Notice
from provision.output import Reporter
from provision.output_text import Line
from trainer import ds_config
from trainer.ds_config.request import OPTIONS, Option, request_of


def _option(option: Option) -> Callable[[Callable[..., None]], Callable[..., None]]:
    flag, name, text = option.flag, option.field, option.help
    if option.type is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=text)
    if option.bound is not None:
        return number(flag, name, type=Number(option.type, option.bound), metavar=option.metavar, help=text)
    kind = click.Choice(list(option.choices)) if option.choices else option.type
    return click.option(flag, name, type=kind, metavar=option.metavar, help=text)


def _all(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(OPTIONS):
        command = _option(option)(command)
    return command


@click.command("ds-config")
@click.option("--like", type=click.Choice(list(ds_config.PRESETS)), help="Start from a named configuration.")
@_all
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write to FILE.  [default: stdout]",
)
@reporting
def ds_config_command(reporter: Reporter, like: str | None, output: Path | None, **given: Any) -> None:
    """Write a DeepSpeed configuration.

    Values that the transformers Trainer fills in are "auto" unless you set them. A script that calls DeepSpeed itself
    (--for own) gets numbers. Contradictory options are refused.
    """
    if given["stage"] is not None:
        given["stage"] = int(given["stage"])
    try:
        request = request_of(given, like)
        config = ds_config.make(request)
    except ds_config.ConfigError as error:
        raise UsageError(str(error), hint=error.hint) from error
    for each in ds_config.notices(request):
        reporter(Notice(each))
    text = ds_config.text(config)
    if output is None:
        # The text is the file itself, so it is not wrapped to the terminal's width.
        reporter.show([Line(row, hang=None) for row in text.splitlines()])
        reporter.result(config)
        return
    output.write_text(text, encoding="utf-8")
    reporter.result({"file": str(output), "config": config}, f"wrote {output}")


COMMANDS = (ds_config_command,)
