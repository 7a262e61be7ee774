"""The training of steps.py under other options, which its source does not show: only running it does.

torchrun … hidden.py --steps 40 --out_dir out --save_every 5
"""

from __future__ import annotations

import argparse
import importlib
import sys

OPTIONS = {"steps": "40", "out_dir": "out", "save_every": "5", "resume_from": ""}


class Options(argparse.ArgumentParser):
    """A parser that a team shares."""

    def declare(self, options: dict[str, str]) -> None:
        """Declare an option for each default."""
        for name, default in options.items():
            self.add_argument(f"--{name}", default=default)


if __name__ == "__main__":
    parser = Options()
    parser.declare(OPTIONS)
    given = parser.parse_args()
    sys.argv[1:] = ["--steps", given.steps, "--output", given.out_dir, "--save-every", given.save_every]
    sys.argv += ["--resume", given.resume_from] if given.resume_from else []
    importlib.import_module("steps").main()
