"""``agent follow``: prints the events of a run as they arrive, from an offset on. Controllers can reconnect."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
from typing import Any, Dict, List, Optional

from .contract.untrusted import UntrustedError, parse_object
from .processes import open_pidfd
from .run_files import EVENTS, FINAL, NodePlan, read_state, running_agents

TICK = 0.1  # seconds between looks at a file that grows
LOOK = 2.0  # seconds between looks for an agent without a pidfd, or one that starts late
PIECE = 1 << 20  # bytes read at a time


class _GoneError(Exception):
    """The reader has closed stdout."""


class Follower:
    """Follows the events of one node. ``offset``: the byte of ``events.jsonl`` to start at."""

    def __init__(self, plan: NodePlan, offset: int) -> None:
        self._plan = plan
        self._at = offset
        self._rest = b""
        self._poll = select.poll()
        self._poll.register(1, 0)  # to notice that the reader has closed it
        self._handles: Dict[int, int] = {}  # pid of the agent: pidfd
        self._ended = False

    def run(self) -> int:
        """Print until the run ends, its agent exits, or the reader leaves."""
        try:
            while not self._ended:
                alive = bool(running_agents(read_state(self._plan.logs)))
                self._follow(alive)
                if not alive:
                    break
            if not self._ended:
                self._print(self._last())
        except (BrokenPipeError, _GoneError):
            return 1
        return 0

    def _follow(self, alive: bool) -> None:
        """Print new events until the agent has exited or may have."""
        self._watch()
        looks = int(LOOK / TICK)
        while not self._ended:
            grown = self._read()
            if grown and not alive:
                continue
            if not alive or looks <= 0:
                return
            looks -= 0 if grown else 1
            for fd, event in self._poll.poll(0 if grown else TICK * 1000):
                if fd == 1 and event & (select.POLLERR | select.POLLHUP):
                    raise _GoneError
                if fd != 1:
                    self._read()
                    self._forget(fd)
                    return

    def _watch(self) -> None:
        for pid, _ in running_agents(read_state(self._plan.logs)):
            handle = open_pidfd(pid) if pid not in self._handles else None
            if handle is not None:
                self._handles[pid] = handle
                self._poll.register(handle, select.POLLIN)

    def _forget(self, fd: int) -> None:
        self._poll.unregister(fd)
        for pid, handle in list(self._handles.items()):
            if handle == fd:
                del self._handles[pid]
        os.close(fd)

    def _read(self) -> bool:
        """Print new complete lines. False when there is nothing new."""
        try:
            fd = os.open(self._plan.logs / EVENTS, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            data = os.pread(fd, PIECE, self._at + len(self._rest))
        finally:
            os.close(fd)
        if not data:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        output: List[str] = []
        for line in lines:
            self._at += len(line) + 1
            with contextlib.suppress(UntrustedError):  # torn by a full disk
                event = parse_object(line)
                output.append(json.dumps(dict(event, at=self._at)))
                self._ended = self._ended or event.get("event") == "end"
        if output:
            sys.stdout.write("\n".join(output) + "\n")
            sys.stdout.flush()
        return True

    def _last(self) -> Dict[str, Any]:
        """The last event when the agent exited without an event ``end``: a full disk may have prevented it."""
        state = read_state(self._plan.logs)
        if state.get("state") in FINAL:
            fields = {key: state.get(key) for key in ("state", "why", "step", "saved", "time", "attempt")}
            return dict(fields, event="end")
        return {"event": "gone"}

    def _print(self, event: Dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(dict(event, at=self._at)) + "\n")
        sys.stdout.flush()


def follow(plan: NodePlan, offset: Optional[int]) -> int:
    """Print the events of a run's node from ``offset`` on. Returns the exit code: 1 when the reader left."""
    return Follower(plan, offset or 0).run()
