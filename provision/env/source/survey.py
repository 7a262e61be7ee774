"""Survey an environment before it is packed: its tree, its checkouts, its packages, and the paths to relocate."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from provision.env.source import editable, owners, scan
from provision.env.source.data import FOLDER, Data
from provision.env.source.data import find as find_data
from provision.env.source.exclude import leave_out as exclude_from
from provision.env.source.owners import Owners
from provision.errors import UsageError

_SHEBANG = re.compile(rb"#!([^\n]+)/bin/python[^/\n ]*")


@dataclass(frozen=True)
class Survey:
    """What is known before the first file is read.

    Attributes:
        prefix: the environment, as its files name it.
        root: where it lies; elsewhere than ``prefix`` if it was moved.
        found: everything that will be packed, checkouts and data included.
        folders: those of the environment and of data, with their mtimes in nanoseconds.
        sites: its ``site-packages`` folders, relative to the prefix.
        owners: packages, and the owner of every path.
        data: what travels with it and is none of it.
        relocations: pairs of source path and path relative to the prefix; the last one is the prefix itself.
        notices: what stays behind or will not work, for people.
    """

    prefix: str
    root: Path
    found: tuple[scan.Found, ...]
    folders: Mapping[str, int]
    sites: tuple[str, ...]
    owners: Owners
    data: Data
    relocations: tuple[tuple[str, str], ...]
    notices: tuple[str, ...]

    @cached_property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(one.size for one in self.found)

    @property
    def programs(self) -> frozenset[bytes]:
        """Names in ``bin``."""
        return frozenset(
            os.fsencode(one.path[4:]) for one in self.found if one.path.startswith("bin/") and one.type != "dir"
        )

    def owner(self, path: str) -> str:
        """What a path belongs to: data, a package, or a folder."""
        return self.data.package(path) or self.owners.owner(path)

    def check_folders(self) -> None:
        """Notice what came or went since.

        Raises:
            BundleError: the message names a folder.
        """
        for folder, mtime in self.folders.items():
            try:
                now = os.stat(folder).st_mtime_ns  # noqa: PTH116 - there are many of them
            except OSError as error:
                raise scan.changed(folder) from error
            if now != mtime:
                raise scan.changed(folder)


def survey(
    prefix: Path,
    *,
    source_prefix: str | None = None,
    exclude: Sequence[str] = (),
    data: Sequence[Path] = (),
    additions: Iterable[scan.Found] = (),
    on_file: Callable[[scan.Found], None] | None = None,
) -> Survey:
    """Look at everything in an environment and at the checkouts that it imports from.

    Args:
        prefix: the environment.
        source_prefix: the prefix that its files name, if it was moved from there, maybe from another machine: what
            they name outside the environment is then not sought here.
        exclude: patterns of what is left out; see ``exclude.leave_out``.
        data: files and folders that travel with it; see ``data.find``.
        additions: what is packed beside what lies in the environment, or in place of it.
        on_file: told of every file in the environment as soon as it is found, be it left out or not.

    Raises:
        UsageError: a folder cannot be read, the path of the environment cannot be told from others, or what is left out
            or travels with it cannot.
        BundleError: a folder vanished.
    """
    if len(prefix.parts) < 2:
        raise UsageError(f"{prefix} cannot be an environment")
    tree = scan.environment(prefix, on_file=on_file)
    kept, left_out = exclude_from(tree.found, exclude)
    own = {one.path: one for one in (*kept, *additions)}
    paths = frozenset(own)
    riders = find_data(data, paths)
    carried = [one for tree in riders.trees for one in hard_links(tree.found)]
    sites = owners.site_packages(paths)
    if source_prefix is None:
        editables = editable.find_editables(prefix, sites, paths)
    else:
        editables = editable.find_moved(prefix, sites, source_prefix)
    found = dict(own)
    for checkout in editables.checkouts:
        for one in exclude_from(checkout.tree.found, exclude)[0]:
            found.setdefault(one.path, one)
    for folder, needed in ((editable.FOLDER, editables.checkouts), (FOLDER, carried)):
        if needed:
            found.setdefault(folder, scan.Found(folder, "", "dir", 0o755, scan.FOLDER_MTIME * 1_000_000_000))
            if found[folder].type != "dir":
                raise _in_the_way(prefix / folder)
    relocations = (
        *editables.relocations,
        *((alias, "") for alias in aliases(prefix) if source_prefix is None),
        (source_prefix or str(prefix), ""),
    )
    trees = (tree, *riders.trees, *(checkout.tree for checkout in editables.checkouts))
    skipped = [path for one in trees for path in one.skipped]
    everything = sorted((*hard_links(sorted(found.values())), *carried))
    return Survey(
        prefix=source_prefix or str(prefix),
        root=prefix,
        found=tuple(everything),
        folders=_watched(prefix, tree, paths)
        | {path: time for one in riders.trees for path, time in one.folders.items()},
        sites=sites,
        owners=owners.find_owners(prefix, sorted(paths), editable=editables.dist_infos),
        data=riders,
        relocations=relocations,
        notices=(*editables.notices, *left_out, *_notices(everything, skipped, relocations)),
    )


def _in_the_way(path: Path) -> UsageError:
    return UsageError(
        f"{path} is no folder: {'checkouts' if path.name == editable.FOLDER else 'data'} that travel would lie in it",
        hint=f"rename it: mv {path} {path}.old",
    )


def _watched(prefix: Path, tree: scan.Tree, paths: Collection[str]) -> dict[str, int]:
    """The folders of the environment that are packed: in one that is left out, names may come and go."""
    top = f"{prefix}/"
    return {path: time for path, time in tree.folders.items() if path == str(prefix) or path[len(top) :] in paths}


def hard_links(found: Iterable[scan.Found]) -> tuple[scan.Found, ...]:
    """The same, sorted by path, where every later name of a file has become a hard link to its first."""
    first: dict[tuple[int, int], str] = {}
    named = []
    for one in found:
        target = first.setdefault(one.inode, one.path) if one.inode else one.path
        named.append(one if target == one.path else one._replace(type="hard", size=0, target=target))
    return tuple(named)


def aliases(prefix: Path) -> tuple[str, ...]:
    """Other paths that lead to the environment: without symlinks, and as its own scripts spell it.

    A relative spelling means another folder wherever the script is started: it is none.
    """
    found = {os.path.realpath(prefix)}
    for path in sorted((prefix / "bin").iterdir()):
        spelled = _interpreter_prefix(path) if os.path.isfile(path) else None  # noqa: PTH113 - False where unreadable
        if spelled and spelled.startswith("/") and os.path.realpath(spelled) == os.path.realpath(prefix):
            found.add(spelled)
    return tuple(sorted(found - {str(prefix)}))


def _interpreter_prefix(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            match = _SHEBANG.match(file.read(4096))
    except OSError:
        return None
    return os.fsdecode(match[1].strip()) if match else None


def _notices(found: list[scan.Found], skipped: list[str], relocations: tuple[tuple[str, str], ...]) -> Iterator[str]:
    for path in skipped:
        yield f"{path} is a socket, pipe or device and stays behind"
    tops = tuple(source + "/" for source, _ in relocations)
    outside = [
        one
        for one in found
        if one.type == "link" and one.target.startswith("/") and not (one.target + "/").startswith(tops)
    ]
    for one in outside[:10]:
        yield f"{one.path} is a link to {one.target}, outside the environment: the nodes must have it"
    if len(outside) > 10:
        yield f"and {len(outside) - 10} more links lead outside the environment"
