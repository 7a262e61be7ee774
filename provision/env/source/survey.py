"""List everything to pack: the environment, its checkouts, data and packages, and the paths to relocate."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pathspec

from provision.env.source import editable, files
from provision.env.source.environment import Owners, find_owners, site_packages
from provision.env.source.files import Source, Tree
from provision.errors import UsageError

DATA = "data"  # the folder in the prefix for the paths given with --with-data

_SHEBANG = re.compile(rb"#!([^\n]+)/bin/python[^/\n ]*")


@dataclass(frozen=True)
class Environment:
    """The result of a walk of the prefix.

    Attributes:
        root: where the environment is.
        sources: its files, links and folders by path, without excluded ones and with additions.
        tree: the walk.
        exclude: patterns of excluded paths, which apply to checkouts as well.
        notices: how much each pattern excludes.
    """

    root: Path
    sources: Mapping[str, Source]
    tree: Tree
    exclude: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    @cached_property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(one.size for one in self.sources.values())


@dataclass(frozen=True)
class Survey:
    """Everything that is known before the first file is read.

    Attributes:
        prefix: the prefix that the environment's files name.
        root: where the environment is: not ``prefix`` if it was moved.
        sources: everything to pack, with checkouts and data.
        folders: folders of the environment and of data, with their mtimes in nanoseconds.
        sites: ``site-packages`` folders, relative to the prefix.
        owners: packages, and the package of each path.
        data: names in the prefix's ``data`` folder that are packed byte for byte.
        relocations: pairs of a source path and a path relative to the prefix. The last one is the prefix itself.
        notices: files that are not packed or will not work.
    """

    prefix: str
    root: Path
    sources: tuple[Source, ...]
    folders: Mapping[str, int]
    sites: tuple[str, ...]
    owners: Owners
    data: Data
    relocations: tuple[tuple[str, str], ...]
    notices: tuple[str, ...]

    @cached_property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(one.size for one in self.sources)

    @property
    def programs(self) -> frozenset[bytes]:
        """Names in ``bin``."""
        return frozenset(
            os.fsencode(one.path[4:]) for one in self.sources if one.path.startswith("bin/") and one.type != "dir"
        )

    def owner(self, path: str) -> str:
        """The owner of a path: data, a package, or a folder."""
        return self.data.package(path) or self.owners.owner(path)

    def check_folders(self) -> None:
        """Check that no name was added or removed since the walk.

        Raises:
            BundleError: a folder changed.
        """
        for folder, mtime in self.folders.items():
            try:
                changed = os.stat(folder).st_mtime_ns != mtime  # noqa: PTH116 - faster, for thousands of folders
            except OSError as error:
                raise files.folder_changed(folder) from error
            if changed:
                raise files.folder_changed(folder)


@dataclass(frozen=True)
class Data:
    """Files and folders outside the environment that are packed as ``data/NAME``.

    Attributes:
        trees: one for each path.
        names: their names in the folder ``data``.
    """

    trees: tuple[Tree, ...] = ()
    names: tuple[str, ...] = ()

    def package(self, path: str) -> str:
        """The package of a path's chunk; empty if the path is not data."""
        folder, _, rest = path.partition("/")
        name = rest.partition("/")[0] if folder == DATA else ""
        return f"{DATA}/{name}/" if name in self.names else ""

    @property
    def packages(self) -> frozenset[str]:
        """The packages of all data."""
        return frozenset(f"{DATA}/{name}/" for name in self.names)


@dataclass(frozen=True)
class Exclusion:
    """Sources that remain, and a notice for each pattern."""

    kept: tuple[Source, ...]
    notices: tuple[str, ...] = field(default=())


def scan_environment(prefix: Path, *, exclude: Sequence[str] = (), additions: Iterable[Source] = ()) -> Environment:
    """Walk an environment.

    Args:
        prefix: the environment.
        exclude: patterns of paths to exclude; see ``exclude_sources``.
        additions: files to pack in addition to the environment's own, or in their place.

    Raises:
        UsageError: a folder cannot be read, or a pattern is invalid.
        BundleError: a folder was deleted during the walk.
    """
    if len(prefix.parts) < 2:
        raise UsageError(f"{prefix} cannot be an environment")
    tree = files.walk_environment(prefix)
    exclusion = exclude_sources(tree.sources, exclude)
    sources = {one.path: one for one in (*exclusion.kept, *additions)}
    return Environment(prefix, sources, tree, tuple(exclude), exclusion.notices)


