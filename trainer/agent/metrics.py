"""The samples of a run: one JSON object per line in ``metrics.jsonl``, see ``sampling.py``.

``Metrics`` adds the attempt and its progress, the fields of the event ``progress``.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, Dict, Optional

from .disks import Disks
from .notify import DISK_FULL
from .processes import Stat
from .run_files import Events, NodePlan
from .sampling import Sampler
from .supervisor.control import Control
from .textfile import Textfile

LIMIT = 64 << 20  # bytes of metrics.jsonl and the older part together


def append(path: str, sample: Dict[str, Any], limit: int = LIMIT) -> bool:
    """Append a line. A file longer than half of ``limit`` is renamed to ``<path>.1`` first.

    False if it could not be written, for example on a full disk; it never leaves half a line.
    """
    line = json.dumps(sample, separators=(",", ":")).encode() + b"\n"
    try:
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_size + len(line) > limit // 2:  # noqa: PTH116
                os.replace(path, path + ".1")  # noqa: PTH105
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(fd).st_size
            if os.write(fd, line) < len(line):
                os.ftruncate(fd, size)
                return False
        finally:
            os.close(fd)
    except OSError:
        return False
    return True


EVERY = 10.0  # seconds between samples
# Bytes per second, in and out of one port: more than an idle machine, less than any training that communicates.
COMMUNICATES = 1 << 20


class Metrics:
    """The samples of one attempt."""

    def __init__(self, plan: NodePlan, control: Control, events: Events, textfile: Textfile) -> None:
        self._path = str(plan.logs / "metrics.jsonl")
        self._sampler = Sampler(plan.data.first_rank, str(plan.folder))
        self._control, self._events, self._textfile = control, events, textfile
        self._disks = Disks(plan, events)
        self._known: Dict[str, Any] = {}  # of the progress
        self._due = 0.0
        self._writes = True

    def progress(self, fields: Dict[str, Any]) -> None:
        """Take the fields of a progress event."""
        self._known.update(fields)

    def look(self, members: Dict[int, Stat], now: float) -> Dict[str, Any]:
        """Take a sample if it is due, and return it; else an empty one."""
        if now < self._due:
            return {}
        self._due = now + EVERY
        self._disks.look()
        sample = dict(self._sampler.sample(members), attempt=self._events.attempt, **self._known)
        if communicates(sample):
            self._control.last_traffic = now
        if self._writes and not append(self._path, sample):
            self._writes = False  # a full disk ends the log, not the run
            text = "%s is no longer written: the disk is full" % self._path
            self._events.emit("notice", kind=DISK_FULL, text=text)
        self._textfile.write(sample)
        return sample

    def lost_gpus(self) -> Optional[str]:
        """Describe the GPUs that this node has lost since the attempt started; see ``lost_gpus.py``."""
        from .lost_gpus import lost_gpus  # noqa: PLC0415 - only after a failure

        return lost_gpus(self._sampler.gpus(), self._control.wait)

    def close(self) -> None:
        """End the sampler's children."""
        self._sampler.close()


def communicates(sample: Dict[str, Any]) -> bool:
    """Whether a sample shows the traffic of a training run, on any port."""
    rates = [*sample.get("network", {}).values(), *sample.get("infiniband", {}).values()]
    return any(min(rate["in"], rate["out"]) >= COMMUNICATES for rate in rates)
