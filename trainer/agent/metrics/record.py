"""Samples of an attempt into ``metrics.jsonl``, with what is known of its progress."""

from __future__ import annotations

from typing import Any, Dict

from events import Events
from life.inbox import Inbox
from metrics.samples import Sampler, append
from plan import NodePlan
from processes.proc import Stat

EVERY = 10.0  # seconds between samples
# Bytes a second, in and out of one port: more than a machine that only waits, less than any training that communicates.
COMMUNICATES = 1 << 20


class Metrics:
    """The samples of one attempt."""

    def __init__(self, plan: NodePlan, inbox: Inbox, events: Events) -> None:
        self._path = str(plan.logs / "metrics.jsonl")
        self._sampler = Sampler(plan.data.first_rank, str(plan.folder))
        self._inbox, self._events = inbox, events
        self._known: Dict[str, Any] = {}  # of the progress
        self._due = 0.0
        self._writes = True

    def progress(self, fields: Dict[str, Any]) -> None:
        """Take the fields of a progress event."""
        self._known.update(fields)

    def look(self, members: Dict[int, Stat], now: float) -> None:
        """Take a sample, when it is time."""
        if now < self._due:
            return
        self._due = now + EVERY
        sample = dict(self._sampler.sample(members), attempt=self._events.attempt, **self._known)
        if communicates(sample):
            self._inbox.communicated = now
        if self._writes and not append(self._path, sample):
            self._writes = False  # a full disk ends the log, not the run
            self._events.emit("notice", text="%s is no longer written: the disk is full" % self._path)

    def close(self) -> None:
        """End what the sampler has started."""
        self._sampler.close()


def communicates(sample: Dict[str, Any]) -> bool:
    """Whether a sample shows the traffic of a training run, on any port."""
    rates = [*sample.get("network", {}).values(), *sample.get("infiniband", {}).values()]
    return any(min(rate["in"], rate["out"]) >= COMMUNICATES for rate in rates)
