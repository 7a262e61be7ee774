"""Writes the commands in hints: the user's command with a change, and other commands for the same inventory.

Every command in a hint must work when it is pasted. Two functions ensure this:

- ``again`` is the command that the user typed, with options added: ``--exclude gpu03``. Tasks call it through their
  ``Session``, which knows the command line.
- ``complete`` adds the user's ``--inventory`` to every other ``clusterctl COMMAND`` in a text. It runs once, when the
  text is shown, so that other code can simply write ``clusterctl check``.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

from provision.masking import is_secret

if TYPE_CHECKING:
    from provision.model import CommandLine

# The commands that have --inventory; tests/unit/test_hints.py compares this with the commands themselves.
WITH_INVENTORY = (
    "bench nccl",
    "check",
    "collect",
    "compare",
    "deploy",
    "diagnose",
    "init",
    "jupyter",
    "logs",
    "metrics",
    "monitor",
    "nodes list",
    "nodes trust",
    "plan",
    "prune",
    "push",
    "rehearse",
    "releases",
    "report",
    "resume",
    "rollback",
    "run",
    "runs list",
    "runs prune",
    "save",
    "services apply",
    "services status",
    "services undo",
    "services verify",
    "status",
    "stop",
    "tensorboard",
    "top",
    "train",
    "tunnel",
    "verify",
    "webui",
)
SAME = "run the same command again"  # as a hint: the command that was typed
_INVENTORY = "--inventory"
_COMMAND = re.compile(
    r"(?<![\w/.-])clusterctl (?:" + "|".join(WITH_INVENTORY) + r")(?![\w'-])(?! +(?:-i|--inventory)\b)"
)
_NODES = re.compile(r"(?<= )(--(?:limit|exclude)) ([\w.,@*?\[\]-]*[\[*?][\w.,@*?\[\]-]*[\w\]*?])")


def again(
    typed: CommandLine,
    command: str,
    *flags: str,
    drop: tuple[str, ...] = (),
    words: tuple[str, ...] | None = None,
    **changes: str,
) -> str:
    """The user's command with changes, quoted for a shell.

    Args:
        typed: the user's command line.
        command: the command's name; if the user typed another command, its options and arguments are not repeated.
        flags: options without a value to add.
        drop: options to omit.
        words: the arguments; None: the typed ones.
        changes: options to set, by name: ``exclude="gpu03"``. The nodes are added to the typed ``--exclude``.
    """
    same = typed.command == command
    options = {name: values for name, values in typed.options.items() if same and name not in {*drop, _INVENTORY}}
    options |= dict.fromkeys(flags, ())
    for name, value in changes.items():
        option = "--" + name.replace("_", "-")
        before = options.get(option, ()) if name == "exclude" else ()
        options[option] = (",".join([*before, value]),)
    parts = ["clusterctl", command, *_named(typed)]
    for option, values in options.items():
        parts += [f"{option} {shlex.quote(_shown(option, value))}" for value in values] or [option]
    arguments = words if words is not None else typed.words if same else ()
    after = typed.separated if same and words is None else None
    place = max(0, len(arguments) - (after or 0))
    if any(word.startswith("-") for word in arguments[:place]):
        place = 0
    quoted = [shlex.quote(word) for word in arguments]
    return " ".join([*parts, *quoted[:place], *(["--"] if quoted[place:] else []), *quoted[place:]])


def complete(typed: CommandLine, text: str) -> str:
    """The text with ``-i FILE`` after every command that needs it, and sets of nodes quoted for a shell.

    The text ``SAME`` becomes the typed command.
    """
    if text == SAME and typed.command:
        return again(typed, typed.command)
    if "--" in text:
        text = _NODES.sub(lambda found: f"{found[1]} {shlex.quote(found[2])}", text)
    named = " ".join(["", *_named(typed)])
    return _COMMAND.sub(lambda found: found[0] + named, text) if named and "clusterctl " in text else text


def complete_fields(typed: CommandLine, data: Any) -> Any:
    """JSON data with every fix and hint completed. Other texts may come from nodes and stay unchanged."""
    if isinstance(data, dict):
        return {
            key: _completed(typed, value) if key in {"fix", "hint"} else complete_fields(typed, value)
            for key, value in data.items()
        }
    if isinstance(data, list):
        return [complete_fields(typed, value) for value in data]
    return data


def _completed(typed: CommandLine, value: Any) -> Any:
    if isinstance(value, list):
        return [_completed(typed, each) for each in value]
    return complete(typed, value) if isinstance(value, str) else value


def _named(typed: CommandLine) -> list[str]:
    """The typed option ``--inventory``; empty if there is none."""
    given = typed.options.get(_INVENTORY)
    return [f"-i {shlex.quote(given[-1])}"] if given else []


def _shown(option: str, value: str) -> str:
    """A value for printing: of a secret variable only the name, whose value is then read from the environment."""
    name, has_value, _ = value.partition("=")
    return name if option == "--env" and has_value and is_secret(name) else value
