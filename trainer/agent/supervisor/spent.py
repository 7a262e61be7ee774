"""Keeps the account of a run's time while the agent runs it.

In a run that survives the loss of nodes, the agent of rank 0 sends its account to the others now and then, and so does
that of the last rank if its ranks print steps, as Megatron's do. The node that takes its place after its loss continues
this account.
"""

from __future__ import annotations

import time
from typing import Any, Dict, Mapping, Sequence, Tuple

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
        self._heard: Dict[str, Tuple[Effective, Effective]] = {}  # by node: its account, and this one at that time
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

    def share(self, link: Any, rank: int, count: int, *, last: bool = False) -> None:
        """Send it to the other agents when it is time, or at once if it is the ``last`` one of an attempt.

        Args:
            link: to the other agents.
            rank: of this node.
            count: the number of nodes with ranks.
            last: the attempt has ended.
        """
        now = time.monotonic()
        if not (last or now - self._shared >= SHARE):
            return
        if rank == 0 or (rank == count - 1 and self._kept.effective().top is not None):
            self._shared = now
            link.send("spent", spent=self.to_object())

    def hear(self, node: str, value: Any) -> None:
        """Remember the account of another node's agent, which may be broken or lie: an invalid one is none."""
        found = read(value)
        if found is not None:
            self._heard[node] = found, self._kept.effective(self._now())

    def adopt(self, node: str, before: Sequence[str], after: Sequence[str]) -> None:
        """Continue the account of a lost node, if this ``node`` has its first or its last place now.

        Args:
            node: this one.
            before: the nodes with ranks before, in their order.
            after: those now.
        """
        lost = {before[end] for end in (0, -1) if node == after[end] != before[end]}
        for known, mine in [self._heard.pop(each) for each in lost if each in self._heard]:
            self._kept.take_over(known, mine, now=self._now())


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
