"""Keeps the account of a run's time while the agent runs it."""

from __future__ import annotations

import time
from typing import Any, Dict, Mapping

from ..account import Account, usable_time
from ..contract.effective import read
from ..run_files import Events, State


def keep_account(events: Events, state: State, before: Mapping[str, Any]) -> None:
    """Let the events of a start keep the account of the run, and the state show it.

    Args:
        events: the events of this start.
        state: the state of this start.
        before: the state that the start before wrote; empty for a new run.
    """
    failed = before.get("state") not in ("finished", "stopped")
    kept = Account(read(before.get("spent")), failed=bool(before) and failed, ended=usable_time(before.get("time")))
    offset = time.time() - time.monotonic()  # a clock that is set does not change the account

    def now() -> float:
        return offset + time.monotonic()

    def take(event: Mapping[str, Any]) -> Dict[str, Any]:
        kept.take(event, now())
        return {"spent": kept.effective().to_object()} if event["event"] == "end" else {}

    kept.begin(now())
    events.account = take
    state.account = lambda: kept.effective(now()).to_object()
