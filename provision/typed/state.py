"""What is known about a typed command line while the wrappers around its command are removed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from provision.errors import UsageError
from provision.inventory.document import shown
from provision.typed.shell import UNKNOWN, Values

Known = Callable[[Sequence[str]], bool]

INVENTORY = "clusterctl starts the nodes of the inventory"
RELEASE = "the run uses the environment of the nodes' release"
LOGS = "the logs of all ranks are in runs/RUN"
TERMINAL = "a run does not need the terminal; --detach returns once it has started"


@dataclass
class State:
    """The state. ``env``: variables of the training. ``values``: what the shell or script knows at this place.

    ``counts`` are numbers of ``nodes``, and of processes ``per_node`` or in ``total``, each with its text.
    """

    known: Known
    environ: Mapping[str, str]
    env: dict[str, str]
    values: Values
    notices: list[str] = field(default_factory=list)
    counts: dict[str, tuple[int, str]] = field(default_factory=dict)
    depth: int = 0
    inside: bool = False  # a launch script is read: programs that are no training are dropped
    windows: bool = False  # a backslash separates folders

    def drop(self, text: str, why: str = "") -> None:
        """Note what is dropped, once."""
        notice = f"{shown(text.replace(UNKNOWN, '?'))}: dropped" + (f"; {why}" if why else "")
        if notice not in self.notices:
            self.notices.append(notice)

    def count(self, key: str, value: str | None, text: str) -> None:
        """Note a number of nodes or processes.

        Raises:
            UsageError: it is not a number.
        """
        if value is None or not re.fullmatch(r"0*[1-9][0-9]{0,6}", value):
            raise UsageError(f"{shown(text)}: not a number of nodes or processes", hint="clusterctl train --nodes N")
        self.counts[key] = (int(value), shown(text))


def words_of(text: str) -> tuple[str, ...]:
    """The words of a table."""
    return tuple(text.split())


def split_options(words: Sequence[str], values: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Split ``PROGRAM [OPTIONS] COMMAND`` before the command.

    Args:
        words: the words.
        values: by option, the number of words that follow it.
    """
    place = 1
    while place < len(words) and words[place].startswith("-") and words[place] != "--":
        word = words[place]
        place += 1 + (0 if "=" in word else values.get(word, 0))
    return list(words[:place]), list(words[place + (words[place : place + 1] == ["--"]) :])


def program_of(word: str) -> str:
    """A program's name without its folder, in lower case."""
    return word.replace("\\", "/").rpartition("/")[2].lower().removesuffix(".exe")
