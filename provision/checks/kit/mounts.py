"""What the checks of file systems share: the mount table, and the folders that the inventory shares over NFS. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic import ValidationError

from provision.checks import Answer, Plan
from provision.checks.kit.host import SHOW
from provision.model import Node
from provision.render import quote
from provision.services import nfs

# File systems that other machines hold: slow for an environment, and their locks are slow or missing.
NETWORK = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.sshfs", "glusterfs",
    "gpfs", "lustre", "nfs", "nfs4", "panfs", "smb3", "wekafs",
})  # fmt: skip


# --- sh ------------------------------------------------------------------------------------------


def nearest(path: object) -> str:
    """Sh that sets ``$at`` to a path, or to the nearest folder above it that exists."""
    return f'at={quote(path)}\nwhile [ ! -d "$at" ]; do at=${{at%/*}}; at=${{at:-/}}; done\n'


def folders(plan: Plan) -> str:
    """Sh that prints the mount table, what mounts at boot, and where the folders lie that a run uses.

    A share that is mounted on first use is looked into before, for 5 s at most. After the table come lines of

    - ``fstab SOURCE TARGET TYPE OPTIONS`` and ``unit TARGET``: what is mounted at boot;
    - ``lies PATH REAL``: a folder that exists, without the links in its path; ``at``, ``home`` and ``writes`` name the
      releases' (or the nearest above it that exists), the home, and the home again if it takes files;
    - ``errors DEVICE COUNT``: what ext4 has counted.
    """
    targets = " | ".join(quote(share.path) for share in shares(plan))
    look = f"""\
while read -r source target type rest; do
    case $type,$target in
        autofs,*) case $target in {targets}) timeout -k 1 5 ls "$target" >/dev/null 2>&1 & ;; esac ;;
    esac
done </proc/self/mounts
wait
"""
    return SHOW + (look if targets else "") + "cat /proc/self/mounts\n" + nearest(plan.inventory.root) + _FOLDERS


_FOLDERS = """\
if [ -r /etc/fstab ]; then
    while read -r source target type options rest; do
        case $source in '' | '#'*) ;; *) echo "fstab $source $target $type $options" ;; esac
    done </etc/fstab
fi
for file in /etc/systemd/system/*.mount; do
    [ -r "$file" ] || continue
    while read -r line; do
        case $line in Where=*) echo "unit ${line#Where=}" ;; esac
    done <"$file"
done
[ ! -e /etc/auto.master ] || echo automounter
echo "at $at"
echo "home ${HOME:-/}"
[ ! -d "$HOME" ] || [ ! -w "$HOME" ] || echo "writes $HOME"
for path in / /tmp /var "$HOME" "$at"; do
    if [ -d "$path" ] && cd -P "$path" 2>/dev/null; then echo "lies $path $PWD"; fi
done
for file in /sys/fs/ext4/*/errors_count; do
    device=${file%/errors_count}
    show "errors ${device##*/}" "$file"
done
"""


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
    fields = (line.split(" ") for line in answer.lines)  # of six fields; the last two are numbers
    return tuple(
        Mount(plain(each[0]), plain(each[1]), each[2], tuple(each[3].split(",")))
        for each in fields
        if len(each) == 6 and each[1].startswith("/") and each[4].isdecimal()
    )


def mount_of(table: tuple[Mount, ...], path: str) -> Mount | None:
    """The mount that a path lies on: the deepest one above it, of equal ones the last."""
    above = [mount for mount in table if path == mount.target or path.startswith(mount.target.rstrip("/") + "/")]
    return max(reversed(above), key=lambda mount: len(mount.target), default=None)


def lies(answer: Answer, path: str | None) -> Mount | None:
    """The mount that a folder of ``folders`` lies on, links in its path followed; None where it does not exist."""
    start = f"lies {path} "
    real = next((line.removeprefix(start) for line in answer.lines if line.startswith(start)), None)
    return None if real is None else mount_of(mounts(answer), real)


def plain(text: str) -> str:
    """A field of the mount table or of fstab, where spaces and the like stand as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


# --- shares --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """A folder that nodes mount over NFS under the path it has on its server (``services: nfs:``).

    Attributes:
        server: the node's name, or what stands before the colon of a source that no inventory names.
        path: of the folder, on the server and on all others.
        sources: what the mount table may show for it.
    """

    server: str
    path: str
    sources: tuple[str, ...]


def shares(plan: Plan) -> tuple[Share, ...]:
    """The inventory's shares. Options that the service would refuse are its own business: then there are none."""
    given = plan.inventory.services.get("nfs")
    if given is None:
        return ()
    try:
        options = nfs.Options.model_validate(dict(given))
    except ValidationError:
        return ()
    nodes = {node.name: node for node in plan.inventory.nodes}
    server = nodes.get(options.server or next(iter(nodes), ""))
    if server is None:
        return ()
    names = tuple(f"[{host}]" if ":" in host else host for host in hosts(server))
    return tuple(Share(server.name, path, tuple(f"{name}:{path}" for name in names)) for path in options.exports)


def hosts(node: Node) -> tuple[str, ...]:
    """The addresses and names that other machines may know a node by, the one that data takes first."""
    return tuple(dict.fromkeys((node.train_address, node.address, node.name)))
