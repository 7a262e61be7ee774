"""Reads other tools' lists of nodes: Ansible's inventories, hostfiles, and ClusterShell's groups.

Nothing is dropped silently: a note names every entry without a counterpart, with its line, and a line that cannot be
parsed is a mistake. Files are data: Ansible's plugins, scripts, templates and vaults are never run. The error names the
command that turns them into a readable file.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from provision.errors import InventoryError, UsageError
from provision.inventory.document import MAX_SHOWN, NotYamlError, printable, shown
from provision.inventory.document import read as read_yaml
from provision.inventory.foreign import ansible, ansible_files, clustershell, hostfile
from provision.inventory.foreign.ansible_files import MAX_BYTES, VarsFile, vars_files
from provision.inventory.foreign.found import Found

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from provision.inventory.foreign.ansible import AnsibleInventory

__all__ = ["Found", "kind_of", "read", "read_file"]

Kind = Literal[
    "ansible-ini", "ansible-yaml", "ansible-json", "hostfile", "clusterctl", "clustershell-flat", "clustershell-yaml"
]

_KINDS = {
    "hostfile": hostfile.read,
    "clustershell-flat": clustershell.read_flat,
    "clustershell-yaml": clustershell.read_sources,
}
_PARSERS = {
    "ansible-ini": ansible_files.parse_ini,
    "ansible-yaml": ansible_files.parse_yaml,
    "ansible-json": ansible_files.parse_listing,
}


def read_file(path: Path, *, group: str | None = None) -> Found:
    """The nodes of another tool's file, with Ansible's ``group_vars/`` and ``host_vars/`` next to it.

    Raises:
        UsageError: the file cannot be read or is of no known kind; the hint is the command that converts it.
        InventoryError: lines cannot be parsed; ``problems`` lists all of them.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a directory; Ansible reads every file in it", hint=_ask_ansible(str(path)))
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(
            f"{shown(str(path), limit=4096)} cannot be read: {why}", hint="clusterctl init --from FILE"
        ) from error
    if len(raw) > MAX_BYTES:
        raise UsageError(
            f"{path} is larger than {MAX_BYTES >> 20} MiB: it is not an inventory", hint="clusterctl init --from FILE"
        )
    try:
        text = raw.decode("utf-8-sig")
    except ValueError:
        text = None
    if text is None or raw.startswith(b"\x7fELF"):
        raise UsageError(
            f"{path} cannot be read: it is not a text file", hint=f"if it is a program: {_ask_ansible(str(path))}"
        )
    return read(text, str(path), group=group, beside=vars_files(path))


def read(text: str, name: str, *, group: str | None = None, beside: Sequence[VarsFile] = ()) -> Found:
    """The nodes of another tool's file, whose kind follows from its content.

    Args:
        text: the file.
        name: its name, for messages.
        group: only the hosts of this group and of the groups below it.
        beside: the files of variables next to an Ansible inventory.

    Raises:
        UsageError: there is no such group, or the file has no groups, or is a clusterctl inventory, or is not a list of
            nodes; the hint is the command that converts it.
        InventoryError: lines cannot be parsed; ``problems`` lists all of them.
    """
    _refuse_programs(text, name)
    kind = kind_of(text)
    if kind == "clusterctl":
        raise UsageError(
            f"{name} is already a clusterctl inventory", hint=f"clusterctl init --inventory {shlex.quote(name)}"
        )
    if kind in _PARSERS:
        found = _ansible(_PARSERS[kind](text), name, group, beside)
    elif group is not None and kind == "hostfile":
        raise UsageError(f"{name} is a hostfile, which has no groups", hint="omit --group")
    else:
        found = _KINDS[kind](text)
    if found.problems:
        count = "a mistake" if len(found.problems) == 1 else f"{len(found.problems)} mistakes"
        more = len(found.problems) - MAX_SHOWN
        article = "an" if found.kind[0] == "A" else "a"
        raise InventoryError(
            f"{name}, read as {article} {found.kind}, has {count}",
            problems=[*map(printable, found.problems[:MAX_SHOWN]), *([f"and {more:,} more"] if more > 0 else [])],
            hint="correct the file, or name the nodes: clusterctl init gpu[01-04]=10.0.0.[1-4]",
        )
    if group is not None and kind not in _PARSERS:
        found = _only(found, name, group)
    found = replace(found, name=name, notes=tuple(map(printable, found.notes)))
    if not found.hosts:
        raise InventoryError(
            f"{name} names no host" + (f" in the group {group}" if group else ""),
            hint="name the nodes: clusterctl init gpu[01-04]=10.0.0.[1-4]",
        )
    return found


