"""Variables in ``train.env`` of an inventory's text, with everything else of the file left as it is. Pure.

YAML is parsed to find where to write, and once more to see that what was written means what it should and nothing else
has changed: a file in which that cannot be had is refused, with the lines to write by hand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeGuard

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from provision.errors import UsageError
from provision.inventory.document import Document, NotYamlError, read

_TYPED = frozenset({"services", "checks"})  # as loading.py reads it
_PLAIN = re.compile(r"[A-Za-z0-9_/][A-Za-z0-9_./-]*")
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}  # YAML reads them as something else


class _CannotError(Exception):
    """Why the file is not edited."""


def with_env(text: str, values: Mapping[str, str], *, without: frozenset[str] = frozenset()) -> str:
    """The text of an inventory whose ``train.env`` has ``values``.

    Args:
        text: the file's content, an inventory that loads.
        values: the variables, in the order in which new ones are written.
        without: variables that are not to be there; their lines go.

    Raises:
        UsageError: the file is written in a way that cannot be edited; the hint has the lines.
    """
    before = _read(text)
    wanted = {name: value for name, value in _env(before).items() if name not in without} | dict(values)
    edited = text
    try:
        for name in sorted(without & _env(before).keys()):
            edited = _removed(edited, name)
        for name, value in values.items():
            if _env(_read(edited)).get(name) != value:
                edited = _set(edited, name, value)
        after = _read(edited)
        if _env(after) != wanted or _rest(after) != _rest(before):
            raise _CannotError("it would not mean the same afterwards; is there an alias?")  # noqa: TRY301
    except _CannotError as error:
        gone = [f"without {name}" for name in sorted(without & _env(before).keys())]
        raise UsageError(
            f"train.env of the inventory cannot be edited: {error}",
            hint="by hand: " + ", ".join([*(f"{name}: {_scalar(value)}" for name, value in values.items()), *gone]),
        ) from error
    return edited


def _set(text: str, name: str, value: str) -> str:
    newline = "\r\n" if "\r\n" in text else "\n"
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    train = _entry(root, "train")
    env = _entry(train[1], "env") if train else None
    line = f"{name}: {_scalar(value)}"
    if train is None:
        if not _is_block(root):
            raise _CannotError("the file is one { … }")
        return _ended(text, newline) + f"train:{newline}  env:{newline}    {line}{newline}"
    key, content = train
    if env is None:
        if _is_empty(content):
            return _after_line(text, key, f"  env:{newline}    {line}{newline}", newline)
        return _inserted(text, content, ("env:", line), newline)
    key, content = env
    if _is_empty(content):
        indent = " " * (key.start_mark.column + 2)
        return _after_line(text, key, f"{indent}{line}{newline}", newline)
    there = _entry(content, name)
    if there is None:
        return _inserted(text, content, (line,), newline)
    old = there[1]
    if not isinstance(old, ScalarNode) or old.start_mark.line != old.end_mark.line or old.style in {"|", ">"}:
        raise _CannotError(f"{name} is not written on one line")
    return text[: old.start_mark.index] + _scalar(value) + text[old.end_mark.index :]


def _inserted(text: str, mapping: Node, lines: tuple[str, ...], newline: str) -> str:
    """A new last entry of a mapping; a second line is an entry below the first."""
    if not isinstance(mapping, MappingNode):
        raise _CannotError(f"line {mapping.start_mark.line + 1} is not a mapping")
    if mapping.flow_style:
        end = mapping.value[-1][1].end_mark.index if mapping.value else mapping.start_mark.index + 1
        entry = lines[0] if len(lines) == 1 else f"{lines[0]} {{{lines[1]}}}"
        return text[:end] + (", " if mapping.value else "") + entry + text[end:]
    column = mapping.value[0][0].start_mark.column
    new = "".join(" " * (column + 2 * depth) + line + newline for depth, line in enumerate(lines))
    at = _end_of_line(text, _last(mapping))
    return _ended(text[:at], newline) + new + text[at:]


def _after_line(text: str, key: Node, new: str, newline: str) -> str:
    """New lines below a key that has nothing behind it but a comment."""
    at = _end_of_line(text, key.end_mark.index)
    if not re.fullmatch(r"\s*:\s*(#.*)?", text[key.end_mark.index : at].rstrip("\r\n")):
        raise _CannotError(f"{text[key.start_mark.index : at].strip()} is not a plain mapping")
    return _ended(text[:at], newline) + new + text[at:]


def _removed(text: str, name: str) -> str:
    """Without a variable: its line, where it has one of its own."""
    train = _entry(yaml.compose(text, Loader=yaml.SafeLoader), "train")
    env = _entry(train[1], "env") if train else None
    entry = _entry(env[1], name) if env else None
    if entry is None or not isinstance(env, tuple) or not _is_block(env[1]):
        raise _CannotError(f"{name} has no line of its own")
    start = text.rfind("\n", 0, entry[0].start_mark.index) + 1
    return text[:start] + text[_end_of_line(text, entry[1].end_mark.index) :]


def _last(node: Node) -> int:
    """Where the last value of a mapping ends: a mapping's own end mark stands behind the comments that follow it."""
    while isinstance(node, MappingNode) and not node.flow_style and node.value:
        node = node.value[-1][1]
    return int(node.end_mark.index)


def _entry(node: Node | None, name: str) -> tuple[Node, Node] | None:
    """The key and the value of that name; not what an alias brings in."""
    if not isinstance(node, MappingNode):
        return None
    return next((pair for pair in node.value if isinstance(pair[0], ScalarNode) and pair[0].value == name), None)


def _is_block(node: Node | None) -> TypeGuard[MappingNode]:
    return isinstance(node, MappingNode) and not node.flow_style


def _is_empty(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.start_mark.index == node.end_mark.index


def _end_of_line(text: str, index: int) -> int:
    at = text.find("\n", max(index - 1, 0) if text[index - 1 : index] == "\n" else index)
    return len(text) if at < 0 else at + 1


def _ended(text: str, newline: str) -> str:
    return text if not text or text.endswith("\n") else text + newline


def _scalar(value: str) -> str:
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    if value.isprintable():
        return "'" + value.replace("'", "''") + "'"
    return yaml.safe_dump(value, default_style='"', width=10_000).strip()


def _read(text: str) -> Document:
    try:
        return read(text, typed=_TYPED)
    except NotYamlError as error:
        raise UsageError(f"the inventory cannot be edited: {error}") from error


def _env(document: Document) -> dict[str, str]:
    train = document.data.get("train") if isinstance(document.data, dict) else None
    env = train.get("env") if isinstance(train, dict) else None
    return dict(env) if isinstance(env, dict) else {}


def _rest(document: Document) -> object:
    """Everything but ``train.env``."""
    data = dict(document.data or {})
    train = {key: value for key, value in (data.pop("train", None) or {}).items() if key != "env"}
    return data, train
