"""What ``ansible-inventory --list`` prints, and every script inventory of Ansible's: groups and ``_meta.hostvars``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from provision.inventory.document import shown
from provision.inventory.foreign.ansible import Parsed, Var
from provision.inventory.foreign.beside import MAX_BYTES
from trainer.agent.contract.untrusted import UntrustedError, parse_object

if TYPE_CHECKING:
    from collections.abc import Iterable


def is_listing(text: str) -> bool:
    """Whether this is JSON in which groups are lists of hosts, or have lists of them."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        data = parse_object(text, limit=MAX_BYTES)
    except UntrustedError:
        return False
    groups = [each for each in data.values() if isinstance(each, dict)]
    return (
        "_meta" in data
        or (bool(data) and len(groups) < len(data))
        or any(isinstance(each.get(key), list) for each in groups for key in ("hosts", "children"))
    )


def parse(text: str) -> Parsed:
    """The groups, hosts and variables."""
    parsed = Parsed()
    try:
        data = parse_object(text, limit=MAX_BYTES)
    except UntrustedError as error:
        parsed.problems.append((0, str(error)))
        return parsed
    meta = data.pop("_meta", None)
    for name, content in data.items():
        _group(parsed, name, content)
    variables = meta.get("hostvars") if isinstance(meta, dict) else None
    for host, values in variables.items() if isinstance(variables, dict) else ():
        if isinstance(values, dict):
            _add(parsed, "all", host, _vars(values))
    return parsed


def _group(parsed: Parsed, name: str, content: Any) -> None:
    group = parsed.group(name)
    if isinstance(content, list):
        content = {"hosts": content}
    if not isinstance(content, dict):
        parsed.problems.append((0, f"the group {shown(name)} is neither a list nor an object"))
        return
    for key, values in content.items():
        if key == "vars" and isinstance(values, dict):
            group.vars |= _vars(values)
        elif key in {"hosts", "children"} and all(isinstance(each, str) for each in _items(values)):
            for each in _items(values):
                if key == "hosts":
                    _add(parsed, name, each, {})
                else:
                    group.children.setdefault(each, 0)
                    parsed.group(each)  # a group without hosts has no separate entry
        else:
            parsed.problems.append((0, f"{shown(str(key))} in the group {shown(name)} is not understood"))


def _items(values: Any) -> Iterable[Any]:
    return values if isinstance(values, list | dict) else [values]


def _add(parsed: Parsed, group: str, host: str, variables: dict[str, Var]) -> None:
    """A host; its name is no pattern here."""
    if "[" in host or "]" in host:
        parsed.problems.append((0, f"{shown(host)} is not a host"))
    else:
        parsed.add(group, host, variables, 0)


def _vars(values: dict[str, Any]) -> dict[str, Var]:
    return {
        key: Var(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 0)
        for key, value in values.items()
    }
