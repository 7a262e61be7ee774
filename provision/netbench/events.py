"""Parses the events of ``trainer/network``, and explains failed ranks. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.agent.contract.untrusted import UntrustedError, parse_object

_LINE = 4 << 20  # characters: a row holds the time of every iteration
_MOST = 1 << 53


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _times(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_number(each) and each > 0 for each in value)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _lines(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


_FIELDS: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    "met": {"rank": _count},
    "ready": {"rank": _count, "busy": _number},
    "row": {"op": _text, "bytes": _count, "world": _count, "times": _times, "wrong": _count},
    "pair": {"a": _count, "b": _count, "bytes": _count, "times": _times},
    "skipped": {"op": _text, "why": _text},
    "network": {"rank": _count, "text": _text},
    "failed": {"rank": _count, "why": _text, "log": _lines},
    "end": {},
}


def parse(line: str, nodes: int) -> dict[str, Any] | None:
    """The event in a line; None if it is not an event, such as another program's output.

    Args:
        line: a line of a node's output.
        nodes: the number of nodes.
    """
    try:
        event = parse_object(line, limit=_LINE)
    except UntrustedError:
        return None
    checks = _FIELDS.get(kind) if isinstance(kind := event.get("event"), str) else None
    if checks is None or not all(name in event and check(event[name]) for name, check in checks.items()):
        return None
    if kind == "pair" and max(event["a"], event["b"]) >= nodes:
        return None
    return event


_STACK = re.compile(r"\n?(Exception raised from|frame #\d+|Traceback \(most recent)")
_NOISE = re.compile(r"NCCL INFO|Exception raised from|^\s*frame #\d+|^\s*$|Traceback \(most recent")
_TELLING = re.compile(r"(?i)error|warn|fail|refused|timed out|no such|not found")
_WAITED = re.compile(r"(?i)time[d-]?\s?out|connection (reset|refused|closed)|failed to connect|no output for")
_TEXT = 400  # characters of torch's message


def reason(event: Mapping[str, Any]) -> str:
    """Why a rank failed, from the event ``failed``: its message, and the relevant lines of its log."""
    why = _STACK.split(str(event["why"]), maxsplit=1)[0].strip()
    why = " ".join(why.split())[:_TEXT]
    relevant = [line.strip() for line in event["log"] if not _NOISE.search(line) and _TELLING.search(line)]
    more = [line for line in dict.fromkeys(relevant) if why[:60] not in " ".join(line.split())][-4:]
    return "\n".join([f"rank {event['rank']}: {why}", *more])


def stage(events: Sequence[Mapping[str, Any]], world: int) -> str:
    """How far the ranks came before they timed out; "" for another failure."""
    if not any(event["event"] == "failed" and _WAITED.search(str(event["why"])) for event in events):
        return ""
    seen = {kind: {event["rank"] for event in events if event["event"] == kind} for kind in ("met", "ready")}
    if len(seen["ready"]) == world:
        return ""
    if len(seen["met"]) == world:
        return "all ranks reached rank 0, but not one another: is there a firewall between the nodes?"
    missing = sorted(set(range(world)) - seen["met"])
    return f"rank {', '.join(map(str, missing))} did not reach rank 0's port"