def _ansible(parsed: AnsibleInventory, name: str, group: str | None, beside: Sequence[VarsFile]) -> Found:
    if group is not None and group not in parsed.groups and not parsed.problems:
        known = [key for key in parsed.groups if key not in {"all", "ungrouped"}]
        raise UsageError(
            f"{name} has no group {shown(group)}", hint=f"its groups: {printable(', '.join(known)) or 'none'}"
        )
    ansible_files.add_files(parsed, beside)
    return ansible.resolve(parsed, group or "all", kind="Ansible inventory")


def _only(found: Found, name: str, group: str) -> Found:
    if group not in found.groups:
        known = ", ".join(found.groups)
        raise UsageError(f"{name} has no group {shown(group)}", hint=f"its groups: {printable(known) or 'none'}")
    places = {place: index for index, place in enumerate(found.groups[group])}
    groups = {
        key: tuple(places[place] for place in inside if place in places)
        for key, inside in found.groups.items()
        if places.keys() & set(inside)
    }
    return Found(found.kind, tuple(found.hosts[place] for place in places), found.ssh, groups, found.notes)


def _ask_ansible(name: str) -> str:
    return f"ansible-inventory -i {shlex.quote(name)} --list > hosts.json; clusterctl init --from hosts.json"


def _refuse_programs(text: str, name: str) -> None:
    """Refuse files that describe how to get a list of nodes but contain none."""
    hint = _ask_ansible(name)
    top = _top_keys(text)
    if text.startswith("#!"):
        raise UsageError(f"{name} is a script that prints an inventory; init runs none", hint=hint)
    if text.startswith("$ANSIBLE_VAULT"):
        raise UsageError(
            f"{name} is encrypted with Ansible Vault", hint=hint.replace(" --list", " --list --ask-vault-pass", 1)
        )
    if "plugin" in top and "all" not in top:
        plugin = next((found[1] for line in text.splitlines() if (found := re.match(r"plugin:\s*(\S+)", line))), "")
        raise UsageError(
            f"{name} configures Ansible's inventory plugin {shown(plugin)}, which asks another system for the hosts; "
            "init runs none",
            hint=hint,
        )
    if name.endswith(".toml") or re.search(r"(?m)^\[[\w.-]+\.(hosts|vars)[\].]", text):
        raise UsageError(f"{name} is a TOML inventory of Ansible's, which is not read", hint=hint)
    if re.search(r"(?im)^\[main\]\s*$", text) and re.search(r"(?m)^(default|groupsdir|confdir|autodir)\s*[:=]", text):
        raise UsageError(
            f"{name} is ClusterShell's configuration, which names the files that have the groups",
            hint="name such a file: clusterctl init --from /etc/clustershell/groups.d/local.cfg; "
            "or the nodes: clusterctl init $(cluset -e @all)",
        )


def _top_keys(text: str) -> set[str]:
    return {found[1] for line in text.splitlines() if (found := re.match(r"([A-Za-z_]+):", line))}


def kind_of(text: str) -> Kind:
    """The file's kind.

    A list of bare host names is valid in several formats and counts as Ansible's INI.
    """
    if ansible_files.is_listing(text):
        return "ansible-json"
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("#", ";"))]
    if any(re.fullmatch(r"\[[^\[\]]+\]\s*([#;].*)?", line) and not ansible_files.IPV6.match(line) for line in lines):
        return "ansible-ini"
    first = lines[0] if lines else ""
    if first.startswith(("---", "{")) or re.fullmatch(r"""[^\s=]+:(\s+(#.*|\{.*|[&*!]\S.*))?""", first):
        if {"prefix", "nodes"} <= _top_keys(text):
            return "clusterctl"
        return "clustershell-yaml" if _is_clustershell_yaml(text) else "ansible-yaml"
    if re.match(r"prefix:\s", first):
        return "clusterctl"
    if clustershell.is_flat(lines):
        return "clustershell-flat"
    return "hostfile" if hostfile.is_hostfile(lines) else "ansible-ini"


def _is_clustershell_yaml(text: str) -> bool:
    try:
        return clustershell.is_sources(read_yaml(text, typed=frozenset()).data)
    except NotYamlError:
        return False
