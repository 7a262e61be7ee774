"""Converts Ansible's groups, hosts and variables to nodes, for all of its file formats.

The precedence is Ansible's (docs.ansible.com, "How variables are merged"): a host's variable overrides its group's, a
child's overrides its parent's, among siblings the last name wins, and ``all`` has the lowest precedence.
"""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from provision.inventory.document import shown
from provision.inventory.foreign.found import Found, host, lines, shared
from provision.inventory.groups import MAX_GROUPS
from provision.inventory.names import MAX_NODES, MAX_TEXT, check_address
from provision.inventory.schema import as_port, as_user, target

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from provision.inventory.new_nodes import Wanted

_ADDRESS = ("ansible_host", "ansible_ssh_host")
_USER = ("ansible_user", "ansible_ssh_user")
_PORT = ("ansible_port", "ansible_ssh_port")
_KEY = ("ansible_ssh_private_key_file", "ansible_private_key_file")
_ARGUMENTS = "ansible_ssh_common_args"
# A value that names one jump host and nothing else.
_JUMP = re.compile(r"""\s*["']?(?:-J\s*|-o\s*ProxyJump[= ])["']?([^\s,"']+)["']?\s*""", re.IGNORECASE)
_MANY = 10  # variables that get separate sentences
_KNOWN = {*_ADDRESS, *_USER, *_PORT, *_KEY}

_WHY = {
    r"ansible_.*pass(word)?": "clusterctl asks for a password when it needs one, and never stores it",
    r"ansible_ssh_(common|extra)_args": "write its options into ~/.ssh/config; for a jump host: --jump-host HOST",
    r"ansible_become.*": "clusterctl uses sudo where it needs root",
}

_PRIORITY = "ansible_group_priority"
_NUMBERS = re.compile(
    r"\[(?P<first>[0-9]{1,9}|[A-Za-z]):(?P<last>[0-9]{1,9}|[A-Za-z])(?::(?P<step>[0-9]{1,9}))?\]", re.ASCII
)


@dataclass(frozen=True)
class Var:
    """A variable's value as text, and its line; 0: unknown. ``file`` is empty for the inventory itself."""

    value: str
    line: int
    file: str = ""


@dataclass
class Group:
    """A group: its own hosts, its children with the lines that name them, and its variables."""

    hosts: dict[str, None] = field(default_factory=dict)
    children: dict[str, int] = field(default_factory=dict)
    vars: dict[str, Var] = field(default_factory=dict)


@dataclass
class AnsibleInventory:
    """An Ansible inventory as written; ``hosts`` maps each host to its variables.

    ``beside`` has the variables of ``group_vars/`` and ``host_vars/``, by kind (``group`` or ``host``) and owner.
    """

    groups: dict[str, Group] = field(default_factory=lambda: {"all": Group(), "ungrouped": Group()})
    hosts: dict[str, dict[str, Var]] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[tuple[int, str]] = field(default_factory=list)
    beside: dict[tuple[str, str], dict[str, Var]] = field(default_factory=dict)
    beside_problems: list[str] = field(default_factory=list)

    def group(self, name: str) -> Group:
        """The group of this name, created on first use."""
        return self.groups.setdefault(name, Group())

    def add(self, group: str, pattern: str, variables: Mapping[str, Var], line: int) -> None:
        """Add hosts of a group, written as one name or a range, with their variables."""
        try:
            names = expand(pattern)
            if len(self.hosts) + len(names) > 2 * MAX_NODES:
                raise ValueError(f"{shown(pattern)} makes more than {2 * MAX_NODES} hosts")  # noqa: TRY301
        except ValueError as error:
            self.problems.append((line, str(error)))
            return
        members = self.group(group).hosts
        for name in names:
            self.hosts.setdefault(name, {}).update(variables)
            self.lines.setdefault(name, line)
            members.setdefault(name)


def expand(pattern: str) -> list[str]:
    """``gpu[01:03]`` -> ``gpu01``, ``gpu02``, ``gpu03``; ``[1:9:4]`` and ``[a:c]`` work too. Both ends are included.

    Raises:
        ValueError: a range is invalid.
    """
    if len(pattern) > MAX_TEXT:
        raise ValueError(f"{shown(pattern)} is too long: more than {MAX_TEXT} characters")
    found = _NUMBERS.search(pattern)
    if not found:
        if "[" in pattern or "]" in pattern:
            raise ValueError(f"{shown(pattern)} is not a host; Ansible writes a range as gpu[01:04]")
        return [pattern]
    first, last, step = found["first"], found["last"], int(found["step"] or 1)
    numbers = range(0)
    if first.isdigit() and last.isdigit() and (len(first) == len(last) or not first.startswith("0")):
        numbers = range(int(first), int(last) + 1, step or 1)
    elif re.fullmatch("[a-z]{2}|[A-Z]{2}", first + last):
        numbers = range(ord(first), ord(last) + 1, step or 1)
    if not numbers or not step:
        raise ValueError(f"{shown(found[0])} is not a range such as [01:04]")
    rests = expand(pattern[found.end() :])
    if len(numbers) * len(rests) > MAX_NODES:
        raise ValueError(f"{shown(pattern)} has more than {MAX_NODES} hosts")
    items = [str(number).zfill(len(first)) if first.isdigit() else chr(number) for number in numbers]
    return [f"{pattern[: found.start()]}{item}{rest}" for item in items for rest in rests]


