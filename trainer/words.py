"""Reads the options in the words of a program's command line, without knowing the program.

Programs disagree on the syntax, so every common one is read:

- argparse, click, absl, fire: ``--name value``, ``--name=value``, ``-n value``, ``-n=value``. Words behind an option
  are its values up to the next option (``nargs="+"``), so a word behind a flag looks like its value. A number is
  a value although it starts with ``-``, as is ``-`` alone. ``-nVALUE`` cannot be distinguished from a long ``-name``.
- A flag is an option without values. ``--`` ends the options: no later word is one because of its dashes.
- OmegaConf, LLaMA-Factory and Hydra: ``key.name=value``, ``+key=value``, ``++key=value``. Such a word is an option
  wherever it stands. Behind another option it is also its value (``--cfg-options key=value``).

If an option stands there twice, the last one counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Iterable, List, Sequence, Tuple

_NUMBER = re.compile(r"-(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
_PAIR = re.compile(r"(\+{0,2}[A-Za-z_][\w.@/-]*)=(.*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class Option:
    """An option with its values, or plain words.

    Attributes:
        typed: the option as typed, without its value; "" for plain words.
        values: its values, in their order.
    """

    typed: str
    values: Tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The option as a variable: ``resume_from`` for ``--resume-from``. Dots stay."""
        return self.typed.lstrip("-+").replace("-", "_").lower()


def read(words: Sequence[str]) -> Tuple[Option, ...]:
    """The options, in the order in which they start, and the plain words between them."""
    found: List[Tuple[str, List[str]]] = [("", [])]
    behind = found[0]  # takes the next values
    ended = False
    for word in words:
        pair = _PAIR.fullmatch(word)
        if word == "--" and not ended:
            ended, behind = True, ("", [])
            found.append(behind)
        elif word.startswith("-") and word != "-" and not ended and not _NUMBER.fullmatch(word):
            name, has, value = word.partition("=")
            behind = ("", []) if has else (name, [])
            found += [(name, [value]), behind] if has else [behind]
        elif pair is None:
            behind[1].append(word)
        else:
            if behind[0]:
                behind[1].append(word)
            found.append((pair[1], [pair[2]]))
    return tuple(Option(name, tuple(values)) for name, values in found if name or values)


def last(options: Iterable[Option], name: str) -> Tuple[str, ...]:
    """The values of the last option of a name; empty without one."""
    return next((option.values for option in reversed(tuple(options)) if option.name == name), ())
