"""Other tools' lists of nodes, read: Ansible's inventories (INI and YAML) and the hostfiles of DeepSpeed and MPI.

Nothing is dropped in silence: what has no counterpart here is named with its line, and a line that is not understood is
a mistake. Files are data; no plugin, template or vault of Ansible's is run.
"""

from __future__ import annotations

import re
from typing import Literal

from provision.errors import InventoryError, UsageError
from provision.inventory.foreign import ansible, hostfile, ini, yaml_groups
from provision.inventory.foreign.found import Found

__all__ = ["Found", "kind_of", "read"]

Kind = Literal["ansible-ini", "ansible-yaml", "hostfile", "clusterctl"]


def read(text: str, name: str, *, group: str | None = None) -> Found:
    """The nodes of another tool's file; what kind of file it is shows in its content.

    Args:
        text: the file.
        name: its name, for messages.
        group: only the hosts of this group of Ansible's, with those of its children.

    Raises:
        UsageError: there is no such group, or the file has no groups, or is an inventory of ours.
        InventoryError: lines that are not understood, all of them.
    """
    kind = kind_of(text)
    if kind == "clusterctl":
        raise UsageError(f"{name} is an inventory of clusterctl already", hint=f"clusterctl init --inventory {name}")
    if kind == "hostfile":
        if group is not None:
            raise UsageError(f"{name} is a hostfile, which has no groups", hint="leave out --group")
        found = hostfile.read(text)
    else:
        parsed = ini.parse(text) if kind == "ansible-ini" else yaml_groups.parse(text)
        if group is not None and group not in parsed.groups and not parsed.problems:
            known = ", ".join(key for key in parsed.groups if key not in {"all", "ungrouped"})
            raise UsageError(f"{name} has no group {group}", hint=f"its groups: {known or 'none'}")
        found = ansible.resolve(parsed, group or "all", kind="Ansible inventory")
    if found.problems:
        count = "a mistake" if len(found.problems) == 1 else f"{len(found.problems)} mistakes"
        raise InventoryError(
            f"{name}, read as an {found.kind}, has {count}" if found.kind[0] == "A" else f"{name} has {count}",
            problems=found.problems,
            hint="correct the file, or name the nodes: clusterctl init gpu[01-04]=10.0.0.[1-4]",
        )
    if not found.hosts:
        raise InventoryError(f"{name} names no host" + (f" in the group {group}" if group else ""))
    return found


def kind_of(text: str) -> Kind:
    """What kind of file this is.

    A list of bare host names is all of them at once, and read as Ansible's INI.
    """
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("#", ";"))]
    if any(re.fullmatch(r"\[[^\[\]]+\]\s*([#;].*)?", line) for line in lines):
        return "ansible-ini"
    first = lines[0] if lines else ""
    if first.startswith(("---", "{")) or re.fullmatch(r"""[^\s=]+:(\s+(#.*|\{.*|[&*!]\S.*))?""", first):
        top = {found[1] for line in text.splitlines() if (found := re.match(r"([A-Za-z_]+):", line))}
        return "clusterctl" if {"prefix", "nodes"} <= top else "ansible-yaml"
    if re.match(r"prefix:\s", first):
        return "clusterctl"
    return "hostfile" if any(re.search(r"\s(max[-_])?slots\s*=", line) for line in lines) else "ansible-ini"
