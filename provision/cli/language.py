"""The option ``--language`` of the commands that draw on the screen."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from provision.summaries.words import LANGUAGES, language_of


def speaking(command: Callable[..., None]) -> Callable[..., None]:
    """Adds ``--language``. The command receives ``say``, which gives the words in that language."""

    @click.option(
        "--language", type=click.Choice(["en", "zh"]), help="English or Chinese; the default is the locale's."
    )
    @wraps(command)
    def wrapped(*args: Any, language: str | None, **kwargs: Any) -> None:
        command(*args, say=LANGUAGES[language or language_of(os.environ)], **kwargs)

    return wrapped
