"""Choose the files of a checkout to pack.

These are the files that git tracks or would add, and ignored files that Python needs: compiled extensions, generated
modules, and the metadata of ``setup.py develop``. Without git, it is everything but caches.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from provision.env.source import scan

# Never part of a program: histories, caches, environments of other tools.
_CACHES = frozenset(
    {".git", ".hg", ".svn", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".tox", ".nox"}
    | {".eggs", ".ipynb_checkpoints", ".venv", "venv", "node_modules"}
)
_SKIPPED = (".pyc", ".ccb")  # compiled again on the node; bundles
_ENVIRONMENT_SIGNS = ("pyvenv.cfg", "conda-meta")

_CODE = re.compile(r"\.py\Z|\.so(\.\d+)*\Z")
_METADATA = (".egg-info", ".dist-info")
_LARGE = 1 << 30  # bytes of untracked files; more give a notice

# Ignores settings of the repository that start programs, such as fsmonitor. A repository of another user is listed as
# well: nothing in it is run.
_GIT = ("git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false")


@dataclass(frozen=True)
class Contents:
    """The files of a checkout to pack, and notices about them."""

    tree: scan.Tree
    notices: tuple[str, ...] = ()


@dataclass
class _Listing:
    """Paths relative to the checkout: files to pack, untracked ones among them, and ignored files of packages."""

    kept: list[str] = field(default_factory=list)
    untracked: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def contents(root: Path, target: str, prefix: Path, references: Iterable[str] = ()) -> Contents:
    """List the files of a checkout to pack.

    Args:
        root: the checkout.
        target: where it goes, relative to the prefix.
        prefix: the environment. It may be inside the checkout and is not part of it.
        references: folders in the checkout that the environment imports from. They are packed even if git ignores them.
    """
    environment = os.path.realpath(prefix)

    def skip(path: str, name: str) -> bool:
        if name in _CACHES or name.endswith(_SKIPPED):
            return True
        full = root / path
        return full.is_dir() and (_is_environment(full) or os.path.realpath(full) == environment)

    listing = _list(root, "", skip)
    if listing is None:
        tree = scan.walk(root, target, skip=skip)
        return Contents(tree, tuple(_links_out(tree, target)))
    kept = dict.fromkeys(listing.kept)
    for folder in references:
        inside = os.path.relpath(folder, root)
        if inside != "." and not any(path == inside or path.startswith(inside + "/") for path in kept):
            found = scan.walk(Path(folder), inside, skip=lambda _path, name: name in _CACHES).sources
            kept |= dict.fromkeys(one.path for one in found)
    tree = scan.pick(root, target, kept)
    return Contents(tree, (*_notices(root, target, listing), *_links_out(tree, target)))


def _list(root: Path, top: str, skip: scan.Skip) -> _Listing | None:
    """List the folder ``top`` of a checkout and the repositories in it with git; None without git or a repository."""
    folder = root / top
    tracked = _git(folder, "--cached")
    others = _git(folder, "--others", "--exclude-standard")
    if not tracked and not others:
        return None
    listing = _Listing()
    for paths, into in ((tracked, (listing.kept,)), (others, (listing.kept, listing.untracked))):
        for path in (f"{top}{path}".rstrip("/") for path in paths):
            if any(skip(part, part.rpartition("/")[2]) for part in _parts(path)):
                continue
            if _is_folder(root / path):  # a submodule, or a repository inside this one
                _add_nested(listing, root, path, skip)
            else:
                for paths_of in into:
                    paths_of.append(path)
    for path in _git(folder, "--others", "--ignored", "--exclude-standard", "--directory"):
        _add_ignored(listing, root, top + path, top, skip)
    return listing


def _add_nested(listing: _Listing, root: Path, path: str, skip: scan.Skip) -> None:
    nested = _list(root, path + "/", skip)
    if nested is None:
        listing.kept += _walk(root, path, skip)
        return
    listing.kept += nested.kept
    listing.untracked += nested.untracked
    listing.ignored += nested.ignored


def _add_ignored(listing: _Listing, root: Path, path: str, top: str, skip: scan.Skip) -> None:
    """Pack an ignored file if it is code or metadata of a package."""
    is_folder = path.endswith("/")
    path = path.rstrip("/")
    if any(skip(part, part.rpartition("/")[2]) for part in _parts(path)):
        return
    if not is_folder:
        if _CODE.search(path) or any(part.endswith(_METADATA) for part in _parts(path)):
            listing.kept.append(path)
        elif _is_package(root, path.rpartition("/")[0]):
            listing.ignored.append(path)
    elif path.endswith(_METADATA):
        listing.kept += _walk(root, path, skip)
    elif _may_hold_code(root, path, top):
        code = [one for one in _walk(root, path, skip) if _CODE.search(one)]
        listing.kept += code
        if not code:
            listing.ignored.append(path + "/")


def _may_hold_code(root: Path, folder: str, top: str) -> bool:
    """Whether an ignored folder is a package or in one. ``build`` and ``dist`` at the top of a project are not."""
    above = folder.rpartition("/")[0]
    if _is_package(root, folder) or _is_package(root, above):
        return True
    return above != top.rstrip("/") and any((root / above).glob("*.py"))


def _notices(root: Path, target: str, listing: _Listing) -> Iterator[str]:
    if listing.ignored:
        more = f" and {len(listing.ignored) - 3} more" if len(listing.ignored) > 3 else ""
        names = ", ".join(listing.ignored[:3]) + more
        yield f"{root}: git ignores {names} in a package: not packed; git add -f the files that the program needs"
    sizes = {path: _size(root / path) for path in listing.untracked}
    total = sum(sizes.values())
    if total > _LARGE:
        largest = max(sizes, key=lambda path: sizes[path])
        yield (
            f"{root}: {total / 1e9:.1f} GB of untracked files are packed as {target}, for example {largest}; "
            "add unwanted files to .gitignore"
        )


def _links_out(tree: scan.Tree, target: str) -> Iterator[str]:
    for one in tree.sources:
        if one.type == "link" and not one.target.startswith("/"):
            leads_to = posixpath.normpath(posixpath.join(posixpath.dirname(one.path), one.target))
            if leads_to != target and not leads_to.startswith(target + "/"):
                yield f"{one.file} links to {one.target}, outside its checkout: the link will be broken on a node"


def _git(folder: Path, *options: str) -> list[str]:
    """Paths relative to ``folder``; none without git or a repository."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            [*_GIT, "-C", str(folder), "ls-files", "-z", *options], capture_output=True, check=True, env=environ
        )
    except (OSError, subprocess.CalledProcessError):
        return []
    return [os.fsdecode(path) for path in done.stdout.split(b"\0") if path]


def _walk(root: Path, path: str, skip: scan.Skip) -> list[str]:
    tree = scan.walk(root / path, path, skip=lambda inner, name: skip(f"{path}/{inner}", name))
    return [one.path for one in tree.sources]


def _is_package(root: Path, folder: str) -> bool:
    return (root / folder / "__init__.py").is_file()


def _is_environment(folder: Path) -> bool:
    return any((folder / sign).exists() for sign in _ENVIRONMENT_SIGNS)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _parts(path: str) -> Iterator[str]:
    """A relative path and the folders above it."""
    while path:
        yield path
        path = path.rpartition("/")[0]
