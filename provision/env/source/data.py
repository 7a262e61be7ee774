"""Data that travel with an environment: files and folders that become ``data/NAME`` in it, byte for byte."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from provision.env.source import scan
from provision.errors import UsageError

FOLDER = "data"  # in the prefix

_TOP = f"{FOLDER}/"


@dataclass(frozen=True)
class Data:
    """What was found.

    Attributes:
        trees: one for each path that was given.
        names: their names in the folder.
    """

    trees: tuple[scan.Tree, ...] = ()
    names: tuple[str, ...] = ()

    def package(self, path: str) -> str:
        """What a path's chunk belongs to; empty if the path is no data."""
        if not path.startswith(_TOP):
            return ""
        name = path[len(_TOP) :].partition("/")[0]
        return f"{_TOP}{name}/" if name in self.names else ""

    @property
    def packages(self) -> frozenset[str]:
        """What their chunks belong to."""
        return frozenset(f"{FOLDER}/{name}/" for name in self.names)


def find(paths: Iterable[Path], taken: Collection[str]) -> Data:
    """Look at data.

    Args:
        paths: files and folders; one that is a symlink is followed, symlinks inside stay what they are.
        taken: every path in the environment.

    Raises:
        UsageError: there is no such path, it cannot be read, or two would get the same name.
    """
    trees: list[scan.Tree] = []
    names: dict[str, Path] = {}
    for path in paths:
        name = Path(os.path.abspath(path)).name  # noqa: PTH100 - resolve() would tell the name of a symlink's target
        target = f"{FOLDER}/{name}"
        if not path.exists():
            raise UsageError(f"--with-data {path}: there is no such file or folder")
        if not name or not (path.is_file() or path.is_dir()):
            raise UsageError(f"--with-data {path} is neither a file nor a folder with a name")
        if name in names:
            raise UsageError(f"--with-data: {names[name]} and {path} would both be {target}", hint="rename one of them")
        if target in taken:
            raise UsageError(f"--with-data {path}: the environment has a {target} of its own", hint="rename the data")
        names[name] = path
        trees.append(scan.walk(path.resolve(), target, leave_out=lambda _path, _name: False))
    return Data(tuple(trees), tuple(names))
