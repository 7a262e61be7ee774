"""What the checks of the host share: lines of probes, sizes, mounts, and the inventory's shares. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from provision.checks import Answer, Plan, unknown
from provision.checks._judging import odd
from provision.model import Finding, Node
from provision.render import quote

T = TypeVar("T", bound=Hashable)

GIB = 1 << 30

# File systems that other machines hold: slow for an environment, and their locks are slow or missing.
NETWORK = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.sshfs", "glusterfs",
    "gpfs", "lustre", "nfs", "nfs4", "panfs", "smb3", "wekafs",
})  # fmt: skip


# --- lines ---------------------------------------------------------------------------------------


def pairs(answer: Answer) -> dict[str, str]:
    """Lines of ``key value`` as a mapping; ``key: value`` as well. Of equal keys the last one counts."""
    split = (line.partition(" ") for line in answer.lines)
    return {key.removesuffix(":"): value.strip() for key, _, value in split}


def number(text: str | None) -> int | None:
    """A whole number, or None."""
    return int(text) if text is not None and re.fullmatch(r"-?[0-9]{1,20}", text) else None


def kib(text: str | None) -> int | None:
    """The bytes of a ``/proc/meminfo`` value such as ``24684084 kB``, or None."""
    amount = number((text or "").removesuffix("kB").strip())
    return None if amount is None else amount * 1024


def human(size: float) -> str:
    """Bytes as text: ``25.3 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def cpus(text: str | None) -> int | None:
    """How many there are in a kernel's list such as ``0-31,64``, or None."""
    if text is None or not re.fullmatch(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*", text):
        return None
    ends = ((part.split("-")[0], part.split("-")[-1]) for part in text.split(","))
    return sum(int(last) - int(first) + 1 for first, last in ends)


def soft_limit(answer: Answer, name: str) -> str | None:
    """The soft limit in a line of ``/proc/self/limits``: ``unlimited``, a whole number, or None."""
    found = re.search(rf"^Max {name} +(unlimited|[0-9]+) ", answer.out, re.MULTILINE)
    return found[1] if found else None


def may(answer: Answer, capability: int) -> bool:
    """Whether the ``CapEff`` line of ``/proc/self/status`` has a capability (its number in ``<linux/capability.h>``)."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", answer.out, re.MULTILINE)
    return bool(found and int(found[1], 16) >> capability & 1)


def unread(check: str, node: str, answer: Answer) -> Finding:
    """UNKNOWN, with what the node said instead."""
    said = (answer.err.strip() or answer.out.strip() or "nothing").splitlines()[0][:120]
    return unknown(check, node, f"the answer cannot be read: {said}")


def compared(
    check: str, answers: Mapping[str, Answer], read: Callable[[Answer], T | None], **given: Any
) -> Iterator[Finding]:
    """``odd`` over what ``read`` makes of every answer; UNKNOWN where that is None."""
    values: dict[str, T] = {}
    for name, answer in answers.items():
        value = read(answer)
        if value is None:
            yield unread(check, name, answer)
        else:
            values[name] = value
    yield from odd(check, values, **given)


# --- sh ------------------------------------------------------------------------------------------


def nearest(path: object) -> str:
    """Sh that sets ``$at`` to a path, or to the nearest folder above it that exists."""
    return f'at={quote(path)}\nwhile [ ! -d "$at" ]; do at=${{at%/*}}; at=${{at:-/}}; done\n'


def cgroup(controller: str, v2: str, v1: str) -> str:
    """Sh that prints a limit of every control group around this session, the innermost first: ``at GROUP VALUE``.

    Its first line is ``group PATH``; without control groups it prints nothing. Both versions of cgroups are read;
    a hybrid system has the controller in a hierarchy of its own.
    """
    return f"""\
base=/sys/fs/cgroup
file={v2}
group=$(sed -n 's/^0:://p' /proc/self/cgroup)
if [ ! -e "$base/cgroup.controllers" ]; then
    base=$base/{controller}
    file={v1}
    group=$(sed -n 's/^[0-9]*:{controller}://p' /proc/self/cgroup)
fi
if [ -d "$base" ] && [ -n "$group" ]; then
    echo "group $group"
    group=${{group%/}}
    while :; do
        if [ -r "$base$group/$file" ]; then
            echo "at ${{group:-/}} $(cat "$base$group/$file")"
        fi
        [ -n "$group" ] || break
        group=${{group%/*}}
    done
fi
"""


def tightest(answer: Answer) -> tuple[str, int] | None:
    """The group with the lowest limit in what ``cgroup`` printed, and that limit; None where nothing is limited."""
    fields = (line.split() for line in answer.lines if line.startswith("at "))
    found = [(each[1], int(each[2])) for each in fields if len(each) == 3 and each[2].isdigit()]  # not "max"
    return min(found, key=lambda limit: limit[1], default=None)


# --- mounts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mount:
    """A line of ``/proc/self/mounts`` (fstab(5) has its fields)."""

    source: str
    target: str
    type: str
    options: tuple[str, ...]

    def option(self, name: str) -> str | None:
        """The value of ``name=value`` among the options."""
        return next((text.partition("=")[2] for text in self.options if text.startswith(f"{name}=")), None)


def mounts(answer: Answer) -> tuple[Mount, ...]:
    """The mount table in an answer, in its order; other lines are passed over."""
    fields = (line.split(" ") for line in answer.lines)
    return tuple(
        Mount(_plain(each[0]), _plain(each[1]), each[2], tuple(each[3].split(",")))
        for each in fields
        if len(each) == 6 and each[1].startswith("/")
    )


def mount_of(table: tuple[Mount, ...], path: str) -> Mount | None:
    """The mount that a path lies on: the deepest one above it, of equal ones the last."""
    above = [mount for mount in table if path == mount.target or path.startswith(mount.target.rstrip("/") + "/")]
    return max(reversed(above), key=lambda mount: len(mount.target), default=None)


def _plain(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


# --- shares --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """A folder that nodes mount over NFS, as the inventory's ``services: nfs:`` names it.

    Attributes:
        server: the node's name, or the address of a machine outside the cluster.
        export: the folder on the server.
        path: where the nodes mount it.
        sources: what the mount table may show for it.
    """

    server: str
    export: str
    path: str
    sources: tuple[str, ...]


def shares(seen: Plan) -> tuple[Share, ...]:
    """The inventory's shares; what is not of the expected form is left out, since the service itself refuses it."""
    options = seen.inventory.services.get("nfs")
    if not isinstance(options, Mapping):
        return ()
    nodes = {node.name: node for node in seen.inventory.nodes}
    server = options.get("server") or next(iter(nodes), "")
    exports = options.get("exports") or ()
    found = []
    for entry in exports if isinstance(exports, list | tuple) else ():
        export = entry.get("path") if isinstance(entry, Mapping) else entry
        if not isinstance(export, str) or not isinstance(server, str) or not export.startswith("/"):
            continue
        mount = (entry.get("mount") if isinstance(entry, Mapping) else None) or export
        export = posixpath.normpath(export)
        sources = tuple(f"{host}:{export}" for host in hosts(nodes[server]) if host) if server in nodes else ()
        found.append(Share(server, export, posixpath.normpath(str(mount)), sources or (f"{server}:{export}",)))
    return tuple(found)


def hosts(node: Node) -> tuple[str, ...]:
    """The names and addresses that other machines may know a node by."""
    return tuple(dict.fromkeys(host for host in (node.train_address, node.address, node.name) if host))
