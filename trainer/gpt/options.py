"""What the options of all programs of this package share: bounds of numbers, and mistakes in one line."""

from __future__ import annotations

import argparse
from typing import Any, Dict, List, Optional, Tuple, Union

from trainer.bounds import Bound
from trainer.gpt.errors import RefusedError

Number = Union[int, float]


class Parser(argparse.ArgumentParser):
    """A parser that knows the bound of each number, shows it in ``--help``, and refuses mistakes in one line."""

    def __init__(self, module: str, description: Optional[str]) -> None:
        super().__init__(prog="python -m %s" % module, description=description, allow_abbrev=False)
        self.bounds: Dict[str, Tuple[str, Bound]] = {}  # option and bound by the name of the value

    def number(self, option: str, usual: Number, bound: Bound, what: str, **more: Any) -> None:
        """Add an option that is a number. ``usual`` is its default."""
        kind = type(usual)
        told = ("%s (%s; %s)" % (what, usual, bound)).replace("%", "%%")
        settings = dict({"default": usual, "metavar": kind.__name__}, **more)
        action = self.add_argument(option, type=kind, help=told, **settings)
        self.bounds[action.dest] = (option, bound)

    def read(self, argv: Optional[List[str]] = None) -> Dict[str, Any]:
        """The values of a command line.

        Raises:
            RefusedError: an option that does not exist, or a value outside its bound.
        """
        given = vars(self.parse_args(argv))
        for name, (option, bound) in self.bounds.items():
            if name in given:
                check(option, given[name], bound)
        return given

    def error(self, message: str) -> Any:
        """Refuse instead of printing the usage and exiting."""
        raise RefusedError(message, "%s --help" % self.prog)


def check(where: str, value: Number, bound: Bound) -> None:
    """Refuse a number outside its bound.

    Raises:
        RefusedError: with the option (or the file and the key), the range and the value.
    """
    problem = bound.problem(value)
    if problem:
        raise RefusedError("%s %s" % (where, problem))