def survey(environment: Environment, *, source_prefix: str | None = None, data: Sequence[Path] = ()) -> Survey:
    """List everything to pack with an environment.

    Args:
        environment: see ``scan_environment``.
        source_prefix: the prefix that its files name, if it was moved from there. Paths outside it then mean another
            machine and are not looked up here.
        data: files and folders to pack as ``data/NAME``.

    Raises:
        UsageError: a path cannot be read, or two paths collide.
        BundleError: a folder was deleted during the survey.
    """
    prefix, paths = environment.root, frozenset(environment.sources)
    extra = find_data(data, paths)
    carried = [one for tree in extra.trees for one in link_names(tree.sources)]
    sites = site_packages(paths)
    if source_prefix is None:
        editables = editable.find_editables(prefix, sites, paths)
    else:
        editables = editable.find_moved(prefix, sites, source_prefix)
    sources = dict(environment.sources)
    for checkout in editables.checkouts:
        for one in exclude_sources(checkout.tree.sources, environment.exclude).kept:
            sources.setdefault(one.path, one)
    for folder, needed in ((editable.FOLDER, editables.checkouts), (DATA, carried)):
        if needed:
            sources.setdefault(folder, Source(folder, "", "dir", 0o755, files.FOLDER_MTIME * 1_000_000_000))
            if sources[folder].type != "dir":
                raise UsageError(
                    f"{prefix / folder} is not a folder, but {'data' if folder == DATA else 'checkouts'} must go there",
                    hint=f"rename it: mv {prefix / folder} {prefix / folder}.old",
                )
    relocations = (
        *editables.relocations,
        *((alias, "") for alias in find_aliases(prefix) if source_prefix is None),
        (source_prefix or str(prefix), ""),
    )
    trees = (environment.tree, *extra.trees, *(checkout.tree for checkout in editables.checkouts))
    everything = sorted((*link_names(sorted(sources.values())), *carried))
    data_folders = {path: time for tree in extra.trees for path, time in tree.folders.items()}
    return Survey(
        prefix=source_prefix or str(prefix),
        root=prefix,
        sources=tuple(everything),
        folders=_watched_folders(environment) | data_folders,
        sites=sites,
        owners=find_owners(prefix, sorted(paths), editable=editables.dist_infos),
        data=extra,
        relocations=relocations,
        notices=(
            *editables.notices,
            *environment.notices,
            *(f"{path} is a socket, pipe or device and is not packed" for tree in trees for path in tree.skipped),
            *_links_outside(everything, relocations),
        ),
    )


def exclude_sources(sources: Iterable[Source], patterns: Sequence[str]) -> Exclusion:
    """Exclude the paths that patterns match, and everything in folders that they match.

    Args:
        sources: sorted by path.
        patterns: as in a .gitignore file, relative to the prefix. ``share/doc`` and ``/tests`` match at the top,
            ``*.a`` and ``tests/`` match anywhere, and ``!keep.a`` includes a path again. The last match decides.

    Raises:
        UsageError: a pattern is invalid, or excludes the environment's Python.
    """
    if not patterns:
        return Exclusion(tuple(sources))
    try:
        spec = pathspec.GitIgnoreSpec.from_lines(patterns)
    except (ValueError, TypeError) as error:
        raise UsageError(f"--exclude: {error}", hint="patterns have the syntax of a .gitignore file") from error
    kept: list[Source] = []
    excluded: dict[str, int] = {}  # path -> number of the pattern
    counts = [0] * len(patterns)
    sizes = [0] * len(patterns)
    matched: set[int] = set()
    for one in sources:
        number = excluded.get(one.path.rpartition("/")[0])
        if number is None:
            verdict = spec.check_file(one.path + ("/" if one.type == "dir" else ""))
            if verdict.index is not None:
                matched.add(verdict.index)
            if not verdict.include or verdict.index is None:
                kept.append(one)
                continue
            number = verdict.index
        excluded[one.path] = number
        if one.type != "dir":
            counts[number] += 1
            sizes[number] += one.size
    if python := next((path for path in ("bin", "bin/python") if path in excluded), ""):
        raise UsageError(
            f"--exclude {patterns[excluded[python]]!r} would exclude {python}", hint="Python cannot run without it"
        )
    return Exclusion(
        tuple(kept),
        tuple(
            _exclusion_notice(pattern, counts[number], sizes[number])
            for number, pattern in enumerate(patterns)
            if counts[number] or number not in matched
        ),
    )


