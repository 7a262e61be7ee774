"""Whose the files are that hold the prefix: they lie in no package's chunk."""

from __future__ import annotations

import csv
import posixpath
import re
from collections.abc import Mapping

from provision.env.bundle.manifest import PACKAGE_FILE
from provision.env.source.owners import normalized, record_path
from trainer.untrusted import parse_object

_INFO = re.compile(r"(?P<folder>.*/(?P<name>[^/]+)-[^-/]+\.(?:dist-info|egg-info))/[^/]+\Z", re.DOTALL)


def owners(prefix_files: Mapping[str, bytes], source_prefix: str) -> dict[str, str]:
    """The package of each path, as RECORD files and ``conda-meta`` list them; both are prefix files themselves."""
    found: dict[str, str] = {}
    for path in sorted(prefix_files, key=lambda path: not path.startswith("conda-meta/")):  # conda's word comes first
        if path.startswith("conda-meta/"):
            listed = _conda(path, prefix_files[path])
        elif path.endswith(".dist-info/RECORD") and (match := _INFO.match(path)):
            listed = dict.fromkeys(_record(path, prefix_files[path], source_prefix), normalized(match["name"]))
        else:
            continue
        for one, name in listed.items():
            found.setdefault(one, name)
    return found


def owner(path: str, known: Mapping[str, str]) -> str:
    """The package of a file that holds the prefix; its folder, with a slash at the end, if nothing tells it."""
    if name := known.get(path):
        return name
    match = _INFO.match(path)
    return normalized(match["name"]) if match else posixpath.dirname(path) + "/"


def _conda(path: str, data: bytes) -> dict[str, str]:
    try:
        package = parse_object(data, limit=PACKAGE_FILE)
        return dict.fromkeys([path, *map(str, package["files"])], str(package["name"]))
    except (ValueError, KeyError, TypeError):
        return {}  # the history, or no package's file


def _record(path: str, data: bytes, source_prefix: str) -> list[str]:
    site = posixpath.dirname(posixpath.dirname(path))
    try:
        rows = list(csv.reader(data.decode("utf-8", "surrogateescape").splitlines()))
    except csv.Error:
        return [path]
    return [path, *(record_path(row[0], site, source_prefix) for row in rows if row)]
