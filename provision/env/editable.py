"""Editable installs: which checkouts an environment points at, and which of their files travel."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from provision.env import scan

_PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg")
_MAPPING = re.compile(r"^(?:MAPPING|NAMESPACES)\b[^=\n]*=\s*(\{.*\})\s*$", re.MULTILINE)

# Never part of a program: histories, caches, environments of other tools.
_CACHES = frozenset(
    {".git", ".hg", ".svn", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".tox", ".nox"}
    | {".eggs", ".ipynb_checkpoints", ".venv", "venv", "node_modules"}
)
_LEFT_OUT = (".pyc", ".ccb")  # compiled anew on a node; bundles
_ENVIRONMENT_SIGNS = ("pyvenv.cfg", "conda-meta")

# What git ignores and Python needs all the same: built extensions, generated modules, metadata of setup.py develop.
_BUILT = (".py", ".so", ".egg-info/", ".dist-info/")


@dataclass(frozen=True)
class Checkout:
    """A folder outside the prefix that the environment imports from.

    Attributes:
        root: the project's folder.
        target: where it goes, relative to the prefix.
        tree: its files that travel.
    """

    root: str
    target: str
    tree: scan.Tree


@dataclass(frozen=True)
class Editables:
    """The checkouts, the dist-info folders of editable installs (relative to the prefix), and what could not be had."""

    checkouts: tuple[Checkout, ...] = ()
    dist_infos: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def find_editables(prefix: Path, sites: Iterable[str], paths: frozenset[str]) -> Editables:
    """Find every checkout that ``.pth`` files, finders, ``direct_url.json`` and egg-links name, and list its files.

    Args:
        prefix: the environment.
        sites: its ``site-packages`` folders, relative to the prefix.
        paths: every path in it; a checkout's place must not be one of them.
    """
    direct = dict(_direct_urls(prefix, sites))
    named = [folder for site in sites for folder in _references(prefix / site)]
    inside = os.path.realpath(prefix)
    roots: dict[str, set[str]] = {}
    notices: list[str] = []
    for folder in dict.fromkeys((*direct.values(), *named)):
        if _beneath(os.path.realpath(folder), inside):
            continue
        if not Path(folder).is_dir():
            notices.append(f"{folder} does not exist, but a .pth file or an editable install names it: it stays behind")
        elif folder in ("/", str(Path.home())):
            notices.append(f"{folder} is named by a .pth file and is no project: it stays behind")
        else:
            known = folder if folder in direct.values() else next((r for r in sorted(roots) if _beneath(folder, r)), "")
            roots.setdefault(known or project_root(folder), set()).add(folder)
    checkouts = []
    taken = set(paths)
    for root, folders in sorted(roots.items()):
        target = _free(f"src/{Path(root).name}", taken)
        taken.add(target)
        checkouts.append(Checkout(root, target, checkout_tree(Path(root), target, prefix, folders)))
    return Editables(tuple(checkouts), tuple(direct), tuple(notices))


def project_root(folder: str) -> str:
    """The project that ``folder`` is part of: the nearest folder with project metadata, else git's, else itself."""
    home = Path.home()
    for candidate in (Path(folder), *Path(folder).parents):
        if candidate in (home, Path("/")):
            break
        if any((candidate / name).is_file() for name in _PROJECT_FILES) or (candidate / ".git").exists():
            return str(candidate)
    return folder


