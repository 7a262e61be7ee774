"""Ansible's groups, hosts and variables to nodes: the part that both of its file formats share.

What counts where is Ansible's own rule (docs.ansible.com, "How variables are merged"): a host's variable before that of
a group, a child's before its parent's, of groups side by side that whose name comes last, and ``all`` comes last.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from provision.inventory.foreign.found import Found, host, lines, shared
from provision.inventory.schema import as_port, as_user

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from provision.inventory.choosing import Wanted

_ADDRESS = ("ansible_host", "ansible_ssh_host")
_USER = ("ansible_user", "ansible_ssh_user")
_PORT = ("ansible_port", "ansible_ssh_port")
_KEY = ("ansible_ssh_private_key_file", "ansible_private_key_file")
_KNOWN = {*_ADDRESS, *_USER, *_PORT, *_KEY}

_WHY = {
    r"ansible_.*pass(word)?": "a password is asked for where it is needed, and never kept",
    r"ansible_ssh_(common|extra)_args": "write what it says into ~/.ssh/config",
    r"ansible_become.*": "clusterctl uses sudo where it needs root",
}

_NUMBERS = re.compile(r"\[(?P<first>\w+):(?P<last>\w+)(?::(?P<step>\d+))?\]")


@dataclass(frozen=True)
class Var:
    """A variable's value as text, and its line."""

    value: str
    line: int


@dataclass
class Group:
    """A group: its own hosts, its children with the lines that name them, and its variables."""

    hosts: list[str] = field(default_factory=list)
    children: dict[str, int] = field(default_factory=dict)
    vars: dict[str, Var] = field(default_factory=dict)


@dataclass
class Parsed:
    """An inventory of Ansible's as it was written; ``hosts`` maps each to its variables."""

    groups: dict[str, Group] = field(default_factory=lambda: {"all": Group(), "ungrouped": Group()})
    hosts: dict[str, dict[str, Var]] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[tuple[int, str]] = field(default_factory=list)

    def group(self, name: str) -> Group:
        """The group of this name, made when it is first named."""
        return self.groups.setdefault(name, Group())

    def add(self, group: str, pattern: str, variables: Mapping[str, Var], line: int) -> None:
        """Hosts of a group, written as one name or a range, with their variables."""
        try:
            names = expand(pattern)
        except ValueError as error:
            self.problems.append((line, str(error)))
            return
        for name in names:
            self.hosts.setdefault(name, {}).update(variables)
            self.lines.setdefault(name, line)
            if name not in self.group(group).hosts:
                self.group(group).hosts.append(name)


def expand(pattern: str) -> list[str]:
    """``gpu[01:03]`` -> ``gpu01``, ``gpu02``, ``gpu03``; ``[1:9:4]`` and ``[a:c]`` work too. Both ends belong to it.

    Raises:
        ValueError: a range that is none.
    """
    found = _NUMBERS.search(pattern)
    if not found:
        if "[" in pattern or "]" in pattern:
            raise ValueError(f"{pattern} is no host; Ansible writes a range gpu[01:04]")
        return [pattern]
    first, last, step = found["first"], found["last"], int(found["step"] or 1)
    if first.isdigit() and last.isdigit() and (len(first) == len(last) or not first.startswith("0")):
        items = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1, step or 1)]
    elif re.fullmatch("[a-z]{2}|[A-Z]{2}", first + last):
        items = [chr(number) for number in range(ord(first), ord(last) + 1, step or 1)]
    else:
        items = []
    if not items or not step or len(items) > 4096:
        raise ValueError(f"{found[0]} is not a range such as [01:04]")
    head, tail = pattern[: found.start()], pattern[found.end() :]
    return [f"{head}{item}{rest}" for item in items for rest in expand(tail)]


