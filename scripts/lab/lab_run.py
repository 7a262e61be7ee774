"""Running the commands that build the environment: one log, timed steps, and the end of the log when one fails."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TAIL = 15


class LabError(Exception):
    """The rehearsal environment cannot be built; the message says what, where and what to do."""


def clean_environment() -> dict[str, str]:
    """Ours, less what would make another Python or pip work on the wrong environment."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_USER", "PIP_REQUIRE_VIRTUALENV", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "PYTHONNOUSERSITE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


@dataclass
class Log:
    """Where output goes (None: nowhere), and how long each step took in seconds."""

    path: Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        print(f"  {title} ...", end="", file=sys.stderr, flush=True)
        started = time.monotonic()
        try:
            yield
        except BaseException:
            print(" failed", file=sys.stderr, flush=True)
            raise
        self.seconds[title] = round(time.monotonic() - started, 1)
        print(f" {self.seconds[title]:.1f} s", file=sys.stderr, flush=True)

    def run(self, argv: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        """Runs argv with more variables, ``env``, and returns what it printed.

        Raises:
            LabError: It failed or did not start; with its last lines.
        """
        words = [str(word) for word in argv]
        try:
            done = subprocess.run(
                words, cwd=cwd, env={**clean_environment(), **(env or {})}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
            )  # fmt: skip
        except OSError as error:
            raise LabError(f"cannot run {words[0]}: {error.strerror}") from error
        if self.path:
            with self.path.open("a") as log:
                log.write(f"$ {' '.join(words)}\n{done.stdout}")
        if done.returncode:
            tail = "\n".join(done.stdout.splitlines()[-TAIL:])
            whole = f"\nThe whole log: {self.path}" if self.path else ""
            raise LabError(f"`{' '.join(words)}` exited {done.returncode}:\n{tail}{whole}")
        return done.stdout

    def ask(self, python: Path, program: str) -> dict[str, object]:
        """The JSON object that `program` prints on a separate line; other output is ignored."""
        lines = self.run([python, "-I", "-c", program]).splitlines()
        return json.loads(next(line for line in reversed(lines) if line.startswith('{"')))
