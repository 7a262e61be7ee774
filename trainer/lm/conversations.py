"""Conversations in the records of Alpaca, ShareGPT and OpenAI, as messages for a chat template.

=========  ============================================================================================================
Alpaca     ``instruction``, ``output``; optional ``input``, ``system``, and ``history``, a list of question and answer
ShareGPT   ``conversations``, a list of ``from`` and ``value``; optional ``system`` and ``tools``
OpenAI     ``messages``, a list of ``role`` and ``content``; optional ``tools``
=========  ============================================================================================================
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Dict, List, Optional

from trainer.lm import records
from trainer.lm.errors import RefusedError

MESSAGES = 4096  # of a conversation, at most
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "system",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
}
Message = Dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """The messages of a record, each with ``role`` and ``content``, and the tools that they may call."""

    messages: List[Message]
    tools: Optional[List[Any]] = None


def read(record: Dict[str, Any], place: str) -> Conversation:
    """Return the conversation in a record. Messages after the last answer are dropped.

    Raises:
        RefusedError: a field is missing or of the wrong type, or there is no answer.
    """
    if "messages" in record or "conversations" in record:
        name = "messages" if "messages" in record else "conversations"
        messages = _listed(record, name, place)
    elif "instruction" in record:
        messages = _alpaca(record, place)
    else:
        what = "%s has none of the fields 'instruction', 'conversations', 'messages'; it has %s"
        raise RefusedError(what % (place, records.named(record)), "see docs/fine-tuning.md for the formats of data")
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise RefusedError("%s has no answer: no message of the assistant" % place)
    system = _optional(record, "system", place)
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages, _tools(record.get("tools"), place))


def _alpaca(record: Dict[str, Any], place: str) -> List[Message]:
    messages: List[Message] = []
    history = record.get("history") or []
    if not isinstance(history, list) or len(history) > MESSAGES:
        raise RefusedError("%s: the field 'history' is not a list of question and answer" % place)
    for number, turn in enumerate(history):
        if not isinstance(turn, (list, tuple)) or len(turn) != 2 or not all(isinstance(each, str) for each in turn):
            raise RefusedError("%s: history[%d] is not a list of question and answer" % (place, number))
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    asked = [records.field(record, "instruction", place), _optional(record, "input", place)]
    answer = records.field(record, "output", place)
    messages.append({"role": "user", "content": "\n".join(filter(None, asked))})
    messages.append({"role": "assistant", "content": answer})
    return messages


def _optional(record: Dict[str, Any], name: str, place: str) -> str:
    return records.field(record, name, place) if record.get(name) is not None else ""


def _listed(record: Dict[str, Any], name: str, place: str) -> List[Message]:
    turns = record[name]
    if not isinstance(turns, list):
        raise RefusedError("%s: the field %r is %s, not a list" % (place, name, records.kind(turns)))
    if len(turns) > MESSAGES:
        raise RefusedError("%s has %d messages, more than %d" % (place, len(turns), MESSAGES))
    return [_message(turn, "%s: %s[%d]" % (place, name, number)) for number, turn in enumerate(turns)]


def _message(turn: Any, place: str) -> Message:
    if not isinstance(turn, dict):
        raise RefusedError("%s is %s, not an object" % (place, records.kind(turn)))
    who, what = ("role", "content") if "role" in turn else ("from", "value")
    role = records.field(turn, who, place)
    if role not in ROLES:
        shown = (place, who, role[:40], ", ".join(sorted(ROLES)))
        raise RefusedError("%s: the field %r is %r, not one of %s" % shown)
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _calls(records.field(turn, what, place), place)}
    if turn.get("tool_calls"):
        text = turn.get(what) or ""
        calls = turn["tool_calls"]
        if not isinstance(calls, list) or not isinstance(text, str):
            raise RefusedError("%s: the field 'tool_calls' is not a list of calls" % place)
        return {**turn, "role": "assistant", "content": text, "tool_calls": [_with_arguments(each) for each in calls]}
    more = {key: turn[key] for key in ("name", "tool_call_id", "reasoning_content") if isinstance(turn.get(key), str)}
    return {"role": ROLES[role], "content": _content(turn, what, place), **more}


def _content(turn: Dict[str, Any], name: str, place: str) -> str:
    """Return the content of a message: a text, or the texts of a list of parts, joined."""
    parts = turn.get(name)
    if not isinstance(parts, list):
        return records.field(turn, name, place)
    texts = [
        part.get("text", part.get("value")) for part in parts if isinstance(part, dict) and part.get("type") == "text"
    ]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise RefusedError("%s: the field %r has parts that are no text" % (place, name))
    return "".join(map(str, texts))


def _calls(text: str, place: str) -> List[Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedError("%s: the function call is not JSON: %s" % (place, error)) from error
    found = found if isinstance(found, list) else [found]
    if not all(isinstance(each, dict) and "name" in each and "arguments" in each for each in found):
        raise RefusedError("%s: the function call has no 'name' or no 'arguments'" % place)
    return [_with_arguments({"type": "function", "function": each}) for each in found]


def _with_arguments(call: Any) -> Any:
    """Return a call with its arguments as an object, as chat templates expect them. OpenAI's are a text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (ValueError, RecursionError):
        return call  # an argument that is a plain text


def _tools(value: Any, place: str) -> Optional[List[Any]]:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RefusedError("%s: the field 'tools' is not JSON: %s" % (place, error)) from error
    if not value:
        return None
    if not isinstance(value, list):
        raise RefusedError("%s: the field 'tools' is %s, not a list" % (place, records.kind(value)))
    return [_tool(each) for each in value]


def _tool(tool: Any) -> Any:
    plain = isinstance(tool, dict) and "name" in tool and "function" not in tool
    return {"type": "function", "function": tool} if plain else tool
