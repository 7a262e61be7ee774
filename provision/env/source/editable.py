"""Editable installs: find the checkouts that an environment imports from, and choose their files and places.

The files of a checkout are those that git tracks or would add, and ignored files that Python needs: compiled
extensions, generated modules, and the metadata of ``setup.py develop``. Without git, it is everything but caches.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from provision.env.bundle.manifest import PACKAGE_FILE
from provision.env.source import files
from trainer.agent.contract.untrusted import parse_object

FOLDER = "src"  # of the checkouts, in the prefix

_PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg")
_UNUSUAL = re.compile(r"[^\w.+-]+")  # characters in a path that break scripts and launchers

# Python programs that find modules elsewhere: setuptools' finders, hatchling's (through ``editables``) and
# scikit-build-core's. They contain absolute paths as plain strings.
_FINDERS = ("__editable__*.py", "_editable_impl_*.py", "_*_editable.py")

# meson-python's finder runs ninja in a build folder whenever the package is imported.
_REBUILDING = "_*_editable_loader.py"


@dataclass(frozen=True)
class Checkout:
    """A folder outside the prefix that the environment imports from.

    Attributes:
        root: the project's folder, without symlinks.
        target: where it goes, relative to the prefix.
        tree: the files to pack.
        aliases: other paths of it or of folders in it, each with its path in the prefix.
    """

    root: str
    target: str
    tree: files.Tree
    aliases: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Editables:
    """What editable installs need.

    Attributes:
        checkouts: the folders to pack; a checkout comes before the checkouts inside it.
        dist_infos: the dist-info folders of editable installs, relative to the prefix.
        aliases: other paths that lead into the prefix, each with its path in the prefix.
        notices: missing files, one sentence each.
    """

    checkouts: tuple[Checkout, ...] = ()
    dist_infos: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def relocations(self) -> tuple[tuple[str, str], ...]:
        """Pairs of a source path and its path in the prefix."""
        return (*(pair for one in self.checkouts for pair in ((one.root, one.target), *one.aliases)), *self.aliases)


@dataclass
class _References:
    """The folders that an environment imports from, as it spells them: by project, and inside the prefix."""

    projects: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    inside: set[str] = field(default_factory=set)
    notices: list[str] = field(default_factory=list)


def find_editables(prefix: Path, sites: Iterable[str], paths: frozenset[str]) -> Editables:
    """Find every checkout that an editable install refers to, and list its files.

    Args:
        prefix: the environment.
        sites: its ``site-packages`` folders, relative to the prefix.
        paths: every path in it. Checkouts do not use these.
    """
    sites = tuple(sites)
    installs, named = _read_references(prefix, sites)
    real = os.path.realpath(prefix)
    found = _References()
    for folder in dict.fromkeys((*installs.values(), *named)):
        _add_reference(found, folder, real, is_root=folder in installs.values())
    found.notices += [
        f"{name} rebuilds its package on every import and cannot work elsewhere: pip install it without -e"
        for site in sites
        for name in rebuilding_finders(prefix / site)
    ]
    inside = [folder for folder in sorted(found.inside) if not any(_is_in(folder, top) for top in (str(prefix), real))]
    return Editables(
        checkouts=tuple(_place_checkouts(found, prefix, set(paths))),
        dist_infos=tuple(installs),
        aliases=tuple(sorted({_alias(folder, real, "") for folder in inside})),
        notices=tuple(found.notices),
    )


def find_moved(prefix: Path, sites: Iterable[str], source_prefix: str) -> Editables:
    """Editable installs of an environment that was moved here: the folders outside it are on another machine.

    Args:
        prefix: where the environment is now.
        sites: its ``site-packages`` folders, relative to the prefix.
        source_prefix: where it was.
    """
    installs, named = _read_references(prefix, tuple(sites))
    outside = [folder for folder in dict.fromkeys((*installs.values(), *named)) if not _is_in(folder, source_prefix)]
    notices = tuple(f"{folder} is imported but not part of the environment: it is missing" for folder in outside)
    return Editables(dist_infos=tuple(installs), notices=notices)


def project_root(folder: str) -> str:
    """The project of ``folder``: the nearest folder with project metadata or .git, else the folder itself."""
    home = Path(_home())
    for candidate in (Path(folder), *Path(folder).parents):
        if candidate in (home, Path("/")):
            break
        if any((candidate / name).is_file() for name in _PROJECT_FILES) or (candidate / ".git").exists():
            return str(candidate)
    return folder


def editable_installs(prefix: Path, sites: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each editable install's dist-info folder (relative to the prefix) and the folder it was installed from."""
    for site in sites:
        for path in sorted((prefix / site).glob("*.dist-info/direct_url.json")):
            if (root := editable_root(path)) is not None:
                yield f"{site}/{path.parent.name}", root


