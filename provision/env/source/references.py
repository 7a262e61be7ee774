"""What in an environment names folders by absolute path: the traces that editable installs leave."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from provision.env.bundle.manifest import PACKAGE_FILE
from trainer.untrusted import parse_object

# Python programs that find modules elsewhere: setuptools' finders, hatchling's (by way of ``editables``) and
# scikit-build-core's. Their absolute paths stand in them as plain strings.
_FINDERS = ("__editable__*.py", "_editable_impl_*.py", "_*_editable.py")

# meson-python's finder runs ninja in a build folder whenever the package is imported.
_REBUILDING = "_*_editable_loader.py"


def editable_installs(prefix: Path, sites: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each editable install's dist-info folder (relative to the prefix) and the folder it was installed from."""
    for site in sites:
        for path in sorted((prefix / site).glob("*.dist-info/direct_url.json")):
            if (root := _direct_url(path)) is not None:
                yield f"{site}/{path.parent.name}", root


def named_folders(site: Path) -> Iterator[str]:
    """Folders that ``.pth`` files, egg-links, finders and symlinks of a ``site-packages`` folder name.

    A path that names a file stands for the folder that the file is in.
    """
    for path in sorted((*site.glob("*.pth"), *site.glob("*.egg-link"))):
        lines = _text(path).splitlines()
        for line in lines[:1] if path.suffix == ".egg-link" else lines:
            if line.startswith("/"):
                yield os.path.normpath(line.strip())
    for path in sorted({path for pattern in _FINDERS for path in site.glob(pattern)}):
        yield from map(_folder, _absolute_strings(_text(path)))
    yield from (_folder(target) for target in _linked(site))


def rebuilding(site: Path) -> Iterator[str]:
    """Names of finders that build their package anew when it is imported."""
    return (path.name for path in sorted(site.glob(_REBUILDING)))


def _direct_url(path: Path) -> str | None:
    """The folder that an editable install's ``direct_url.json`` (PEP 610) names; None if it is not editable."""
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


def _linked(site: Path) -> Iterator[str]:
    """Where absolute symlinks at the top of ``site-packages`` lead: ``flit install -s``, or ``ln -s`` by hand."""
    if site.is_dir():
        for path in sorted(site.iterdir()):
            if path.is_symlink() and (target := os.readlink(path)).startswith("/"):  # noqa: PTH115 - a str is wanted
                yield os.path.normpath(target)


def _folder(path: str) -> str:
    return str(Path(path).parent) if Path(path).is_file() else path


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