def find_data(paths: Iterable[Path], taken: Collection[str]) -> Data:
    """Walk the files and folders to pack as data.

    Args:
        paths: files and folders. A path that is a symlink is followed; symlinks inside stay symlinks.
        taken: every path in the environment.

    Raises:
        UsageError: a path does not exist, cannot be read, or has a name that is taken.
    """
    trees: list[Tree] = []
    names: dict[str, Path] = {}
    for path in paths:
        name = Path(os.path.abspath(path)).name  # noqa: PTH100 - resolve() would return the name of a symlink's target
        target = f"{DATA}/{name}"
        if not path.exists():
            raise UsageError(f"--with-data {path}: no such file or folder")
        if not name or not (path.is_file() or path.is_dir()):
            raise UsageError(f"--with-data {path} is neither a file nor a folder with a name")
        if name in names:
            raise UsageError(f"--with-data: {names[name]} and {path} would both be {target}", hint="rename one of them")
        if target in taken:
            raise UsageError(f"--with-data {path}: the environment already has {target}", hint="rename the data")
        names[name] = path
        trees.append(files.walk(path.resolve(), target, skip=lambda _path, _name: False))
    return Data(tuple(trees), tuple(names))


def link_names(sources: Iterable[Source]) -> tuple[Source, ...]:
    """Turn every later name of a file into a hard link to its first name. ``sources`` are sorted by path."""
    first: dict[tuple[int, int], str] = {}
    linked = []
    for one in sources:
        target = first.setdefault(one.inode, one.path) if one.inode else one.path
        linked.append(one if target == one.path else one._replace(type="hard", size=0, target=target))
    return tuple(linked)


def find_aliases(prefix: Path) -> tuple[str, ...]:
    """Other absolute paths of the environment: without symlinks, and as its own scripts spell it."""
    real = os.path.realpath(prefix)
    aliases = {real}
    for path in sorted((prefix / "bin").iterdir()):
        spelled = _interpreter_prefix(path) if os.path.isfile(path) else None  # noqa: PTH113 - False where unreadable
        if spelled and spelled.startswith("/") and os.path.realpath(spelled) == real:
            aliases.add(spelled)
    return tuple(sorted(aliases - {str(prefix)}))


def _interpreter_prefix(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            match = _SHEBANG.match(file.read(4096))
    except OSError:
        return None
    return os.fsdecode(match[1].strip()) if match else None


def _watched_folders(environment: Environment) -> dict[str, int]:
    """The packed folders of the environment. Names in an excluded folder may change."""
    top = str(environment.root)
    return {
        path: time
        for path, time in environment.tree.folders.items()
        if path == top or path.removeprefix(f"{top}/") in environment.sources
    }


def _exclusion_notice(pattern: str, count: int, size: int) -> str:
    if not count:
        return f"--exclude {pattern!r} matches nothing"
    return f"--exclude {pattern!r} excludes {count} {'file' if count == 1 else 'files'} of {size / 1e6:.1f} MB"


def _links_outside(sources: list[Source], relocations: tuple[tuple[str, str], ...]) -> Iterator[str]:
    tops = tuple(source + "/" for source, _ in relocations)
    outside = [
        one
        for one in sources
        if one.type == "link" and one.target.startswith("/") and not (one.target + "/").startswith(tops)
    ]
    for one in outside[:10]:
        yield f"{one.path} links to {one.target}, outside the environment: the nodes must have it"
    if len(outside) > 10:
        yield f"and {len(outside) - 10} more links lead outside the environment"
