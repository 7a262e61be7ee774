"""Survey an environment before it is packed: its tree, its checkouts, its packages, and the paths to relocate."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from provision.env import editable, owners, scan
from provision.env.owners import Owners
from provision.errors import UsageError

_SHEBANG = re.compile(rb"#!([^\n]+)/bin/python[^/\n ]*")


@dataclass(frozen=True)
class Survey:
    """What is known before the first file is read.

    Attributes:
        prefix: the environment.
        found: everything that will be packed, checkouts included.
        sites: its ``site-packages`` folders, relative to the prefix.
        owners: packages, and the owner of every path.
        relocations: pairs of source path and path relative to the prefix; the last one is the prefix itself.
        notices: what stays behind or will not work, for people.
    """

    prefix: str
    found: tuple[scan.Found, ...]
    sites: tuple[str, ...]
    owners: Owners
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


def survey(prefix: Path) -> Survey:
    """Look at everything in an environment and at the checkouts that it imports from.

    Raises:
        UsageError: a folder cannot be read, or the path of the environment cannot be told from others.
    """
    if len(prefix.parts) < 2:
        raise UsageError(f"{prefix} cannot be an environment")
    tree = scan.environment(prefix)
    paths = frozenset(one.path for one in tree.found)
    sites = owners.site_packages(paths)
    editables = editable.find_editables(prefix, sites, paths)
    found = list(tree.found)
    skipped = list(tree.skipped)
    for checkout in editables.checkouts:
        found += [one for one in checkout.tree.found if one.path not in paths]
        skipped += checkout.tree.skipped
    if editables.checkouts and "src" not in paths:
        found.append(scan.Found("src", "", "dir", 0o755, scan.FOLDER_MTIME * 1_000_000_000))
    relocations = (
        *((checkout.root, checkout.target) for checkout in editables.checkouts),
        *((alias, "") for alias in aliases(prefix)),
        (str(prefix), ""),
    )
    return Survey(
        prefix=str(prefix),
        found=tuple(sorted(found, key=lambda one: one.path)),
        sites=sites,
        owners=owners.find_owners(prefix, sorted(paths), editable=editables.dist_infos),
        relocations=relocations,
        notices=(*editables.notices, *_notices(found, skipped, relocations)),
    )


def aliases(prefix: Path) -> tuple[str, ...]:
    """Other paths that lead to the environment: without symlinks, and as its own scripts spell it."""
    found = {os.path.realpath(prefix)}
    for path in sorted((prefix / "bin").iterdir()):
        spelled = _interpreter_prefix(path) if path.is_file() else None
        if spelled and os.path.realpath(spelled) == os.path.realpath(prefix):
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
