"""Runs a command and measures it: wall time, CPU time of all its children, memory of its process tree."""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SAMPLE = 0.05  # seconds between two samples of the memory
TAIL = 6  # lines of a failed command that are shown
WIDTH = 100  # characters of its command line
PIPE = ("bash", "-o", "pipefail", "-c")


class BenchError(Exception):
    """A figure cannot be measured; the message says why."""


@dataclass(frozen=True)
class Usage:
    """``wall`` and ``cpu`` in seconds; ``peak`` in bytes, 0 if it was not measured."""

    wall: float
    cpu: float = 0.0
    peak: int = 0


@dataclass(frozen=True)
class Done:
    """A command that ended with status 0."""

    usage: Usage
    out: str
    err: str


class Job:
    """A command that runs. ``memory`` watches its process tree, at the cost of a few percent of a core."""

    def __init__(
        self, argv: Sequence[str | Path], *, cwd: Path | None = None, stdin: Path | None = None, memory: bool = False
    ) -> None:
        self.argv = [str(word) for word in argv]
        self._out, self._err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 - `wait` and `stop` close them
        with Path(stdin or os.devnull).open("rb") as source:
            self._started = time.perf_counter()
            try:
                self._process = subprocess.Popen(
                    self.argv, cwd=cwd, stdin=source, stdout=self._out, stderr=self._err, start_new_session=True
                )
            except OSError as error:
                self._close()
                raise BenchError(f"{self.argv[0]} cannot be started: {error.strerror}") from error
        self._peak = Peak(self._process.pid) if memory else None

    @property
    def running(self) -> bool:
        # WNOWAIT: the usage is read in `finish`
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def wait(self) -> tuple[int, Done]:
        """Its exit status, its cost and its output."""
        try:
            _, status, usage = os.wait4(self._process.pid, 0)
        except BaseException:
            self.stop()
            raise
        wall = time.perf_counter() - self._started
        self._process.returncode = os.waitstatus_to_exitcode(status)
        peak = self._peak.stop() if self._peak else 0
        done = Done(Usage(wall, usage.ru_utime + usage.ru_stime, peak), _text(self._out), _text(self._err))
        return self._process.returncode, done

    def finish(self) -> Done:
        """Waits for it.

        Raises:
            BenchError: it failed; with its last lines.
        """
        status, done = self.wait()
        if status:
            lines = [line for line in (done.err + done.out).splitlines() if line.strip()]
            command = textwrap.shorten(" ".join(self.argv), WIDTH, placeholder=" …")
            raise BenchError(f"`{command}` exited {status}: {'; '.join(lines[-TAIL:])}")
        return done

    def stop(self) -> None:
        """Kills it and everything in its session."""
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._peak:
            self._peak.stop()
        self._close()

    def _close(self) -> None:
        for file in (self._out, self._err):
            file.close()


def run(
    argv: Sequence[str | Path], *, cwd: Path | None = None, stdin: Path | None = None, memory: bool = False
) -> Done:
    """A command from its start to its end.

    Raises:
        BenchError: it failed.
    """
    return Job(argv, cwd=cwd, stdin=stdin, memory=memory).finish()


def _text(file: Any) -> str:
    with file:
        file.seek(0)
        return file.read().decode(errors="replace")


class Peak:
    """Samples a process and its descendants; ``stop`` returns their largest memory together, in bytes.

    The proportional set size is summed: a page that several of them share counts once.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return self._most

    def _watch(self) -> None:
        while True:
            self._most = max(self._most, sum(map(_memory, _tree(self._pid))))
            if self._over.wait(SAMPLE):
                return


def _tree(pid: int) -> list[int]:
    """A process and its descendants, from proc(5)'s /proc/PID/task/TID/children."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):  # it has exited
                found += map(int, children.read_text().split())
    return found


def _memory(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it has exited
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


@dataclass(frozen=True)
class Series:
    """The measurements of one side: a warm-up, with its memory sampled, and the runs that count."""

    warm: Usage
    runs: list[Usage] = field(default_factory=list)

    @property
    def wall(self) -> float:
        return statistics.median(usage.wall for usage in self.runs)

    @property
    def cpu(self) -> float:
        return statistics.median(usage.cpu for usage in self.runs)

    @property
    def peak(self) -> int:
        return self.warm.peak

    def raw(self) -> dict[str, Any]:
        return {"warm_up": asdict(self.warm), "runs": [asdict(usage) for usage in self.runs]}


Side = Callable[[bool], Usage]


def alternate(title: str, sides: Mapping[str, Side], runs: int) -> dict[str, Series]:
    """Runs every side once to fill the caches and to sample its memory, then A B A B …"""
    series: dict[str, Series] = {}
    for name, side in sides.items():
        with progress(f"{title}: {name}, warm-up") as report:
            series[name] = Series(side(True))
            report(f"{series[name].warm.wall:.1f} s")
    for number in range(1, runs + 1):
        for name, side in sides.items():
            with progress(f"{title}: {name}, run {number} of {runs}") as report:
                usage = side(False)
                series[name].runs.append(usage)
                report(f"{usage.wall:.2f} s wall, {usage.cpu:.2f} s CPU")
    return series


class progress:  # noqa: N801 - reads as a verb: with progress("…") as report
    """A line on stderr with what is measured, completed by its result or by ``failed``."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._text = ""

    def __enter__(self) -> Callable[[str], None]:
        print(f"{self._what} ...", end="", file=sys.stderr, flush=True)
        self._started = time.perf_counter()
        return self._report

    def _report(self, text: str) -> None:
        self._text = text

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        text = self._text or f"{time.perf_counter() - self._started:.1f} s"
        print(f" {'failed' if kind else text}", file=sys.stderr, flush=True)