def resolve(parsed: AnsibleInventory, group: str, *, kind: str) -> Found:
    """The hosts of a group and its children, each with its effective variables."""
    problems = [*parsed.problems, *_find_misplaced(parsed)]
    if problems or parsed.beside_problems:
        return Found(kind, (), problems=(*_sort_problems(problems), *parsed.beside_problems))
    below = {name: _below(parsed, name) for name in parsed.groups}
    members = {name: {*parsed.groups[name].hosts, *_hosts_of(parsed, below[name])} for name in parsed.groups}
    members["all"] = set(parsed.hosts)
    groups_of: dict[str, list[str]] = defaultdict(list)
    for each in _order_groups(parsed, below):
        for name in members[each]:
            groups_of[name].append(each)
    left_out: dict[str, dict[Var, None]] = defaultdict(dict)
    hosts: list[Wanted] = []
    keys: list[Var | None] = []
    arguments: list[Var | None] = []
    index: dict[str, int] = {}
    for name in parsed.hosts:
        if name not in members[group]:
            continue
        variables = _variables(parsed, name, groups_of[name])
        for key, var in variables.items():
            if key not in _KNOWN and not (key == "ansible_connection" and var.value in {"ssh", "smart"}):
                left_out[key][var] = None
        index[name] = len(index)
        found = _host_or_problem(name, variables, parsed.lines[name])
        if isinstance(found, str):
            parsed.beside_problems.append(found)
        else:
            hosts.append(found)
        keys.append(_first(variables, _KEY))
        arguments.append(variables.get(_ARGUMENTS))
    if parsed.beside_problems:
        return Found(kind, (), problems=tuple(dict.fromkeys(parsed.beside_problems)))
    common, ssh = shared(hosts)
    different = _shared_key(keys, ssh)
    left_out |= {_KEY[0]: dict.fromkeys(different)}
    _share_jump_host(arguments, ssh, left_out)
    named = {
        name: tuple(index[each] for each in index if each in inside)
        for name, inside in members.items()
        if name not in {"all", "ungrouped"} and (group == "all" or inside & index.keys())
    }
    return Found(kind, common, ssh, named, (*parsed.notes, *_notes(left_out)))


def _shared_key(keys: Sequence[Var | None], ssh: dict[str, Any]) -> list[Var]:
    """Write the common key of all hosts into ``ssh``. If there is none, return the variables with different keys."""
    named = [var for var in keys if var]
    if len(named) < len(keys) or len({var.value for var in named}) != 1:
        return named
    ssh["key"] = named[0].value
    return []


def _share_jump_host(
    arguments: Sequence[Var | None], ssh: dict[str, Any], left_out: dict[str, dict[Var, None]]
) -> None:
    """Write the jump host of all hosts into ``ssh``, if their arguments name nothing else."""
    values = {var.value if var else "" for var in arguments}
    found = _JUMP.fullmatch(values.pop()) if len(values) == 1 else None
    if found is not None:
        with suppress(ValueError):
            check_address(target(found[1])[1])
            ssh["jump_hosts"] = [found[1]]
            left_out.pop(_ARGUMENTS)


def _host_or_problem(name: str, variables: Mapping[str, Var], line: int) -> Wanted | str:
    """The node, or its mistake with the place."""
    try:
        return replace(_host(name, variables), origin=_place(line, "") or shown(name))
    except _AtLineError as error:
        var = error.var
        where = (_place(var.line, var.file) if var else "") or _place(line, "")
        return f"{where}: {error}" if where else str(error)


def _variables(parsed: AnsibleInventory, host: str, groups: list[str]) -> dict[str, Var]:
    """A host's variables, in Ansible's order: the inventory's groups, ``group_vars``, the host, ``host_vars``."""
    variables = dict(parsed.groups["all"].vars)
    for each in groups:
        variables |= parsed.groups[each].vars
    for each in ("all", *groups):
        variables |= parsed.beside.get(("group", each), {})
    variables |= parsed.hosts[host]
    variables |= parsed.beside.get(("host", host), {})
    return variables