def resolve(parsed: Parsed, group: str, *, kind: str) -> Found:
    """The hosts of a group and its children, each with the variables that count for it."""
    problems = [*parsed.problems, *_misplaced(parsed)]
    if problems:
        return Found(kind, (), problems=_sorted(problems))
    members = {name: set(_members(parsed, name)) for name in parsed.groups}
    members["all"] = set(parsed.hosts)
    depths = _depths(parsed)
    order = sorted((name for name in parsed.groups if name != "all"), key=lambda name: (depths[name], name))
    left_out: dict[str, list[int]] = defaultdict(list)
    hosts: list[Wanted] = []
    keys: list[Var | None] = []
    for name in parsed.hosts:
        if name not in members[group]:
            continue
        variables = dict(parsed.groups["all"].vars)
        for each in order:
            if name in members[each]:
                variables |= parsed.groups[each].vars
        variables |= parsed.hosts[name]
        for key, var in variables.items():
            if key not in _KNOWN and not (key == "ansible_connection" and var.value in {"ssh", "smart"}):
                left_out[key].append(var.line)
        try:
            hosts.append(_host(name, variables))
        except _AtLineError as error:
            problems.append((error.line or parsed.lines[name], str(error)))
        keys.append(_first(variables, _KEY))
    common, ssh = shared(hosts)
    if len({var and var.value for var in keys}) == 1 and keys[0]:
        ssh["key"] = keys[0].value
    else:
        left_out |= {_KEY[0]: [var.line for var in keys if var]}
    notes = [*parsed.notes, *(_note(key, numbers) for key, numbers in left_out.items() if numbers)]
    return Found(kind, common, ssh, tuple(notes), _sorted(problems))


def _misplaced(parsed: Parsed) -> Iterator[tuple[int, str]]:
    """Children that are no groups, and groups that are below themselves."""
    for name, group in parsed.groups.items():
        for child, line in group.children.items():
            if child not in parsed.groups:
                yield line, f"there is no group {child}"
        if name in _below(parsed, name):
            yield min(group.children.values()), f"the group {name} is its own child"


def _note(key: str, numbers: list[int]) -> str:
    if key == _KEY[0]:
        return f"{key} ({lines(numbers)}): nodes have different keys; write them as IdentityFile into ~/.ssh/config"
    why = next((why for pattern, why in _WHY.items() if re.fullmatch(pattern, key)), "")
    return f"{key} ({lines(numbers)}) is left out" + (f": {why}" if why else "")


class _AtLineError(ValueError):
    def __init__(self, text: str, line: int = 0) -> None:
        super().__init__(text)
        self.line = line


def _host(name: str, variables: Mapping[str, Var]) -> Wanted:
    found = {
        what: var
        for what, keys in (("address", _ADDRESS), ("user", _USER), ("port", _PORT), ("key", _KEY))
        if (var := _first(variables, keys))
    }
    for what, var in found.items():
        if "{{" in var.value:
            raise _AtLineError(f"{name}: its {what} is a template, {var.value}: write the value", var.line)
    address = found.get("address")
    try:
        node = host(name, address.value if address else None)
    except ValueError as error:
        raise _AtLineError(str(error), address.line if address else 0) from error
    try:
        if port := found.get("port"):
            node = replace(node, port=as_port(port.value))
        if user := found.get("user"):
            node = replace(node, user=as_user(user.value))
    except ValueError as error:
        raise _AtLineError(f"{name}: {error}", (found.get("port") or found["user"]).line) from error
    return node


def _first(variables: Mapping[str, Var], keys: tuple[str, ...]) -> Var | None:
    return next((variables[key] for key in keys if key in variables), None)


def _members(parsed: Parsed, group: str) -> Iterator[str]:
    yield from parsed.groups[group].hosts
    for child in _below(parsed, group):
        yield from parsed.groups[child].hosts


def _below(parsed: Parsed, group: str) -> set[str]:
    """The groups below a group; itself among them only when it is its own child."""
    found: set[str] = set()
    todo = [*parsed.groups[group].children]
    while todo:
        name = todo.pop()
        if name in parsed.groups and name not in found:
            found.add(name)
            todo += parsed.groups[name].children
    return found


def _depths(parsed: Parsed) -> dict[str, int]:
    """How many groups stand above each one; there is no circle."""
    above: dict[str, int] = defaultdict(int)
    for name in parsed.groups:
        if name != "all":
            for child in _below(parsed, name):
                above[child] += 1
    return above


def _sorted(problems: list[tuple[int, str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"line {line}: {text}" if line else text for line, text in sorted(problems)))
