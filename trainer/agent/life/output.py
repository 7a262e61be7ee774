"""What a run's processes write on this node: into the run's own logs, to the events, and past the watch."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Callable, Dict, Optional

from events import Events
from life.logs import Lines, Progress, RankLogs
from plan import NodePlan


class Output:
    """The output of one attempt. ``on_line(rank, text)`` and ``on_progress(fields)`` are told of everything.

    ``on_bytes(rank, count)`` is told how much was written: a progress bar is no line until it ends.

    Made before the command starts: what lies there already is an earlier attempt's, and is not told again.
    """

    def __init__(
        self,
        plan: NodePlan,
        events: Events,
        on_line: Callable[[Optional[int], str], None],
        on_progress: Callable[[Dict[str, Any]], None],
        on_bytes: Callable[[Optional[int], int], None],
    ) -> None:
        self._events = events
        self._on_line = on_line
        self._on_progress = on_progress
        self._run_log = (plan.logs / "run.log").open("a", encoding="utf-8", buffering=1)
        self._launcher_log = (plan.logs / "launcher.log").open("ab", buffering=0)
        self._launcher_lines = Lines()
        self._on_bytes = on_bytes
        self._ranks = RankLogs(plan.rank_logs, plan.data.first_rank, on_bytes)
        self._progress = Progress(plan.progress)

    def take(self, fd: int) -> Optional[bytes]:
        """Take some of what the command itself has written: None when there is nothing now, empty at its end."""
        try:
            data = os.read(fd, 64 << 10)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        self._keep(self._launcher_log, data)
        self._on_bytes(None, len(data))
        for line in self._launcher_lines.feed(data):
            self._line(None, line)
        return data

    def look(self) -> None:
        """Find files of ranks that have appeared."""
        self._ranks.look()

    def tell(self, last: bool = False) -> None:
        """Tell what has come into the files; ``last`` also tells lines without a newline."""
        if last:
            for line in self._launcher_lines.flush():
                self._line(None, line)
        for rank, line in self._ranks.lines(last):
            self._line(rank, line)
        for progress in self._progress.events():
            self._events.emit("progress", **progress)
            self._on_progress(progress)

    def close(self) -> None:
        """Close the logs."""
        for file in (self._run_log, self._launcher_log):
            with contextlib.suppress(OSError):
                file.close()

    def _line(self, rank: Optional[int], line: str) -> None:
        self._events.emit("log", rank=rank, line=line)
        now = time.time()
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + ".%03dZ" % (now % 1 * 1000)
        self._keep(self._run_log, "%s [%s] %s\n" % (at, "launcher" if rank is None else rank, line))
        self._on_line(rank, line)

    def _keep(self, file: Any, data: Any) -> None:
        """Write to a log file. A full disk ends the log, not the run."""
        if file.closed:
            return
        try:
            file.write(data)
        except OSError as error:
            with contextlib.suppress(OSError):
                file.close()
            self._events.emit("notice", text="%s is no longer written: %s" % (file.name, error))
