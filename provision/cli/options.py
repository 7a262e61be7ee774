"""What all commands share: how they report."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from provision.output import Reporter


def reporting(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options ``--json`` and ``--quiet`` and, as first argument, the reporter they set up."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")
    @click.option("--quiet", "-q", is_flag=True, help="Print results and errors only.")
    @wraps(command)
    def wrapped(*args: Any, as_json: bool, quiet: bool, **kwargs: Any) -> None:
        reporter: Reporter = click.get_current_context().obj
        reporter.configure(as_json=as_json, quiet=quiet)
        command(reporter, *args, **kwargs)

    return wrapped
