"""Keeps the account of a run's time while the agent runs it.

In a run that survives the loss of nodes, rank 0's agent sends its account to the others now and then. The node that
takes rank 0 after its loss continues this account.
"""

from __future__ import annotations

import time
from typing import Any, Dict, Mapping, Optional, Tuple

from ..account import Account, usable_time
from ..contract.effective import Effective, read
from ..run_files import Events, State

SHARE = 10.0  # seconds between two messages: so much of the training may be missing after a loss


class KeptAccount:
    """The account of a run, as this node keeps it.

    Args:
        before: the state that the start before wrote; empty for a new run.
    """

    def __init__(self, before: Mapping[str, Any]) -> None:
        failed = before.get("state") not in ("finished", "stopped")
        ended = usable_time(before.get("time"))
        self._kept = Account(read(before.get("spent")), failed=bool(before) and failed, ended=ended)
        self._offset = time.time() - time.monotonic()  # a clock that is set does not change the account
        self._shared = float("-inf")
        self._heard: Optional[Tuple[Effective, Effective]] = None  # rank 0's, and this one at that time
        self._kept.begin(self._now())

    def _now(self) -> float:
        return self._offset + time.monotonic()

    def take(self, event: Mapping[str, Any]) -> Dict[str, Any]:
        """Take an event. Returns fields to add to it."""
        self._kept.take(event, self._now())
        return {"spent": self._kept.effective().to_object()} if event["event"] == "end" else {}

    def to_object(self) -> Dict[str, Any]:
        """The account up to now, for the state."""
        return self._kept.effective(self._now()).to_object()

    def share(self, link: Any, *, last: bool = False) -> None:
        """Send it to the other agents when it is time, or at once if it is the ``last`` one of an attempt."""
        now = time.monotonic()
        if last or now - self._shared >= SHARE:
            self._shared = now
            link.send("spent", spent=self.to_object())

    def hear(self, value: Any) -> None:
        """Remember the account of rank 0's agent, which may be broken or lie: an invalid one is none."""
        found = read(value)
        if found is not None:
            self._heard = found, self._kept.effective(self._now())

    def take_over(self) -> None:
        """Continue the account of rank 0's node, which is lost: this node has its rank now."""
        if self._heard is not None:
            self._kept.take_over(*self._heard, now=self._now())
        self._heard = None


def keep_account(events: Events, state: State, before: Mapping[str, Any]) -> KeptAccount:
    """Let the events of a start keep the account of the run, and the state show it.

    Args:
        events: the events of this start.
        state: the state of this start.
        before: the state that the start before wrote; empty for a new run.
    """
    kept = KeptAccount(before)
    events.account = kept.take
    state.account = kept.to_object
    return kept
