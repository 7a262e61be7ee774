"""What a push does on a node: the places it uses, the scripts, and what they are given to read. Pure."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from provision.data.there import opened
from provision.data.tree import STAGING, Pushed, Tree
from provision.env.release.payload import escape
from provision.errors import UsageError
from provision.model import Inventory
from provision.render import render


@dataclass(frozen=True)
class Spot:
    """Where a push leads on a node, and where it keeps what has not come to its place yet."""

    root: PurePosixPath
    destination: PurePosixPath
    folder: bool  # whether a folder is pushed, and not one file

    @classmethod
    def of(cls, inventory: Inventory, destination: str, *, folder: bool) -> Spot:
        """The places of a push.

        Raises:
            UsageError: the destination is not absolute, or lies where releases do.
        """
        path = PurePosixPath(os.path.normpath(destination).replace("//", "/"))
        if not destination.startswith("/") or len(path.parts) < 2:
            raise UsageError(f"{destination!r} is no absolute path on the nodes", hint="clusterctl push SRC /data/NAME")
        taken = (inventory.prefix, inventory.root / "releases")
        if any(each == path or each in path.parents or path in each.parents for each in taken):
            raise UsageError(
                f"{path} is where clusterctl keeps releases",
                hint="choose another destination, such as /data/NAME; environments come with `clusterctl deploy`",
            )
        return cls(inventory.root, path, folder)

    @property
    def staging(self) -> str:
        """Where what has arrived waits: on the file system of its place, so that it only needs to be renamed.

        For a folder that is in the folder, which may be a mount point, and the only one that the user may write in.
        """
        if self.folder:
            return f"{self.destination}/{STAGING}folder"
        name = hashlib.sha256(os.fsencode(self.destination.name)).hexdigest()[:12]
        return f"{self.destination.parent}/{STAGING}{name}"

    @property
    def transfer(self) -> str:
        """The transfer's own folder."""
        return f"{self.staging}/transfer"

    @property
    def into(self) -> str:
        """Where legs are unpacked."""
        return f"{self.staging}/tree"


def compare(spot: Spot, token: str) -> str:
    """The read-only script that tells what of the wanted paths a node has; ``paths`` come on its input."""
    return render(
        "push/compare.sh.j2",
        token=token,
        destination=str(spot.destination),
        staging=spot.staging,
        releases=f"{spot.root}/releases",
        folder=spot.folder,
    )


def paths(tree: Tree) -> bytes:
    """The input of ``compare``: every path with a NUL."""
    wanted = (one.path for one in tree.found if one.path)
    return b"".join(os.fsencode(path) + b"\0" for path in (".", *wanted))


def open_folder(spot: Spot, mode: int) -> str:
    """The script that makes the destination with this mode, or opens it, for a folder; before the lock is taken."""
    return render(
        "push/open.sh.j2",
        destination=str(spot.destination),
        staging=spot.staging,
        mode=f"{mode:o}",
        opened=f"{opened(mode):o}",
    )


def close_folder(spot: Spot) -> str:
    """The script that gives the destination the mode that it shall have; after the lock has gone."""
    return render("push/close.sh.j2", destination=str(spot.destination), staging=spot.staging)


def begin(spot: Spot) -> str:
    """The script that makes room for a transfer, or goes on with one that broke off; ``expected`` come on its input."""
    return render("push/begin.sh.j2", staging=spot.staging, transfer=spot.transfer, into=spot.into)


def expected(pushed: Pushed, keys: Iterable[str]) -> bytes:
    """The input of ``begin``: what this node is to have in its staging folder, and keys of legs that others need."""
    own = {leg.key for leg in pushed.legs}
    lines = [f"want {name}\n" for name in (*pushed.small, *pushed.large)]
    lines += [f"skip {key}\n" for key in keys if key not in own]
    return "".join(lines).encode("ascii")


def place(spot: Spot) -> str:
    """The script that moves what has arrived to its place; ``moves`` come on its input."""
    return render("push/place.sh.j2", staging=spot.staging, into=spot.into, destination=str(spot.destination))


def moves(pushed: Pushed, folders: Iterable[tuple[str, int]]) -> bytes:
    """The input of ``place``, in the order in which it is done; ``folders`` are those that are made or changed."""
    folders = tuple(folders)
    return b"".join(escape(line) + b"\n" for line in _moves(pushed, folders))


def _moves(pushed: Pushed, folders: tuple[tuple[str, int], ...]) -> Iterator[str]:
    for path, mode in folders:
        yield f"folder {opened(mode):o} {path}"
    for key, files in pushed.small.items():
        if files == ("",):
            yield f"one small/{key} "
        else:
            yield f"group {key}"
            yield from (f"small {path}" for path in files)
    for name, path in pushed.large.items():
        yield f"one large/{name} {path}"
    for path, mode in reversed(folders):
        if mode != opened(mode):
            yield f"mode {mode:o} {path}"
