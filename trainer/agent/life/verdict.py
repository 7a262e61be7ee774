"""How an attempt went as a whole, decided on rank 0 from what every node tells of its part. Pure.

A node's part (``outcome``) is ``{"rc", "signal", "stopped", "failed", "killed", "left", "step"}``: how its command
ended, whether a stop was asked for before that, the first failure it knows of (``{"node", "rank", "text", "signal",
"time"}``), the first rank that was ``killed`` there before the agents ended anything (the same without ``signal``),
processes that nothing could end, and the last step it has seen.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional

Outcomes = Dict[int, Dict[str, Any]]

# How a rank ends that is killed from outside, by the kernel for want of memory, or by its own broken memory.
KILLS = ("SIGKILL", "SIGSEGV", "SIGBUS")
# How NCCL's watchdog ends a rank that has lost another one. It is often faster than the kernel, which lets a killed
# process end only when its GPU's memory is given back.
ECHO = "SIGABRT"

FINISHED, FAILED, STOPPED, AGAIN = STATES = ("finished", "failed", "stopped", "again")


def judge(outcomes: Outcomes, first: Optional[Dict[str, Any]], *, more: bool) -> Dict[str, Any]:
    """``state`` (finished, failed, stopped or again), ``why`` and ``step``.

    Args:
        outcomes: by node rank.
        first: the first failure that rank 0 has learned of; another node's word counts only when there is none.
        more: whether another attempt may be made.
    """
    step = max((outcome["step"] for outcome in outcomes.values() if outcome.get("step") is not None), default=None)
    why = first or earliest([outcome["failed"] for outcome in outcomes.values() if outcome.get("failed")])
    if why is not None and why.get("signal") == ECHO:
        why = earliest([outcome["killed"] for outcome in outcomes.values() if outcome.get("killed")]) or why
    if any(outcome["stopped"] for outcome in outcomes.values()):
        return {"state": STOPPED, "why": None, "step": step}
    if why is None and all(outcome["rc"] == 0 for outcome in outcomes.values()):
        return {"state": FINISHED, "why": None, "step": step}
    stuck = any(outcome["left"] for outcome in outcomes.values())
    return {"state": AGAIN if more and not stuck else FAILED, "why": why, "step": step}


def earliest(failures: List[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
    """The failure with the lowest time. Clocks of nodes may differ: only for want of a better order."""
    return min(failures, key=lambda failure: float(failure.get("time") or 0.0), default=None)
