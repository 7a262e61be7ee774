"""What a push does on a node: the scripts, and what their answers mean. Pure."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import PurePosixPath

from provision.data.tree import Pushed, Tree
from provision.env.source.scan import Found
from provision.errors import ClusterctlError, UsageError
from provision.model import Inventory
from provision.render import render


@dataclass(frozen=True)
class Spot:
    """Where a push leads on a node, and where it keeps what is not there yet."""

    root: PurePosixPath
    destination: PurePosixPath

    @classmethod
    def of(cls, inventory: Inventory, destination: str) -> Spot:
        """The places of a push.

        Raises:
            UsageError: the destination is not absolute, or lies where releases do.
        """
        path = PurePosixPath(os.path.normpath(destination))
        if not destination.startswith("/") or len(path.parts) < 2:
            raise UsageError(f"{destination!r} is no absolute path on the nodes", hint="clusterctl push SRC /data/NAME")
        taken = inventory.root / "releases"
        if path in (inventory.prefix, taken) or taken in path.parents or path in taken.parents:
            raise UsageError(f"{path} is where clusterctl keeps releases", hint="choose another destination")
        return cls(inventory.root, path)

    @property
    def staging(self) -> str:
        """Beside the destination, so that what has arrived only needs to be renamed."""
        return f"{self.destination.parent}/.clusterctl-push-{self._id}"

    @property
    def transfer(self) -> str:
        """The transfer's own folder."""
        return f"{self.staging}/transfer"

    @property
    def into(self) -> str:
        """Where legs are unpacked."""
        return f"{self.staging}/tree"

    @property
    def _id(self) -> str:
        return hashlib.sha256(os.fsencode(str(self.destination))).hexdigest()[:12]


@dataclass(frozen=True)
class There:
    """What a node has of the wanted paths: of files mode, size and mtime, of links the target, of folders the mode."""

    files: dict[str, tuple[int, int, int]]
    links: dict[str, str]
    folders: dict[str, int]
    tools: frozenset[str]
    free_bytes: int | None


def compare(spot: Spot) -> str:
    """The read-only script that tells what of the wanted paths a node has; they come on its input, each with a NUL."""
    return render("push/compare.sh.j2", destination=str(spot.destination), parent=str(spot.destination.parent))


def paths(tree: Tree) -> bytes:
    """The input of ``compare``."""
    return b"".join(os.fsencode(one.path or ".") + b"\0" for one in tree.found)


def read_there(out: str) -> There:
    """What ``compare`` found.

    Raises:
        ClusterctlError: the node refuses, or the output is not whole.
    """
    rows = out.splitlines()
    for row in rows:
        if row.startswith("refuse "):
            raise ClusterctlError(row.removeprefix("refuse "))
    if not rows or rows[-1] != "end":
        raise ClusterctlError("its answer is incomplete")
    files, links, folders = {}, {}, {}
    for row in rows:
        kind, _, rest = row.partition(" ")
        if kind == "at":
            mode, size, mtime, path = rest.split(" ", 3)
            number = int(mode, 16)
            if number & 0o170000 == 0o100000:
                files[path] = (number & 0o777, int(size), int(mtime))
            elif number & 0o170000 == 0o040000:
                folders[path] = number & 0o777
        elif kind == "link":
            path, _, target = rest.partition("\t")
            links[path] = target
    facts = dict(row.split(" ", 1) for row in rows if row.startswith(("tools ", "free ")))
    free = facts.get("free", "")
    return There(files, links, folders, frozenset(facts["tools"].split()), int(free) if free else None)


def differing(tree: Tree, there: There) -> frozenset[str]:
    """The paths of files and links that the node lacks, or has with another size, time or target."""
    return frozenset(one.path for one in tree.found if one.type != "dir" and not _same(one, there))


def missing_folders(tree: Tree, there: There) -> bool:
    """Whether a folder is missing, or has another mode."""
    return any(one.type == "dir" and there.folders.get(one.path) != one.mode for one in tree.found)


def _same(one: Found, there: There) -> bool:
    path = one.path or "."
    if one.type == "link":
        return there.links.get(path) == one.target
    return there.files.get(path) == (one.mode, one.size, one.mtime)


def begin(spot: Spot) -> str:
    """The script that makes room for a transfer, or goes on with one that broke off."""
    return render("push/begin.sh.j2", transfer=spot.transfer, into=spot.into)


def place(spot: Spot) -> str:
    """The script that moves what has arrived to its place; ``moves`` come on its input."""
    return render("push/place.sh.j2", staging=spot.staging, into=spot.into, destination=str(spot.destination))


def moves(pushed: Pushed) -> bytes:
    """The input of ``place``: folders, files with the place they are moved to, folders' modes; three lines each."""
    fields: list[str] = []
    for path, _ in pushed.folders:
        fields += ["folder", path, ""]
    for path in pushed.small:
        if path:
            fields += ["small", f"small/{path}", path.rpartition("/")[0]]
        else:
            fields += ["one", "small", ""]
    for name, path in pushed.large.items():
        fields += ["one", f"large/{name}", path]
    for path, mode in reversed(pushed.folders):
        fields += ["mode", path, f"{mode:o}"]
    return b"".join(os.fsencode(field).replace(b"\\", b"\\\\").replace(b"\n", b"\\n") + b"\n" for field in fields)
