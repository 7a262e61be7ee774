"""A push on a node: its folders, its scripts, and their input. Pure."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from provision.data.compare import opened
from provision.data.tree import STAGING, Pushed, Tree
from provision.env.release.install import escape
from provision.errors import UsageError
from provision.model import Inventory
from provision.render import render


@dataclass(frozen=True)
class PushTarget:
    """The destination of a push on a node, and its staging folder."""

    root: PurePosixPath
    destination: PurePosixPath
    folder: bool  # a folder is pushed, not one file

    @classmethod
    def of(cls, inventory: Inventory, destination: str, *, folder: bool) -> PushTarget:
        """The paths of a push.

        Raises:
            UsageError: the destination is not absolute, or overlaps the releases.
        """
        path = PurePosixPath(os.path.normpath(destination).replace("//", "/"))
        if not destination.startswith("/") or len(path.parts) < 2:
            raise UsageError(f"{destination!r} is no absolute path on the nodes", hint="clusterctl push SRC /data/NAME")
        taken = (inventory.prefix, inventory.root / "releases")
        if any(each == path or each in path.parents or path in each.parents for each in taken):
            raise UsageError(
                f"{path} is where clusterctl keeps releases",
                hint="choose another destination, such as /data/NAME; to send an environment: clusterctl deploy",
            )
        return cls(inventory.root, path, folder)

    @property
    def staging(self) -> str:
        """The folder for received files, on the destination's file system, so that they only need to be renamed.

        If a folder is pushed, it is in that folder, which may be a mount point and the only writable folder.
        """
        if self.folder:
            return f"{self.destination}/{STAGING}folder"
        name = hashlib.sha256(os.fsencode(self.destination.name)).hexdigest()[:12]
        return f"{self.destination.parent}/{STAGING}{name}"

    @property
    def transfer(self) -> str:
        """The transfer's folder."""
        return f"{self.staging}/transfer"

    @property
    def into(self) -> str:
        """The folder where parts are unpacked."""
        return f"{self.staging}/tree"


def compare(target: PushTarget, token: str) -> str:
    """The read-only script that lists which of the wanted paths exist on a node; its input is ``paths``."""
    return render(
        "push/compare.sh.j2",
        token=token,
        destination=str(target.destination),
        staging=target.staging,
        releases=f"{target.root}/releases",
        folder=target.folder,
    )


def paths(tree: Tree) -> bytes:
    """The input of ``compare``: the paths, each followed by a NUL."""
    wanted = (one.path for one in tree.found if one.path)
    return b"".join(os.fsencode(path) + b"\0" for path in (".", *wanted))


def open_folder(target: PushTarget, mode: int) -> str:
    """The script that creates a destination folder with this mode, or makes it writable, before the lock is taken."""
    return render(
        "push/open.sh.j2",
        destination=str(target.destination),
        staging=target.staging,
        mode=f"{mode:o}",
        opened=f"{opened(mode):o}",
    )


def close_folder(target: PushTarget) -> str:
    """The script that sets the destination's final mode, after the lock is released."""
    return render("push/close.sh.j2", destination=str(target.destination), staging=target.staging)


def begin(target: PushTarget) -> str:
    """The script that prepares a transfer, or continues an interrupted one; its input is ``expected``."""
    return render("push/begin.sh.j2", staging=target.staging, transfer=target.transfer, into=target.into)


def expected(pushed: Pushed, keys: Iterable[str]) -> bytes:
    """The input of ``begin``: the files for this node's staging folder, and keys of parts that only others need."""
    own = {part.key for part in pushed.parts}
    lines = [f"want {name}\n" for name in (*pushed.small, *pushed.large)]
    lines += [f"skip {key}\n" for key in keys if key not in own]
    return "".join(lines).encode("ascii")


def place(target: PushTarget) -> str:
    """The script that moves received files to the destination; its input is ``moves``."""
    return render("push/place.sh.j2", staging=target.staging, into=target.into, destination=str(target.destination))


def moves(pushed: Pushed, folders: Iterable[tuple[str, int]]) -> bytes:
    """The input of ``place``, in order; ``folders`` are the ones to create or change."""
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
