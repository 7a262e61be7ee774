"""Samples the GPUs of a node with one nvidia-smi that repeats its output.

Its start costs more than all other sampling together, so it runs once. Its pipe is read without blocking, so an
nvidia-smi that hangs because of a failed driver costs nothing. It is a child of the agent but not a process of the
run; ``pid`` identifies it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import Any, Dict, List, Optional, Tuple

EVERY = 10  # seconds between nvidia-smi's outputs
STALE = 30.0  # seconds after which its output is out of date
AGAIN = 300.0  # seconds after which one that exited or hangs is restarted

# nvidia-smi --help-query-gpu: our name, theirs, the factor to our unit
QUERY = (
    ("index", "index", 1),
    ("use", "utilization.gpu", 1),
    ("memory", "memory.used", 1 << 20),
    ("memory_total", "memory.total", 1 << 20),
    ("power", "power.draw", 1),
    ("temperature", "temperature.gpu", 1),
)
NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=" + ",".join(theirs for _, theirs, _ in QUERY),
    "--format=csv,noheader,nounits",
    "--loop=%d" % EVERY,
)


class Gpus:
    """The latest output of nvidia-smi. ``now`` is any monotonic clock, in seconds."""

    def __init__(self, argv: Tuple[str, ...] = NVIDIA_SMI) -> None:
        self._argv = argv
        self._child: Optional["subprocess.Popen[bytes]"] = None
        self._begun: Optional[float] = None
        self._rest = b""
        self._latest: Dict[int, Tuple[float, Dict[str, Any]]] = {}  # index: when it was printed, and its values
        self._there = True

    @property
    def pid(self) -> Optional[int]:
        """The pid of nvidia-smi while it is running."""
        return self._child.pid if self._child else None

    def look(self, now: float) -> Optional[List[Dict[str, Any]]]:
        """The last values of each GPU; None if there are none or they are too old."""
        self._listen(now)
        if self._child is None and (self._begun is None or now - self._begun >= AGAIN):
            self._start(now)
        fresh = [values for _, (at, values) in sorted(self._latest.items()) if now - at <= STALE]
        if self._child is not None and self._begun is not None:
            last_output = max([at for at, _ in self._latest.values()] + [self._begun])
            if now - last_output > STALE:
                self.close()
        return fresh or None

    def close(self) -> None:
        """Kill nvidia-smi without waiting: one stuck in its driver does not exit."""
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(OSError):
            child.kill()
        assert child.stdout is not None
        child.stdout.close()
        if child.poll() is None:
            child.returncode = 0  # it is reaped with all children; Popen would wait for it again and again

    def _start(self, now: float) -> None:
        if not self._there:
            return
        self._begun, self._rest = now, b""
        try:
            child = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError:
            self._there = False  # it is not installed
            return
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        self._child = child

    def _listen(self, now: float) -> None:
        if self._child is None or self._child.stdout is None:
            return
        data = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                part = os.read(self._child.stdout.fileno(), 64 << 10)
                data += part
                if not part:
                    self.close()
                    break
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            values = gpu(line.decode("ascii", "replace"))
            if values:
                self._latest[values["index"]] = (now, values)


def gpu(line: str) -> Optional[Dict[str, Any]]:
    """Parse a line of nvidia-smi; None for other text ("Unable to determine the device handle …")."""
    values = [_number(value) for value in line.split(",")]
    if len(values) != len(QUERY) or not isinstance(values[0], int):
        return None
    return {ours: None if value is None else value * unit for (ours, _, unit), value in zip(QUERY, values)}  # noqa: B905


def _number(text: str) -> Any:
    try:
        value = float(text)
    except ValueError:
        return None  # "[N/A]", "[Not Supported]", "[GPU requires reset]"
    return int(value) if value == int(value) else value
