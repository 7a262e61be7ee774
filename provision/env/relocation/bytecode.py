"""Compiled files: which do not fit their sources any more, and which sources have none."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Container

from provision.env.bundle.manifest import Manifest
from provision.env.source.owners import source_of

_VERSION = re.compile(r"(\d+)\.(\d+)")


def stale(manifest: Manifest, rewritten: Container[str]) -> frozenset[str]:
    """Compiled files whose source is among ``rewritten``."""
    return frozenset(
        entry.path for entry in manifest.files if entry.path.endswith(".pyc") and source_of(entry.path) in rewritten
    )


def uncompiled(manifest: Manifest, stale: Container[str]) -> dict[str, str]:
    """Modules of the environment that Python would compile at every start, since nothing can be written beside them.

    Args:
        manifest: of the bundle.
        stale: compiled files that are not unpacked.

    Returns:
        The ``.py`` files of the standard library, ``site-packages`` and checkouts that have no compiled file for the
        environment's Python, each with the path of the one that it lacks.
    """
    version = _VERSION.match(manifest.python)
    if version is None:
        return {}
    tops = (f"lib/python{version[1]}.{version[2]}/", *(f"{target}/" for _, target in manifest.relocations if target))
    tag = f"cpython-{version[1]}{version[2]}"
    sources = [entry.path for entry in manifest.files if entry.path.endswith(".py") and entry.path.startswith(tops)]
    compiled = {entry.path for entry in manifest.files if entry.path.endswith(".pyc") and entry.path not in stale}
    # compileall reads a path on each line, without the space around it
    lacking = {path: _cached(path, tag) for path in sources if path.splitlines() == [path.strip()]}
    return {path: cached for path, cached in lacking.items() if cached not in compiled}


def _cached(path: str, tag: str) -> str:
    folder, name = posixpath.split(path)
    return f"{folder}/__pycache__/{name.removesuffix('.py')}.{tag}.pyc"
