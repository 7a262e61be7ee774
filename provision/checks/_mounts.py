"""What the checks of file systems share: the mount table, and the folders that the inventory shares over NFS. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from provision.checks import Answer, Plan
from provision.model import Node
from provision.render import quote

# File systems that other machines hold: slow for an environment, and their locks are slow or missing.
NETWORK = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.sshfs", "glusterfs",
    "gpfs", "lustre", "nfs", "nfs4", "panfs", "smb3", "wekafs",
})  # fmt: skip


# --- sh ------------------------------------------------------------------------------------------


def nearest(path: object) -> str:
    """Sh that sets ``$at`` to a path, or to the nearest folder above it that exists."""
    return f'at={quote(path)}\nwhile [ ! -d "$at" ]; do at=${{at%/*}}; at=${{at:-/}}; done\n'


def places(root: object) -> str:
    """Sh that prints the mount table, where ``root`` (or the nearest folder above it) lies in truth, and the home."""
    return (
        nearest(root)
        + """\
cat /proc/self/mounts
echo "real $(readlink -f "$at")"
echo "home $HOME"
if [ -d "$HOME" ]; then echo "homereal $(readlink -f "$HOME")"; fi
if [ -w "$HOME" ]; then echo "homewritable yes"; fi
"""
    )


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
    service = seen.inventory.services.get("nfs")
    if service is None:
        return ()
    options: Mapping[str, Any] = service if isinstance(service, Mapping) else vars(service)
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
