"""Conversations in the records of Alpaca, ShareGPT and OpenAI, as messages for a chat template.

=========  ============================================================================================================
Alpaca     ``instruction``, ``output``; optional ``input``, ``system``, and ``history``, a list of question and answer
ShareGPT   ``conversations``, a list of ``from`` and ``value``; optional ``system`` and ``tools``
OpenAI     ``messages``, a list of ``role`` and ``content``; optional ``tools``
=========  ============================================================================================================

Images are read for vision-language models only. A record has them in ``images``, a list, or in ``image`` (LLaVA), and
each ``<image>`` in its texts stands for the next one. OpenAI's parts of a content can name an image each.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Tuple

from trainer.lm import records
from trainer.lm.errors import RefusedError

MESSAGES = 4096  # of a conversation, at most
IMAGES = 1024  # of a conversation, at most
IMAGE = "<image>"  # in a text: the next image of the record
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
FIELDS = ("images", "image")  # of a record with images
VISION = "train a vision-language model with trainer.vlm"


@dataclass(frozen=True)
class Conversation:
    """The messages of a record, each with ``role`` and ``content``, and the tools that they may call.

    ``images`` has what the record says of each image, in order: a text (a path or a URL), or an object of Parquet with
    ``bytes``. The contents of a conversation that was read with images are lists of parts, as chat templates expect
    them: ``{"type": "text", "text": ...}`` or ``{"type": "image"}``.
    """

    messages: List[Message]
    tools: Optional[List[Any]] = None
    images: Tuple[Any, ...] = ()


def read(record: Dict[str, Any], place: str) -> Conversation:
    """Return the conversation in a record. Messages after the last answer are dropped.

    Raises:
        RefusedError: a field is missing or of the wrong type, there is no answer, or the record has images.
    """
    name = next((name for name in FIELDS if record.get(name)), "")
    if name:
        raise RefusedError("%s: the field %r has images, but this model only reads text" % (place, name), VISION)
    return Conversation(_messages(record, place), _tools(record.get("tools"), place))


def read_with_images(record: Dict[str, Any], place: str) -> Conversation:
    """Return the conversation in a record, with its images. Messages after the last answer are dropped.

    Raises:
        RefusedError: see ``read``; or the texts have more or fewer ``<image>`` than the record has images.
    """
    name = next((name for name in FIELDS if record.get(name)), FIELDS[0])
    listed = record.get(name) or []
    listed = listed if isinstance(listed, list) else [listed]
    messages: List[Message] = []
    images: List[Any] = []
    markers = 0
    for message in _messages(record, place, with_images=True):
        parts: List[Dict[str, Any]] = []
        for part in _split(message["content"]):
            if part["type"] == "text":
                parts.append(part)
                continue
            if message["role"] == "assistant":
                raise RefusedError("%s has an image in an answer, and models only write text" % place)
            if "image" in part:
                images.append(part["image"])
            else:
                images.extend(listed[markers : markers + 1])
                markers += 1
            parts.append({"type": "image"})
        messages.append({**message, "content": parts})
    if markers != len(listed):
        what = "%s: the texts have %s %d times, but the number of images in the field %r is %d"
        raise RefusedError(what % (place, IMAGE, markers, name, len(listed)))
    if len(images) > IMAGES:
        raise RefusedError("%s has %d images, more than %d" % (place, len(images), IMAGES))
    return Conversation(messages, _tools(record.get("tools"), place), tuple(images))


def _split(content: Any) -> Iterator[Dict[str, Any]]:
    """Yield the parts of a content. ``<image>`` in a text is a part without ``image``."""
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        if part["type"] == "image":
            yield part
            continue
        for number, text in enumerate(part["text"].split(IMAGE)):
            if number:
                yield {"type": "image"}
            if text:
                yield {"type": "text", "text": text}


def text_of(content: Any) -> str:
    """Return the text of a message's content, which is a text or a list of parts."""
    return "".join(part.get("text", "") for part in content) if isinstance(content, list) else str(content)


def _messages(record: Dict[str, Any], place: str, with_images: bool = False) -> List[Message]:
    if "messages" in record or "conversations" in record:
        name = "messages" if "messages" in record else "conversations"
        messages = _listed(record, name, place, with_images)
    elif "instruction" in record:
        messages = _alpaca(record, place)
    else:
        what = "%s has none of the fields 'instruction', 'conversations', 'messages'; it has %s"
        raise RefusedError(what % (place, records.named(record)), 'such as {"instruction": "...", "output": "..."}')
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise RefusedError("%s has no answer: no message of the assistant" % place)
    system = _optional(record, "system", place)
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


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


def _listed(record: Dict[str, Any], name: str, place: str, with_images: bool) -> List[Message]:
    turns = record[name]
    if not isinstance(turns, list):
        raise RefusedError("%s: the field %r is %s, not a list" % (place, name, records.kind(turns)))
    if len(turns) > MESSAGES:
        raise RefusedError("%s has %d messages, more than %d" % (place, len(turns), MESSAGES))
    return [_message(turn, "%s: %s[%d]" % (place, name, number), with_images) for number, turn in enumerate(turns)]


def _message(turn: Any, place: str, with_images: bool) -> Message:
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
    return {"role": ROLES[role], "content": _content(turn, what, place, with_images), **more}


def _content(turn: Dict[str, Any], name: str, place: str, with_images: bool) -> Any:
    """Return the content of a message: a text, or parts of text and images. The texts of parts are joined."""
    parts = turn.get(name)
    if not isinstance(parts, list):
        return records.field(turn, name, place)
    found = [_part(part) for part in parts]
    if any(part is None for part in found):
        raise RefusedError("%s: the field %r has parts that are no text and no image" % (place, name))
    if with_images:
        return found
    if any(part["type"] == "image" for part in found if part):
        raise RefusedError("%s: the field %r has images, but this model only reads text" % (place, name), VISION)
    return text_of(found)


def _part(part: Any) -> Optional[Dict[str, Any]]:
    """Return a part of a content as ``text`` or ``image``, or None if it is neither."""
    of = part.get("type") if isinstance(part, dict) else None
    if of == "text":
        text = part.get("text", part.get("value"))
        return {"type": "text", "text": text} if isinstance(text, str) else None
    if of not in ("image", "image_url"):
        return None
    named = next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key)), None)
    named = named.get("url") if of == "image_url" and isinstance(named, dict) else named
    return {"type": "image"} if named is None else {"type": "image", "image": named}


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