def _order_groups(parsed: AnsibleInventory, below: Mapping[str, set[str]]) -> list[str]:
    """The groups except ``all``, lowest precedence first: by depth, priority and name."""
    depths: dict[str, int] = defaultdict(int)
    for name in parsed.groups:
        if name != "all":
            for child in below[name]:
                depths[child] += 1
    priorities = {}
    for name, group in parsed.groups.items():
        var = group.vars.pop(_PRIORITY, None)
        priorities[name] = int(var.value) if var and re.fullmatch("[0-9]{1,9}", var.value) else 1
    names = (name for name in parsed.groups if name != "all")
    return sorted(names, key=lambda name: (depths[name], priorities[name], name))


def _find_misplaced(parsed: AnsibleInventory) -> Iterator[tuple[int, str]]:
    """Report children that do not exist, and groups that contain themselves."""
    if len(parsed.groups) > MAX_GROUPS + 2:
        yield 0, f"there are more than {MAX_GROUPS:,} groups"
        return
    for name, group in parsed.groups.items():
        for child, line in group.children.items():
            if child not in parsed.groups:
                yield line, f"there is no group {shown(child)}"
        if name in _below(parsed, name):
            yield min(group.children.values()), f"the group {name} is its own child"


def _notes(left_out: Mapping[str, Iterable[Var]]) -> Iterator[str]:
    """A sentence for each skipped variable; many variables of playbooks share one sentence."""
    found = {shown(key): places(each) for key, each in left_out.items() if each}
    plain = [key for key in found if not key.startswith("ansible_")]
    for key, where in found.items():
        text = f"{key} ({where})" if where else key
        why = next((why for pattern, why in _WHY.items() if re.fullmatch(pattern, key)), "")
        if key == _KEY[0]:
            yield f"{text}: nodes have different keys; write them as IdentityFile into ~/.ssh/config"
        elif key not in plain or len(plain) <= _MANY:
            yield f"{text} is skipped" + (f": {why}" if why else "")
    if len(plain) > _MANY:
        yield f"{len(plain)} variables that ssh does not need are skipped: {', '.join(plain)}"


def places(variables: Iterable[Var]) -> str:
    """``lines 3, 9; group_vars/gpus.yml line 2``; empty if no line is known."""
    files: dict[str, list[int]] = {}
    for var in variables:
        files.setdefault(var.file, []).append(var.line)
    return "; ".join(
        f"{file} {lines(numbers)}".strip() if any(numbers) else file
        for file, numbers in sorted(files.items())
        if file or any(numbers)
    )


def _place(line: int, file: str) -> str:
    return " ".join(each for each in (file, f"line {line}" if line else "") if each)


class _AtLineError(ValueError):
    def __init__(self, text: str, var: Var | None = None) -> None:
        super().__init__(text)
        self.var = var


def _host(name: str, variables: Mapping[str, Var]) -> Wanted:
    found = {
        what: var
        for what, keys in (("address", _ADDRESS), ("user", _USER), ("port", _PORT), ("key", _KEY))
        if (var := _first(variables, keys))
    }
    for what, var in found.items():
        if "{{" in var.value:
            raise _AtLineError(f"{name}: its {what} is a template, {shown(var.value)}: write the value", var)
    address = found.get("address")
    try:
        node = host(name, address.value if address else None)
    except ValueError as error:
        raise _AtLineError(str(error), address) from error
    try:
        if port := found.get("port"):
            node = replace(node, port=as_port(port.value))
        if user := found.get("user"):
            node = replace(node, user=as_user(user.value))
    except ValueError as error:
        raise _AtLineError(f"{shown(name)}: {error}", found.get("port") or found["user"]) from error
    return node


def _first(variables: Mapping[str, Var], keys: tuple[str, ...]) -> Var | None:
    return next((variables[key] for key in keys if key in variables), None)


def _hosts_of(parsed: AnsibleInventory, groups: Iterable[str]) -> Iterator[str]:
    for group in groups:
        yield from parsed.groups[group].hosts


def _below(parsed: AnsibleInventory, group: str) -> set[str]:
    """The groups below a group, including the group itself if it is its own child."""
    found: set[str] = set()
    todo = [*parsed.groups[group].children]
    while todo:
        name = todo.pop()
        if name in parsed.groups and name not in found:
            found.add(name)
            todo += parsed.groups[name].children
    return found


def _sort_problems(problems: list[tuple[int, str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"line {line}: {text}" if line else text for line, text in sorted(problems)))
