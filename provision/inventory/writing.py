"""Writes the text of an inventory: nodes, with ranges for consecutive nodes, and variables in ``train.env``. Pure.

An edit of ``train.env`` changes nothing else. It parses the YAML to find the place to edit. It parses the result again,
to prove that only the variables changed. Otherwise it raises an error with the lines to write by hand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeGuard

import yaml
from yaml.nodes import MappingNode, ScalarNode
from yaml.nodes import Node as YamlNode

from provision.errors import UsageError
from provision.inventory.document import Document, NotYamlError, read, shown
from provision.inventory.selection import fold

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from provision.model import Node

HEADER = "clusterctl's inventory; inventory.example.yaml shows every key."
_LINE = 118  # columns of a comment


def inventory_text(
    nodes: Sequence[Node],
    *,
    prefix: str,
    ssh: Mapping[str, Any],
    groups: Mapping[str, Sequence[str]] = MappingProxyType({}),
    notes: Iterable[str] = (),
    ranges: bool = True,
) -> str:
    """The inventory file.

    Args:
        nodes: the nodes in order; the first node of a run gets rank 0.
        prefix: see ``model.Inventory``.
        ssh: the section of that name; skipped if empty.
        groups: names of nodes by group.
        notes: sentences for comments at the top.
        ranges: whether consecutive nodes share an entry.
    """
    data: dict[str, Any] = {"prefix": prefix}
    if ssh:
        data["ssh"] = dict(ssh)
    data["nodes"] = dict(_entry(run) for run in (runs(nodes) if ranges else [[node] for node in nodes]))
    if groups:
        data["groups"] = {name: fold(members) for name, members in groups.items()}
    comments = [HEADER, *(shown(note, limit=_LINE) for note in notes)]
    body = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, default_flow_style=False, width=10_000)
    return "".join(f"# {comment}\n" for comment in comments) + body


def runs(nodes: Sequence[Node]) -> list[list[Node]]:
    """Groups consecutive nodes that fit one entry: names and addresses count up together, and all else is equal."""
    found: list[list[Node]] = []
    steps: list[tuple[_Step | None, ...]] = []
    for node in nodes:
        if found:
            step = _step(found[-1][-1], node)
            if step is not None and (len(found[-1]) == 1 or steps[-1] == step):
                steps[-1] = step
                found[-1].append(node)
                continue
        found.append([node])
        steps.append(())
    return found


_Step = tuple[int, tuple[str, ...]]  # the index of the part that counts up, and the other parts


def _step(one: Node, two: Node) -> tuple[_Step | None, ...] | None:
    """How the texts of two nodes differ; None if no range contains both."""
    if (one.user, one.port, one.gpus) != (two.user, two.port, two.gpus):
        return None
    steps: list[_Step | None] = []
    for first, second in ((one.name, two.name), (one.address, two.address), (one.data_address, two.data_address)):
        if first is None and second is None:
            steps.append(None)
            continue
        step = _count_step(first, second) if first is not None and second is not None else None
        if step is None:
            return None
        steps.append(step)
    return tuple(steps)


def _count_step(one: str, two: str) -> _Step | None:
    """The step from ``one`` to ``two`` if one number rises by one; None if anything else differs."""
    first, second = re.split(r"([0-9]+)", one), re.split(r"([0-9]+)", two)
    if len(first) != len(second):
        return None
    differ = [index for index, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if len(differ) != 1 or not differ[0] % 2:
        return None
    place = differ[0]
    low, high = first[place], second[place]
    padded = len(low) == len(high) if low.startswith("0") and low != "0" else not high.startswith("0")
    if int(high) != int(low) + 1 or not padded or len(high) > 9:
        return None
    return place, (*first[:place], "", *first[place + 1 :])


def _entry(group: Sequence[Node]) -> tuple[str, Any]:
    first, last = group[0], group[-1]
    address = _range(first.address, last.address)
    more: dict[str, Any] = {}
    if first.data_address and last.data_address:
        more["data_address"] = _range(first.data_address, last.data_address)
    more |= {key: value for key in ("user", "port", "gpus") if (value := getattr(first, key)) is not None}
    return _range(first.name, last.name), {"address": address, **more} if more else address


def _range(first: str, last: str) -> str:
    """``gpu01``, ``gpu04`` -> ``gpu[01-04]``."""
    if first == last:
        return first
    parts, ends = re.split(r"([0-9]+)", first), re.split(r"([0-9]+)", last)
    return "".join(a if a == b else f"[{a}-{b}]" for a, b in zip(parts, ends, strict=True))


# --- edits of train.env ---------------------------------------------------------------------------

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
        without: variables to remove.

    Raises:
        UsageError: the file's form cannot be edited; the hint has the lines.
    """
    before = _read(text)
    wanted = {name: value for name, value in _env(before).items() if name not in without} | dict(values)
    edited = text
    try:
        for name in sorted(without & _env(before).keys()):
            edited = _remove_variable(edited, name)
        for name, value in values.items():
            if _env(_read(edited)).get(name) != value:
                edited = _set_variable(edited, name, value)
        after = _read(edited)
        if _env(after) != wanted or _rest(after) != _rest(before):
            raise _CannotError("the edit would change other values; does the file have an alias?")  # noqa: TRY301
    except _CannotError as error:
        removals = [f"without {name}" for name in sorted(without & _env(before).keys())]
        raise UsageError(
            f"train.env of the inventory cannot be edited: {error}",
            hint="by hand: " + ", ".join([*(f"{name}: {_scalar(value)}" for name, value in values.items()), *removals]),
        ) from error
    return edited


