"""Takes every ``clusterctl …`` command out of a text and gives it to the parser, as a user who pastes it would."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click

from provision.cli import cli

# What ends a command in a sentence: punctuation behind it, or a word that joins it to the rest.
_END = re.compile(r"(;|,|\)|:|\.)?(\s|$)")
_JOINS = {"and", "or", "then", "with", "to"}


def commands_in(text):
    """Every command in a text: the words from ``clusterctl`` to what ends it, quotes respected."""
    found = []
    for match in re.finditer(r"(?<![\w/.`-])clusterctl (?=[a-z])", text):
        command = _command(text[match.start() :].split("\n", 1)[0])
        if command:
            found.append(command)
    return found


def _command(rest):
    words = []
    for match in re.finditer(r"""(?:'[^']*'|"[^"]*"|[^\s'"])+""", rest):
        word = match[0]
        bare = word.rstrip(";,:).") if not word.endswith(("'", '"')) else word
        if (word in _JOINS and words[-1:] != ["--"]) or word.startswith("("):
            break
        words.append(bare)
        if bare != word:
            break
    return " ".join(words)


def parse(command):
    """The context of a pasted command.

    Raises:
        click.UsageError: there is no such command, option or argument.
    """
    program, *argv = shlex.split(command)
    assert program == "clusterctl"
    context = cli.make_context("clusterctl", list(argv), resilient_parsing=False)
    group = cli
    while isinstance(group, click.Group):
        name, found, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None
        context = found.make_context(name, rest, parent=context)
        group = found
    return context


def paste(text, folder=None):
    """Every command of a text, each parsed; one that names an inventory names a file that exists.

    Returns:
        The contexts, in the order of the text.
    """
    contexts = []
    for command in commands_in(text):
        try:
            context = parse(command)
        except click.exceptions.Exit:
            continue
        except click.ClickException as error:
            raise AssertionError(f"{command}: {error.format_message()}\nin: {text}") from error
        path = context.params.get("inventory_path") or context.params.get("path")
        if path is not None and folder is not None:
            assert (Path(folder) / path).exists(), f"{command}: there is no {path}"
        contexts.append(context)
    return contexts
