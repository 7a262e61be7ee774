"""The packages of an environment, and the package that each file belongs to."""

from __future__ import annotations

import csv
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from provision.env.bundle.manifest import PACKAGE_FILE, Package
from trainer.agent.contract.untrusted import parse_object

_METADATA = re.compile(r"(?P<name>.+)-(?P<version>[^-]+)\.(?:dist-info|egg-info)\Z")
_SITE = re.compile(r"(lib/python[^/]+/site-packages)(?:/|\Z)")

# PEP 3147 and PEP 488: name.cpython-311.pyc, name.cpython-311.opt-1.pyc; a module's own name may hold dots.
_COMPILED = re.compile(
    r"(?P<folder>(?:.*/)?)__pycache__/(?P<name>[^/]+?)\.[A-Za-z]+-?\d+(?:\.opt-\w+)?\.pyc\Z", re.DOTALL
)


@dataclass(frozen=True)
class Owners:
    """Packages, the owner of each path that a package lists, and the placeholder lengths of binaries from conda."""

    packages: tuple[Package, ...] = ()
    by_path: Mapping[str, str] = field(default_factory=dict)
    rooms: Mapping[str, int] = field(default_factory=dict)

    def owner(self, path: str) -> str:
        """The package that ``path`` belongs to, or a folder (ending in a slash) for a file without a package."""
        if known := self.by_path.get(path):
            return known
        source = source_of(path)
        return self.by_path.get(source) or _folder_of(source)


def find_owners(prefix: Path, paths: Iterable[str], *, editable: Iterable[str] = ()) -> Owners:
    """Read ``conda-meta`` and every ``RECORD``.

    Args:
        prefix: the environment.
        paths: every path in it.
        editable: the dist-info folders of editable installs.
    """
    by_path: dict[str, str] = {}
    rooms: dict[str, int] = {}
    packages: dict[tuple[str, str], Package] = {}
    editables = set(editable)
    records = []
    for path in paths:
        if path.startswith("conda-meta/") and path.endswith(".json"):
            for package, files, found in read_conda_package(prefix / path):
                packages[package.name, "conda"] = package
                by_path |= dict.fromkeys([path, *files], package.name)
                rooms |= found
        elif path.endswith((".dist-info/METADATA", ".egg-info/PKG-INFO")):
            records.append(posixpath.dirname(path))
    for folder in records:
        match = _METADATA.match(posixpath.basename(folder))
        owned_by_conda = folder + "/METADATA" in by_path or folder + "/PKG-INFO" in by_path
        if match is None or owned_by_conda or not _SITE.match(folder):
            continue
        name = normalized(match["name"])
        kind = "editable" if folder in editables else "pypi"
        packages[name, "pypi"] = Package(name, match["version"], kind)  # type: ignore[arg-type] # one of two literals
        for path in _record(prefix, folder):
            by_path.setdefault(path, name)
    return Owners(tuple(packages[key] for key in sorted(packages)), by_path, rooms)


def normalized(name: str) -> str:
    """A distribution's name as PyPI compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def site_packages(paths: Iterable[str]) -> tuple[str, ...]:
    """The ``site-packages`` folders of an environment."""
    return tuple(sorted({match[1] for path in paths if (match := _SITE.match(path))}))


def read_conda_package(path: Path) -> Iterator[tuple[Package, list[str], dict[str, int]]]:
    """The package of a ``conda-meta`` file, its files, and the placeholder lengths of its binaries."""
    try:
        data = parse_object(path.read_bytes(), limit=PACKAGE_FILE)
        package = Package(str(data["name"]), str(data["version"]), "conda")
        listed = [str(file) for file in data.get("files", [])]
        rooms = {
            str(one["_path"]): len(os.fsencode(str(one["prefix_placeholder"])))
            for one in (data.get("paths_data") or {}).get("paths", [])
            if one.get("file_mode") == "binary" and one.get("prefix_placeholder")
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # not a package, or one that conda cannot read either: its files are grouped by folder
    yield package, listed, rooms


def _record(prefix: Path, folder: str) -> Iterator[str]:
    """The paths that a dist-info folder's RECORD lists, and those of the folder itself."""
    site = posixpath.dirname(folder)
    for name in ("RECORD", "METADATA", "direct_url.json", "INSTALLER", "PKG-INFO"):
        yield f"{folder}/{name}"
    try:
        text = (prefix / folder / "RECORD").read_text(encoding="utf-8", errors="surrogateescape")
        if '"' in text:
            names = [row[0] for row in csv.reader(text.splitlines()) if row]
        else:  # nearly always, and several times faster
            names = [line.partition(",")[0] for line in text.splitlines()]
    except (OSError, csv.Error):
        return
    yield from (record_path(name, site, str(prefix)) for name in names if name)


def record_path(name: str, site: str, prefix: str) -> str:
    """A name in a RECORD, as a path relative to the prefix."""
    if name and not name.startswith((".", "/")) and not name.endswith("/") and "/." not in name and "//" not in name:
        return f"{site}/{name}"  # nearly always
    path = posixpath.normpath(posixpath.join(prefix, site, name))
    return path[len(prefix) + 1 :] if path.startswith(prefix + "/") else path


def is_record(path: str) -> bool:
    """Whether a file lists hashes of others: a RECORD, or a package's file in ``conda-meta``."""
    if not path.endswith(("/RECORD", ".json")):
        return False
    folder, name = posixpath.split(path)
    return (name == "RECORD" and folder.endswith(".dist-info")) or (folder == "conda-meta" and name.endswith(".json"))


def source_of(path: str) -> str:
    """The .py file that a .pyc file was compiled from; the path itself for any other file."""
    if not path.endswith(".pyc"):
        return path
    match = _COMPILED.match(path)
    return f"{match[1]}{match[2]}.py" if match else path[:-1]


def _folder_of(path: str) -> str:
    """The folder of a file without a package: a package folder, checkout, top folder, or ``/`` at the top."""
    parts = path.split("/")
    depth = 4 if _SITE.match(path) else 2 if parts[0] in ("src", "lib") else 1
    return "/".join(parts[:-1][:depth]) + "/"