def checkout_tree(root: Path, target: str, prefix: Path, references: Iterable[str] = ()) -> scan.Tree:
    """The files of a checkout that travel: what git knows or would add, and what was built; all but caches without git.

    Args:
        root: the checkout.
        target: where it goes, relative to the prefix.
        prefix: the environment, which may lie inside the checkout and is no part of it.
        references: folders in the checkout that the environment imports from; they travel even if git ignores them.
    """

    def leave_out(path: str, name: str) -> bool:
        full = root / path
        return name in _CACHES or name.endswith(_LEFT_OUT) or full == prefix or _is_environment(full)

    listed = _git_files(root)
    if not listed:
        return scan.walk(root, target, leave_out=leave_out)
    kept = [path for path in listed if not any(leave_out(part, Path(part).name) for part in _parts(path))]
    for folder in references:
        inside = os.path.relpath(folder, root)
        if inside != "." and not any(_beneath(path, inside) for path in kept):
            tree = scan.walk(Path(folder), inside, leave_out=lambda _path, name: name in _CACHES)
            kept += [found.path for found in tree.found]
    return scan.pick(root, target, kept)


def _git_files(root: Path) -> list[str]:
    """Paths relative to ``root``; none where git, or a repository that it trusts, is missing."""
    tracked = _git(root, "--cached", "--recurse-submodules")
    untracked = _git(root, "--others", "--exclude-standard")
    ignored = _git(root, "--others", "--ignored", "--exclude-standard", "--directory")
    if not tracked and not untracked:
        return []
    built: list[str] = []
    for path in ignored:
        if path.endswith(_BUILT):
            folder = path.rstrip("/")
            inside = scan.walk(root / folder, folder, leave_out=lambda *_: False).found if path[-1] == "/" else ()
            built += [path.rstrip("/"), *(found.path for found in inside)]
    return [*tracked, *(path.rstrip("/") for path in untracked), *built]


def _git(root: Path, *options: str) -> list[str]:
    command = ["git", "-C", str(root), "ls-files", "-z", *options]
    environ = os.environ | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, check=True, env=environ)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [os.fsdecode(path) for path in done.stdout.split(b"\0") if path]


def _direct_urls(prefix: Path, sites: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each editable install's dist-info folder (relative to the prefix) and the folder it was installed from."""
    for site in sites:
        for path in sorted((prefix / site).glob("*.dist-info/direct_url.json")):
            if (root := _direct_url(path)) is not None:
                yield f"{site}/{path.parent.name}", root


def _direct_url(path: Path) -> str | None:
    """The folder that an editable install's ``direct_url.json`` (PEP 610) names; None if it is not editable."""
    try:
        data = json.loads(path.read_bytes())
        if not data.get("dir_info", {}).get("editable"):
            return None
        parts = urlsplit(str(data["url"]))
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return os.path.normpath(unquote(parts.path)) if parts.scheme == "file" else None


def _references(site: Path) -> Iterator[str]:
    """Folders that ``.pth`` files, egg-links and setuptools' finders name by absolute path."""
    for path in sorted((*site.glob("*.pth"), *site.glob("*.egg-link"))):
        lines = _text(path).splitlines()
        for line in lines[:1] if path.suffix == ".egg-link" else lines:
            if line.startswith("/"):
                yield os.path.normpath(line.strip())
    for path in sorted(site.glob("__editable___*_finder.py")):
        for mapping in _MAPPING.findall(_text(path)):
            for value in _values(mapping):
                folder = Path(os.path.normpath(value))
                yield str(folder if folder.is_dir() else folder.parent)


def _values(mapping: str) -> Iterator[str]:
    try:
        values = ast.literal_eval(mapping).values()
    except (ValueError, SyntaxError, AttributeError):
        return
    for value in values:
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str) and one.startswith("/"):
                yield one


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def _beneath(path: str, top: str) -> bool:
    return path == top or path.startswith(top.rstrip("/") + "/")


def _parts(path: str) -> Iterator[str]:
    """A relative path and the folders above it."""
    while path:
        yield path
        path = path.rpartition("/")[0]


def _is_environment(folder: Path) -> bool:
    return any((folder / sign).exists() for sign in _ENVIRONMENT_SIGNS)


def _free(target: str, taken: set[str]) -> str:
    number = 2
    name = target
    while name in taken:
        name = f"{target}-{number}"
        number += 1
    return name
