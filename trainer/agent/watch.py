"""``agent watch``: prints what is new of a run on this node, again and again, until its input ends.

It needs only the run's files, so it also shows a run of another version, or one that has ended. clusterctl sends it
over the connection; nothing of it is written to the node. Each look prints lines, of which ``tick`` is the last:

====================================  =================================================================================
``boot`` ``part`` ``state`` ``stat``  as ``templates/run/runs.sh.j2`` prints them, when ``state.json`` or the agent's
                                      process has changed
``sample`` JSON                       new samples; at first the last ``SAMPLES``
``event`` JSON                        new events without log lines, at most the last ``HISTORY`` bytes
``log`` LINE                          new lines of ``run.log``, at most the last ``LIMIT`` bytes
``tick`` EVENTS LOG                   the bytes of ``events.jsonl`` and ``run.log`` that have been read
====================================  =================================================================================

It runs every second beside a training, so a look opens only files that have changed.
"""

from __future__ import annotations

import collections
import os
import select
from typing import Deque, Iterator, List, NamedTuple, Tuple

from .processes import read, stat_of

LIMIT = 1 << 18  # bytes of a state, of samples, and of log lines in one look
HISTORY = 1 << 20  # bytes of events in one look
SAMPLES = 30  # in one look
LONGEST = (1 << 20) - 100  # bytes of a line; ssh would deliver a longer one in pieces
_PIECE = 1 << 20  # bytes read at a time
_LOG = b'"event": "log"'
_PID = b'"pid": '


class Tail:
    """The new complete lines of a file that grows. ``at``: the byte to start at; a shorter file is read whole."""

    def __init__(self, path: str, at: int) -> None:
        self.at = at
        self._path = path
        self._size = -1

    def lines(self, most: int = 0) -> Iterator[bytes]:
        """The new lines, without those over ``LONGEST``; with ``most``, only those in the last ``most`` bytes."""
        try:
            size = os.stat(self._path).st_size  # noqa: PTH116 - a Path for each look is slow
        except OSError:
            size = 0
        if size == self._size:
            return
        self._size = size
        if size < self.at or self.at < 0:
            self.at = 0
        if self.at >= size:
            return
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            if most and size - self.at > most:
                self.at = size - most
                self.at += os.pread(fd, most, self.at).find(b"\n") + 1
            yield from self._read(fd, size)
        finally:
            os.close(fd)

    def _read(self, fd: int, size: int) -> Iterator[bytes]:
        while self.at < size:
            data = os.pread(fd, min(_PIECE, size - self.at), self.at)
            end = data.rfind(b"\n") + 1
            if not end and len(data) == _PIECE:
                end = len(data)  # a line that never ends
            if not end:
                return
            self.at += end
            lines = (data[: end - 1] if data[end - 1 : end] == b"\n" else data).split(b"\n")
            yield from (line for line in lines if len(line) <= LONGEST)


class Place(NamedTuple):
    """The folder of the runs, the part's log folder below it, and the bytes to start at; -1: near the log's end."""

    runs: str
    logs: str
    events: int = 0
    log: int = -1


class Watcher:
    """Looks at the files of a part of a run."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._folder = "%s/%s" % (place.runs, place.logs)
        self._events = Tail(self._folder + "/events.jsonl", place.events)
        self._log = Tail(self._folder + "/run.log", place.log)
        self._samples = Tail(self._folder + "/metrics.jsonl", 0)
        self._written: Tuple[int, ...] = ()  # which state.json was read
        self._state = b""
        self._agent: Tuple[str, bool] = ("", False)  # the start of the agent's process, and whether it is alive

    def look(self) -> bytes:
        """The lines of one look."""
        output = self._part()
        samples: Deque[bytes] = collections.deque(self._samples.lines(LIMIT), maxlen=SAMPLES)
        output += [b"sample " + line for line in samples]
        output += [b"event " + line for line in self._new_events()]
        output += [b"log " + line for line in self._log.lines(LIMIT)]
        output.append(b"tick %d %d\n" % (self._events.at, max(0, self._log.at)))
        return b"\n".join(output)

    def _new_events(self) -> Deque[bytes]:
        found: Deque[bytes] = collections.deque()
        size = 0
        for line in self._events.lines():
            if _LOG in line:
                continue
            found.append(line)
            size += len(line) + 1
            while size > HISTORY:
                size -= len(found.popleft()) + 1
        return found

    def _part(self) -> List[bytes]:
        """The state and the agent's process, if they have changed."""
        path = self._folder + "/state.json"
        try:
            status = os.stat(path)  # noqa: PTH116
        except OSError:
            return []
        written = (status.st_ino, status.st_size, status.st_mtime_ns)
        changed = written != self._written
        if changed:
            self._written = written
            self._state = read(path)[:LIMIT].strip().replace(b"\n", b" ")
        digits = self._state.partition(_PID)[2][:10].partition(b",")[0].strip(b" }")
        pid = int(digits) if digits.isdigit() else 0
        stat = stat_of(pid) if pid else None
        agent = (stat.start, stat.state not in "ZX") if stat else ("", False)
        if not changed and agent == self._agent:
            return []
        self._agent = agent
        output = [
            b"boot " + read("/proc/sys/kernel/random/boot_id").strip(),
            b"part %s -" % self._place.logs.encode(),
            b"state " + self._state,
        ]
        return [*output, b"stat " + read("/proc/%d/stat" % pid).strip()] if stat else output


def watch(place: Place, every: float) -> int:
    """Print what is new every ``every`` seconds, until the input ends. Returns the exit code: 1 if the reader left."""
    watcher = Watcher(place)
    while True:
        data = watcher.look()
        try:
            while data:
                data = data[os.write(1, data) :]
        except BrokenPipeError:
            return 1
        if select.select([0], [], [], every)[0] and not os.read(0, 4096):
            return 0
