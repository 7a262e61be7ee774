"""What to say about ranks that failed. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_STACK = re.compile(r"\n?(Exception raised from|frame #\d+|Traceback \(most recent)")
_NOISE = re.compile(r"NCCL INFO|Exception raised from|^\s*frame #\d+|^\s*$|Traceback \(most recent")
_TELLING = re.compile(r"(?i)error|warn|fail|refused|timed out|no such|not found")
_WAITED = re.compile(r"(?i)time[d-]?\s?out|connection (reset|refused|closed)|failed to connect|no output for")
_TEXT = 400  # characters of torch's own words


def reason(event: Mapping[str, Any]) -> str:
    """Why a rank failed, from the event ``failed``: its own words, and of its log what adds to them."""
    why = _STACK.split(str(event["why"]), maxsplit=1)[0].strip()
    why = " ".join(why.split())[:_TEXT]
    said = [line.strip() for line in event["log"] if not _NOISE.search(line) and _TELLING.search(line)]
    more = [line for line in dict.fromkeys(said) if why[:60] not in " ".join(line.split())][-4:]
    return "\n".join([f"rank {event['rank']}: {why}", *more])


def stage(events: Sequence[Mapping[str, Any]], world: int) -> str:
    """How far the ranks came, where they waited for one another in vain; "" where something else went wrong."""
    if not any(event["event"] == "failed" and _WAITED.search(str(event["why"])) for event in events):
        return ""
    seen = {kind: {event["rank"] for event in events if event["event"] == kind} for kind in ("met", "ready")}
    if len(seen["ready"]) == world:
        return ""
    if len(seen["met"]) == world:
        return "all ranks have reached rank 0, but not one another: is there a firewall between the nodes?"
    missing = sorted(set(range(world)) - seen["met"])
    return f"rank {', '.join(map(str, missing))} did not come to rank 0's port"