def _set_variable(text: str, name: str, value: str) -> str:
    newline = "\r\n" if "\r\n" in text else "\n"
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    train = _find_entry(root, "train")
    env = _find_entry(train[1], "env") if train else None
    line = f"{name}: {_scalar(value)}"
    if train is None:
        if not _is_block(root):
            raise _CannotError("the file is one { … }")
        return _end_line(text, newline) + f"train:{newline}  env:{newline}    {line}{newline}"
    key, content = train
    if env is None:
        if _is_empty(content):
            return _insert_below(text, key, f"  env:{newline}    {line}{newline}", newline)
        return _insert_entry(text, content, ("env:", line), newline)
    key, content = env
    if _is_empty(content):
        indent = " " * (key.start_mark.column + 2)
        return _insert_below(text, key, f"{indent}{line}{newline}", newline)
    there = _find_entry(content, name)
    if there is None:
        return _insert_entry(text, content, (line,), newline)
    old = there[1]
    if not isinstance(old, ScalarNode) or old.start_mark.line != old.end_mark.line or old.style in {"|", ">"}:
        raise _CannotError(f"{name} is not written on one line")
    return text[: old.start_mark.index] + _scalar(value) + text[old.end_mark.index :]


def _insert_entry(text: str, mapping: YamlNode, lines: tuple[str, ...], newline: str) -> str:
    """The text with a new last entry in a mapping; a second line is an entry below the first."""
    if not isinstance(mapping, MappingNode):
        raise _CannotError(f"line {mapping.start_mark.line + 1} is not a mapping")
    if mapping.flow_style:
        end = mapping.value[-1][1].end_mark.index if mapping.value else mapping.start_mark.index + 1
        entry = lines[0] if len(lines) == 1 else f"{lines[0]} {{{lines[1]}}}"
        return text[:end] + (", " if mapping.value else "") + entry + text[end:]
    column = mapping.value[0][0].start_mark.column
    new = "".join(" " * (column + 2 * depth) + line + newline for depth, line in enumerate(lines))
    at = _end_of_line(text, _last(mapping))
    return _end_line(text[:at], newline) + new + text[at:]


def _insert_below(text: str, key: YamlNode, new: str, newline: str) -> str:
    """The text with new lines below a key that has no value, only a comment at most."""
    at = _end_of_line(text, key.end_mark.index)
    if not re.fullmatch(r"\s*:\s*(#.*)?", text[key.end_mark.index : at].rstrip("\r\n")):
        raise _CannotError(f"{text[key.start_mark.index : at].strip()} is not a plain mapping")
    return _end_line(text[:at], newline) + new + text[at:]


def _remove_variable(text: str, name: str) -> str:
    """The text without a variable's line."""
    train = _find_entry(yaml.compose(text, Loader=yaml.SafeLoader), "train")
    env = _find_entry(train[1], "env") if train else None
    entry = _find_entry(env[1], name) if env else None
    if entry is None or not isinstance(env, tuple) or not _is_block(env[1]):
        raise _CannotError(f"{name} shares its line with other entries")
    start = text.rfind("\n", 0, entry[0].start_mark.index) + 1
    return text[:start] + text[_end_of_line(text, entry[1].end_mark.index) :]


def _last(node: YamlNode) -> int:
    """The end of a mapping's last value. The mapping's end mark is useless: it is behind the comments that follow."""
    while isinstance(node, MappingNode) and not node.flow_style and node.value:
        node = node.value[-1][1]
    return int(node.end_mark.index)


def _find_entry(node: YamlNode | None, name: str) -> tuple[YamlNode, YamlNode] | None:
    """The key and the value of that name, except through an alias."""
    if not isinstance(node, MappingNode):
        return None
    return next((pair for pair in node.value if isinstance(pair[0], ScalarNode) and pair[0].value == name), None)


def _is_block(node: YamlNode | None) -> TypeGuard[MappingNode]:
    return isinstance(node, MappingNode) and not node.flow_style


def _is_empty(node: YamlNode) -> bool:
    return isinstance(node, ScalarNode) and node.start_mark.index == node.end_mark.index


def _end_of_line(text: str, index: int) -> int:
    at = text.find("\n", max(index - 1, 0) if text[index - 1 : index] == "\n" else index)
    return len(text) if at < 0 else at + 1


def _end_line(text: str, newline: str) -> str:
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