def named_folders(site: Path) -> Iterator[str]:
    """The folders that .pth files, egg-links, finders and symlinks of a ``site-packages`` folder refer to."""
    for path in sorted((*site.glob("*.pth"), *site.glob("*.egg-link"))):
        lines = _read_text(path).splitlines()
        for line in lines[:1] if path.suffix == ".egg-link" else lines:
            if line.startswith("/"):
                yield os.path.normpath(line.strip())
    for path in sorted({path for pattern in _FINDERS for path in site.glob(pattern)}):
        yield from map(_folder_of, _absolute_strings(_read_text(path)))
    yield from (_folder_of(target) for target in _absolute_links(site))


def rebuilding_finders(site: Path) -> Iterator[str]:
    """Names of finders that rebuild their package on import."""
    return (path.name for path in sorted(site.glob(_REBUILDING)))


def _read_references(prefix: Path, sites: tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    named = [folder for site in sites for folder in named_folders(prefix / site)]
    return dict(editable_installs(prefix, sites)), named


def _add_reference(found: _References, folder: str, prefix: str, *, is_root: bool) -> None:
    """Decide whether a folder is in the prefix, in a project, or cannot be packed."""
    real = os.path.realpath(folder)
    if _is_in(real, prefix):
        found.inside.add(folder)
    elif not Path(real).is_dir():
        found.notices.append(
            f"{folder} does not exist, but a .pth file or an editable install names it: it is not packed"
        )
    elif _is_in(_home(), real):
        found.notices.append(f"{folder} is named by a .pth file and is not a project: it is not packed")
    else:
        around = [root for root in found.projects if _is_in(real, root)]
        root = real if is_root else max(around, key=len) if around else project_root(real)
        found.projects[root].add(folder)


def _place_checkouts(found: _References, prefix: Path, taken: set[str]) -> list[Checkout]:
    """Choose a path in the prefix for every project. A project inside another one stays there."""
    checkouts: list[Checkout] = []
    for root, folders in sorted(found.projects.items()):
        around = next((one for one in checkouts if _is_in(root, one.root)), None)
        if around:
            target = f"{around.target}/{os.path.relpath(root, around.root)}"
        else:
            name = _UNUSUAL.sub("-", Path(root).name).strip("-") or "checkout"
            target = _free_path(f"{FOLDER}/{name}", taken)
        taken.add(target)
        contents = list_checkout(Path(root), target, prefix, sorted(map(os.path.realpath, folders)))
        found.notices += contents.notices
        aliases = tuple(sorted({_alias(folder, root, target) for folder in folders} - {(root, target)}))
        checkouts.append(Checkout(root, target, contents.tree, aliases))
    return checkouts


def _alias(folder: str, top: str, target: str) -> tuple[str, str]:
    """The shortest parent of a path that leads into ``top``, and the corresponding path below ``target``."""
    parents = [path for path in (folder, *map(str, Path(folder).parents)) if _is_in(os.path.realpath(path), top)]
    alias = min(parents, key=len)
    inner = os.path.realpath(alias)[len(top) :].strip("/")
    return alias, "/".join(part for part in (target, inner) if part)


def editable_root(path: Path) -> str | None:
    """The folder in an editable install's ``direct_url.json`` (PEP 610); None if the install is not editable."""
    try:
        data = parse_object(path.read_bytes(), limit=PACKAGE_FILE)
        if not data.get("dir_info", {}).get("editable"):
            return None
        parts = urlsplit(str(data["url"]))
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return os.path.normpath(unquote(parts.path, errors="surrogateescape")) if parts.scheme == "file" else None


def _absolute_strings(program: str) -> Iterator[str]:
    try:
        tree = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("/"):
            yield os.path.normpath(node.value)


def _absolute_links(site: Path) -> Iterator[str]:
    """Targets of absolute symlinks at the top of ``site-packages``, made by ``flit install -s`` or by hand."""
    if site.is_dir():
        for path in sorted(site.iterdir()):
            if path.is_symlink() and (target := os.readlink(path)).startswith("/"):  # noqa: PTH115 - a str is wanted
                yield os.path.normpath(target)


def _folder_of(path: str) -> str:
    return str(Path(path).parent) if Path(path).is_file() else path


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def _home() -> str:
    return os.path.realpath(os.path.expanduser("~"))  # noqa: PTH111 - Path.home() raises where there is none


def _is_in(path: str, top: str) -> bool:
    return path == top or path.startswith(top.rstrip("/") + "/")


def _free_path(target: str, taken: set[str]) -> str:
    number = 2
    path = target
    while path in taken:
        path = f"{target}-{number}"
        number += 1
    return path


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

    tree: files.Tree
    notices: tuple[str, ...] = ()


@dataclass
class _Listing:
    """Paths relative to the checkout: files to pack, untracked ones among them, and ignored files of packages."""

    kept: list[str] = field(default_factory=list)
    untracked: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def list_checkout(root: Path, target: str, prefix: Path, references: Iterable[str] = ()) -> Contents:
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
        return full.is_dir() and (
            any((full / sign).exists() for sign in _ENVIRONMENT_SIGNS) or os.path.realpath(full) == environment
        )

    listing = _list_repository(root, "", skip)
    if listing is None:
        tree = files.walk(root, target, skip=skip)
        return Contents(tree, tuple(_links_out(tree, target)))
    kept = dict.fromkeys(listing.kept)
    for folder in references:
        inside = os.path.relpath(folder, root)
        if inside != "." and not any(path == inside or path.startswith(inside + "/") for path in kept):
            found = files.walk(Path(folder), inside, skip=lambda _path, name: name in _CACHES).sources
            kept |= dict.fromkeys(one.path for one in found)
    tree = files.pick(root, target, kept)
    return Contents(tree, (*_notices(root, target, listing), *_links_out(tree, target)))


def list_ignored(root: Path) -> list[str]:
    """The paths in a folder that git ignores, relative to it; a folder that is ignored as a whole ends with ``/``.

    Without caches and compiled modules. Empty without git or a repository.
    """
    found = _git(root, "--others", "--ignored", "--exclude-standard", "--directory")
    return [
        path
        for path in found
        if not path.endswith(_SKIPPED) and path != "./" and not any(part in _CACHES for part in path.split("/"))
    ]


def is_cache(name: str) -> bool:
    """Whether a file or folder of this name is never part of a program: a history, a cache, an environment."""
    return name in _CACHES or name.endswith(_SKIPPED)


def _list_repository(root: Path, top: str, skip: files.Skip) -> _Listing | None:
    """List the folder ``top`` of a checkout and the repositories in it with git; None without git or a repository."""
    folder = root / top
    tracked = _git(folder, "--cached")
    others = _git(folder, "--others", "--exclude-standard")
    if not tracked and not others:
        return None
    listing = _Listing()
    for paths, into in ((tracked, (listing.kept,)), (others, (listing.kept, listing.untracked))):
        for path in (f"{top}{path}".rstrip("/") for path in paths):
            if any(skip(part, part.rpartition("/")[2]) for part in _path_and_parents(path)):
                continue
            nested = root / path
            if nested.is_dir() and not nested.is_symlink():  # a submodule, or a repository inside this one
                _add_nested(listing, root, path, skip)
            else:
                for paths_of in into:
                    paths_of.append(path)
    for path in _git(folder, "--others", "--ignored", "--exclude-standard", "--directory"):
        _add_ignored(listing, root, top + path, top, skip)
    return listing


def _add_nested(listing: _Listing, root: Path, path: str, skip: files.Skip) -> None:
    nested = _list_repository(root, path + "/", skip)
    if nested is None:
        listing.kept += _walk_folder(root, path, skip)
        return
    listing.kept += nested.kept
    listing.untracked += nested.untracked
    listing.ignored += nested.ignored


def _add_ignored(listing: _Listing, root: Path, path: str, top: str, skip: files.Skip) -> None:
    """Pack an ignored file if it is code or metadata of a package."""
    is_folder = path.endswith("/")
    path = path.rstrip("/")
    if any(skip(part, part.rpartition("/")[2]) for part in _path_and_parents(path)):
        return
    if not is_folder:
        if _CODE.search(path) or any(part.endswith(_METADATA) for part in _path_and_parents(path)):
            listing.kept.append(path)
        elif _is_package(root, path.rpartition("/")[0]):
            listing.ignored.append(path)
    elif path.endswith(_METADATA):
        listing.kept += _walk_folder(root, path, skip)
    elif _may_hold_code(root, path, top):
        code = [one for one in _walk_folder(root, path, skip) if _CODE.search(one)]
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


def _links_out(tree: files.Tree, target: str) -> Iterator[str]:
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


def _walk_folder(root: Path, path: str, skip: files.Skip) -> list[str]:
    tree = files.walk(root / path, path, skip=lambda inner, name: skip(f"{path}/{inner}", name))
    return [one.path for one in tree.sources]


def _is_package(root: Path, folder: str) -> bool:
    return (root / folder / "__init__.py").is_file()


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _path_and_parents(path: str) -> Iterator[str]:
    """A relative path and the folders above it."""
    while path:
        yield path
        path = path.rpartition("/")[0]
