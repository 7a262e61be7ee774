"""The parser that the trainer's programs share: numbers have bounds, and an error is one line."""

from __future__ import annotations

import argparse
from typing import Any, Dict, List, Optional, Tuple, Union

from trainer.bounds import Bound
from trainer.lm.errors import RefusedError

Number = Union[int, float]


class Parser(argparse.ArgumentParser):
    """A parser that checks the bound of each number, shows it in ``--help``, and reports errors in one line."""

    def __init__(self, module: str, description: Optional[str]) -> None:
        super().__init__(prog="python -m %s" % module, description=description, allow_abbrev=False)
        self.bounds: Dict[str, Tuple[str, Bound]] = {}  # option and bound by the name of the value

    def number(self, option: str, default_value: Number, bound: Bound, what: str, **more: Any) -> None:
        """Add a numeric option."""
        kind = type(default_value)
        shown = ("%s (%s; %s)" % (what, default_value, bound)).replace("%", "%%")
        settings = dict({"default": default_value, "metavar": kind.__name__}, **more)
        action = self.add_argument(option, type=kind, help=shown, **settings)
        self.bounds[action.dest] = (option, bound)

    def read(self, argv: Optional[List[str]] = None) -> Dict[str, Any]:
        """Return the values of a command line.

        Raises:
            RefusedError: an unknown option, or a value outside its bound.
        """
        options = vars(self.parse_args(argv))
        for name, (option, bound) in self.bounds.items():
            if name in options:
                check_bound(option, options[name], bound)
        return options

    def error(self, message: str) -> Any:
        """Raise a RefusedError instead of printing the usage and exiting."""
        raise RefusedError(message, "%s --help" % self.prog)


def check_bound(where: str, value: Number, bound: Bound) -> None:
    """Refuse a number outside its bound.

    Raises:
        RefusedError: names the option (or file and key), the range and the value.
    """
    problem = bound.problem(value)
    if problem:
        raise RefusedError("%s %s" % (where, problem))
