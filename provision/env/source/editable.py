"""Editable installs: the checkouts that an environment imports from, and where they go."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from provision.env.source import checkout, references, scan

FOLDER = "src"  # of the checkouts, in the prefix

_PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg")
_UNUSUAL = re.compile(r"[^\w.+-]+")  # what scripts and launchers stumble over in a path


@dataclass(frozen=True)
class Checkout:
    """A folder outside the prefix that the environment imports from.

    Attributes:
        root: the project's folder, without symlinks.
        target: where it goes, relative to the prefix.
        tree: its files that travel.
        aliases: other paths that lead to it or into it, each with the path in the prefix that it stands for.
    """

    root: str
    target: str
    tree: scan.Tree
    aliases: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Editables:
    """What editable installs need.

    Attributes:
        checkouts: the folders that travel, outer ones before those that lie in them.
        dist_infos: the dist-info folders of editable installs, relative to the prefix.
        aliases: other paths that lead into the prefix, each with the path in the prefix that it stands for.
        notices: what could not be had, for people.
    """

    checkouts: tuple[Checkout, ...] = ()
    dist_infos: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def relocations(self) -> tuple[tuple[str, str], ...]:
        """Source paths and where they go."""
        return (*(pair for one in self.checkouts for pair in ((one.root, one.target), *one.aliases)), *self.aliases)


@dataclass
class _Found:
    """References so far: for each project, which folders in it are imported from, as they are spelled."""

    roots: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    inner: set[str] = field(default_factory=set)
    notices: list[str] = field(default_factory=list)


def find_editables(prefix: Path, sites: Iterable[str], paths: frozenset[str]) -> Editables:
    """Find every checkout that the traces of editable installs name, and list its files.

    Args:
        prefix: the environment.
        sites: its ``site-packages`` folders, relative to the prefix.
        paths: every path in it; a checkout's place must not be one of them.
    """
    sites = tuple(sites)
    installs = dict(references.editable_installs(prefix, sites))
    named = [folder for site in sites for folder in references.named_folders(prefix / site)]
    inside = os.path.realpath(prefix)
    found = _Found()
    for folder in dict.fromkeys((*installs.values(), *named)):
        _sort_in(found, folder, inside, is_root=folder in installs.values())
    found.notices += [
        f"{name} builds its package anew on every import and cannot work elsewhere: pip install it without -e"
        for site in sites
        for name in references.rebuilding(prefix / site)
    ]
    known = (str(prefix), inside)
    inner = [folder for folder in sorted(found.inner) if not any(_beneath(folder, top) for top in known)]
    return Editables(
        checkouts=tuple(_place(found, prefix, set(paths))),
        dist_infos=tuple(installs),
        aliases=tuple(sorted({_alias(folder, inside, "") for folder in inner})),
        notices=tuple(found.notices),
    )


def find_moved(prefix: Path, sites: Iterable[str], source_prefix: str) -> Editables:
    """Editable installs of an environment that was moved: what they name outside it was left where it came from.

    Args:
        prefix: where the environment lies now.
        sites: its ``site-packages`` folders, relative to the prefix.
        source_prefix: where it lay.
    """
    sites = tuple(sites)
    installs = dict(references.editable_installs(prefix, sites))
    named = [folder for site in sites for folder in references.named_folders(prefix / site)]
    outside = [folder for folder in dict.fromkeys((*installs.values(), *named)) if not _beneath(folder, source_prefix)]
    notices = tuple(
        f"{folder} is imported from, but is no part of the environment: it is missing" for folder in outside
    )
    return Editables(dist_infos=tuple(installs), notices=notices)


def project_root(folder: str) -> str:
    """The project that ``folder`` is part of: the nearest folder with project metadata, else git's, else itself."""
    home = Path(_home())
    for candidate in (Path(folder), *Path(folder).parents):
        if candidate in (home, Path("/")):
            break
        if any((candidate / name).is_file() for name in _PROJECT_FILES) or (candidate / ".git").exists():
            return str(candidate)
    return folder


def _sort_in(found: _Found, folder: str, inside: str, *, is_root: bool) -> None:
    """Decide whether a folder lies in the prefix, in a project, or cannot travel."""
    real = os.path.realpath(folder)
    if _beneath(real, inside):
        found.inner.add(folder)
    elif not Path(real).is_dir():
        found.notices.append(
            f"{folder} does not exist, but a .pth file or an editable install names it: it stays behind"
        )
    elif _beneath(_home(), real):
        found.notices.append(f"{folder} is named by a .pth file and is no project: it stays behind")
    else:
        around = [root for root in found.roots if _beneath(real, root)]
        root = real if is_root else max(around, key=len) if around else project_root(real)
        found.roots[root].add(folder)


def _place(found: _Found, prefix: Path, taken: set[str]) -> Iterator[Checkout]:
    """Give every project its place: one that lies in another stays there."""
    placed: list[Checkout] = []
    for root, folders in sorted(found.roots.items()):
        around = next((one for one in placed if _beneath(root, one.root)), None)
        if around:
            target = f"{around.target}/{os.path.relpath(root, around.root)}"
        else:
            name = _UNUSUAL.sub("-", Path(root).name).strip("-") or "checkout"
            target = _free(f"{FOLDER}/{name}", taken)
        taken.add(target)
        contents = checkout.contents(Path(root), target, prefix, sorted(map(os.path.realpath, folders)))
        found.notices += contents.notices
        aliases = tuple(sorted({_alias(folder, root, target) for folder in folders} - {(root, target)}))
        placed.append(Checkout(root, target, contents.tree, aliases))
    yield from placed


def _alias(folder: str, top: str, target: str) -> tuple[str, str]:
    """The shortest beginning of a path that already leads into ``top``, and what it stands for beneath ``target``."""
    beginnings = [path for path in (folder, *map(str, Path(folder).parents)) if _beneath(os.path.realpath(path), top)]
    alias = min(beginnings, key=len)
    inner = os.path.realpath(alias)[len(top) :].strip("/")
    return alias, "/".join(part for part in (target, inner) if part)


def _home() -> str:
    return os.path.realpath(os.path.expanduser("~"))  # noqa: PTH111 - Path.home() raises where there is none


def _beneath(path: str, top: str) -> bool:
    return path == top or path.startswith(top.rstrip("/") + "/")


def _free(target: str, taken: set[str]) -> str:
    number = 2
    name = target
    while name in taken:
        name = f"{target}-{number}"
        number += 1
    return name
