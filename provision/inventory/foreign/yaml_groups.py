"""Ansible's YAML inventories: groups with ``hosts``, ``vars`` and ``children``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from provision.inventory.document import Document, NotYamlError, read, shown
from provision.inventory.foreign.ansible import Parsed, Var

if TYPE_CHECKING:
    from collections.abc import Sequence

    from provision.inventory.foreign.beside import VarsFile


def parse(text: str) -> Parsed:
    """The groups, hosts and variables of the file, as they were written."""
    parsed = Parsed()
    try:
        document = read(text, typed=frozenset())
    except NotYamlError as error:
        parsed.problems.append((0, str(error)))
        return parsed
    for line, mistake in document.mistakes:
        if "the tag " in mistake:  # !vault and !unsafe: values that are left out
            parsed.notes.append(f"{mistake}; its value is skipped")
        else:
            parsed.problems.append((line, mistake))
    if not isinstance(document.data, dict):
        parsed.problems.append((1, "is not a mapping of groups"))
        return parsed
    for name, content in document.data.items():
        _group(parsed, document, name, content, (name,))
    return parsed


def add_files(parsed: Parsed, files: Sequence[VarsFile]) -> None:
    """The variables in ``group_vars/`` and ``host_vars/``, and what there is to say about files that are not used."""
    for file in files:
        known = parsed.groups if file.kind == "group" else parsed.hosts
        if file.owner not in known:
            parsed.notes.append(f"{shown(file.name)} is not used: there is no {file.kind} {shown(file.owner)}")
        elif file.text is None:
            parsed.notes.append(f"{shown(file.name)} is not read: {file.why}")
        else:
            found = _file_vars(parsed, shown(file.name), file.text)
            parsed.beside.setdefault((file.kind, file.owner), {}).update(found)


def _file_vars(parsed: Parsed, name: str, text: str) -> dict[str, Var]:
    try:
        document = read(text, typed=frozenset())
    except NotYamlError as error:
        parsed.beside_problems.append(f"{name} {error}")
        return {}
    for _, mistake in document.mistakes:
        if "the tag " in mistake:
            parsed.notes.append(f"{name}: {mistake}; its value is skipped")
        else:
            parsed.beside_problems.append(f"{name}: {mistake}")
    if document.data is None:
        return {}
    if not isinstance(document.data, dict):
        parsed.beside_problems.append(f"{name} is not a mapping of variables")
        return {}
    return {
        key: Var(value if isinstance(value, str) else str(value), document.lines.get((key,), 0), name)
        for key, value in document.data.items()
    }


def _group(parsed: Parsed, document: Document, name: str, content: Any, place: tuple[str, ...]) -> None:
    group = parsed.group(name)
    for key, values in _mapping(parsed, document, content, place).items():
        inner = (*place, key)
        line = document.lines.get(inner, 0)
        if key == "hosts":
            for host, variables in _mapping(parsed, document, values, inner).items():
                at = (*inner, host)
                parsed.add(name, host, _vars(parsed, document, variables, at), document.lines.get(at, line))
        elif key == "vars":
            group.vars |= _vars(parsed, document, values, inner)
        elif key == "children":
            for child, below in _mapping(parsed, document, values, inner).items():
                at = (*inner, child)
                group.children.setdefault(child, document.lines.get(at, line))
                _group(parsed, document, child, below, at)
        else:
            parsed.problems.append((line, f"{shown(key)} in the group {name}: it may have hosts, vars and children"))


def _vars(parsed: Parsed, document: Document, values: Any, place: tuple[str, ...]) -> dict[str, Var]:
    return {
        key: Var(value if isinstance(value, str) else str(value), document.lines.get((*place, key), 0))
        for key, value in _mapping(parsed, document, values, place).items()
    }


def _mapping(parsed: Parsed, document: Document, values: Any, place: tuple[str, ...]) -> dict[str, Any]:
    if values is None:
        return {}
    if isinstance(values, dict):
        return values
    parsed.problems.append((document.lines.get(place, 0), f"{'.'.join(place)} must be a mapping"))
    return {}
