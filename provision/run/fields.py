"""Reads what an agent writes: events, ``state.json``, samples, and answers to commands. Pure.

A node may be broken or hostile, so every text from one passes through here. The text has a limit. A field with a wrong
type or a value out of range is dropped, as if the agent had not written it. Unknown fields stay: no command reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from trainer.agent.contract import effective, expected
from trainer.agent.contract.untrusted import UntrustedError, is_whole, parse_object

LINE = 1 << 20  # characters of one line: an event with the stacks of all ranks of a node is the longest
TEXT = 20_000  # characters of a text that is shown
NAME = 1000  # characters of a name, a path or a word
RANKS = 1 << 20
_LISTED = 1000  # processes in a list
_COUNT = 1 << 53  # steps, bytes of a file of events
_NEVER = 1e11  # epoch seconds that no clock shows
_PID = 1 << 31

Check = Callable[[Any], bool]


def _whole(value: Any, most: int = _COUNT) -> bool:
    return is_whole(value, most)


def _number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < _COUNT if isinstance(value, int) else math.isfinite(value)


def _text(value: Any, most: int = TEXT) -> bool:
    if not isinstance(value, str) or len(value) > most:
        return False
    try:
        value.encode("utf-8", "surrogateescape")  # JSON may have halves of characters, which no file accepts
    except UnicodeEncodeError:
        return False
    return True


def _word(value: Any) -> bool:
    return _text(value, NAME)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _time(value: Any) -> bool:
    return _number(value) and 0 <= value < _NEVER


def _rank(value: Any) -> bool:
    return _whole(value, RANKS)


def _pids(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= _LISTED and all(_whole(pid, _PID) for pid in value)


def _why(value: Any) -> bool:
    kinds: dict[str, Check] = {"node": _word, "rank": _or_null(_rank), "text": _text}
    return isinstance(value, dict) and all(check(value[name]) for name, check in kinds.items() if name in value)


def _objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _by_name(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, dict) for each in value.values())


def _numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(_number(each) for each in value.values())


def _stacks(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _measured(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(each, list) and len(each) == 3 and all(map(_number, each)) for each in value.values()
    )


def _words(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= RANKS and all(map(_word, value))


def _copied(value: Any) -> bool:
    """The newest checkpoint that is copied to other nodes."""
    if not isinstance(value, dict) or not _word(value.get("checkpoint")) or not _words(value.get("on")):
        return False
    return _or_null(_whole)(value.get("step")) and all(_number(value.get(key)) for key in ("bytes", "seconds"))


def _or_null(check: Check) -> Check:
    return lambda value: value is None or check(value)


_STRINGS = "event state phase kind level run node boot_id guard_start start signal checkpoint who"
_CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(_STRINGS.split(), _or_null(_word)),
    **dict.fromkeys(("text", "line", "error", "pattern", "copying"), _or_null(_text)),
    **dict.fromkeys(("event", "state", "phase", "kind"), _word),
    "text": _text,
    **dict.fromkeys(("step", "total"), _or_null(_whole)),
    **dict.fromkeys(("attempt", "attempts", "at", "lines"), _whole),
    **dict.fromkeys(("rank", "node_rank"), _or_null(_rank)),
    **dict.fromkeys(("nnodes", "world_size"), _or_null(lambda value: _whole(value, RANKS) and value > 0)),
    **dict.fromkeys(("pid", "guard", "command"), _or_null(lambda value: _whole(value, _PID))),
    "uid": lambda value: _whole(value, 1 << 32),
    "rc": _or_null(lambda value: _whole(value, 256)),
    "port": _or_null(lambda value: _whole(value, 65536)),
    **dict.fromkeys(("loss", "eval_loss", "grad_norm", "ms", "tokens_per_second"), _or_null(_number)),
    **dict.fromkeys(("lr", "epoch"), _or_null(_number)),
    **dict.fromkeys(("memory_available", "memory_total", "disk_free"), _number),
    **dict.fromkeys(("time", "began"), _time),
    **dict.fromkeys(("stopped", "resumable", "port_free", "started"), _flag),
    "saved": _flag,
    "by": _number,
    "stack": _text,
    "straggler": _or_null(_text),
    "why": _or_null(_why),
    **dict.fromkeys(("left", "gpu"), _pids),
    "gpus": _objects,
    **dict.fromkeys(("nodes", "members"), _words),
    "excluded": lambda value: isinstance(value, dict) and all(map(_text, value.values())),
    "spare": _or_null(_word),
    "hub": _rank,
    "cpu": _numbers,
    **dict.fromkeys(("network", "infiniband"), _by_name),
    "stacks": _stacks,
    **dict.fromkeys(("slow", "full"), _or_null(lambda value: _text(value, NAME))),
    "expected": _or_null(lambda value: expected.read(value) is not None),
    "measured": _measured,
    "copied": _copied,
    "on": _words,
    **dict.fromkeys(("bytes", "seconds"), _number),
    "save_every": _or_null(_number),
    "spent": _or_null(lambda value: effective.read(value) is not None),
}


def valid_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with a valid value."""
    return {name: value for name, value in record.items() if name not in _CHECKS or _CHECKS[name](value)}


def read(text: str) -> dict[str, Any] | None:
    """The valid fields of one line from an agent; None if it is not a JSON object."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        return valid_fields(parse_object(text, limit=LINE))
    except UntrustedError:
        return None


_KINDS: Mapping[str, Check] = {
    "str": lambda value: _text(value, LINE),
    "int": lambda value: is_whole(value, 1 << 63, 1 - (1 << 63)),
    "bool": _flag,
    "float": _number,
    "Mapping[str, str]": lambda value: isinstance(value, dict) and all(map(_word, value.values())),
    "tuple[str, ...]": lambda value: isinstance(value, list) and all(map(_word, value)),
    "tuple[Mapping[str, Any], ...]": _objects,
}


def conform(kind: type, answer: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a dataclass from an agent's answer. Skips unknown fields.

    Raises:
        UntrustedError: a field has another type than in the dataclass.
    """
    found = {}
    for each in fields(kind):
        if each.name not in answer:
            continue
        value = answer[each.name]
        text = str(each.type)
        check = _KINDS[text.removesuffix(" | None")]
        if not (check(value) or (value is None and text.endswith(" | None"))):
            raise UntrustedError(f"has a wrong {each.name}")
        found[each.name] = tuple(value) if isinstance(value, list) else value
    return found
