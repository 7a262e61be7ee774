"""The distributions that clusterctl needs, as installed in the running Python."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from provision.env.source.environment import normalized
from provision.errors import UsageError

_HINT = "python3 -m venv FOLDER && FOLDER/bin/pip install clusterctl; then FOLDER/bin/clusterctl pack-tool"
_NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^\]]*)\])?")  # PEP 508: a name and its extras
_EXTRA = re.compile(r"\bextra\s*==\s*[\"']([^\"']+)")
_NOT_NEEDED = frozenset({"setuptools"})  # conda-pack requires it for its archives on Windows
_NOT_CARRIED = frozenset({"__pycache__"})  # compiled again, without times


def required(name: str) -> tuple[Distribution, ...]:
    """The direct and indirect requirements of ``name``, by name; without itself and without extras.

    setuptools is omitted. A requirement with a marker is included if it is installed: otherwise its marker is false.

    Raises:
        UsageError: ``name`` or a requirement is not installed.
    """
    found: dict[str, Distribution] = {}
    todo: deque[tuple[str, frozenset[str]]] = deque([(name, frozenset())])
    seen = set(todo)
    while todo:
        wanted, extras = todo.popleft()
        package = found.get(wanted) or find_distribution(wanted)
        found[wanted] = package
        for text in package.requires or ():
            requirement, _, marker = text.partition(";")
            if (extra := _EXTRA.search(marker)) and extra[1] not in extras:
                continue
            match = _NAME.match(requirement)
            assert match is not None, text
            extra_names = (each.strip() for each in (match[2] or "").split(","))
            item = (normalized(match[1]), frozenset(filter(None, extra_names)))
            if item in seen or item[0] in _NOT_NEEDED or (marker and not is_installed(item[0])):
                continue
            seen.add(item)
            todo.append(item)
    del found[name]
    return tuple(found[each] for each in sorted(found))


def find_distribution(name: str) -> Distribution:
    """A distribution of the running Python.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return distribution(name)
    except PackageNotFoundError as error:
        raise UsageError(
            f"{name}, which clusterctl needs, is not installed in the Python that runs clusterctl",
            hint=_HINT,
        ) from error


def is_installed(name: str) -> bool:
    """Whether the running Python has a distribution of that name."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def files(package: Distribution) -> Iterator[tuple[str, Path]]:
    """The files of a distribution that Python imports or reads: the name below site-packages, and the path.

    Files elsewhere (``bin``, ``etc``) and compiled files are omitted.

    Raises:
        UsageError: it is an editable install, or has no list of its files.
    """
    name = package.metadata["Name"]
    if _is_editable(package):
        raise UsageError(f"{name} is an editable install and cannot be packed", hint=f"pip install {name}")
    folder = Path(str(package.locate_file("")))
    names = [str(each) for each in package.files or ()]
    if not (package.read_text("RECORD") or package.read_text("installed-files.txt")):
        names = _by_top_level(package, folder)  # a Linux distribution's package
    if not names:
        raise UsageError(
            f"{name}, which clusterctl needs, has no list of its files in {folder}",
            hint=_HINT,
        )
    for each in names:
        path = folder / each
        parts = Path(each).parts
        if (
            ".." in parts
            or Path(each).is_absolute()
            or path.suffix == ".pyc"
            or _NOT_CARRIED & set(parts)
            or not path.is_file()
        ):
            continue
        yield each, path


def _by_top_level(package: Distribution, folder: Path) -> list[str]:
    names = (package.read_text("top_level.txt") or "").split()
    label = re.escape(normalized(package.metadata["Name"])).replace(r"\-", "[-_.]+")
    infos = [path for path in folder.iterdir() if re.fullmatch(rf"(?i){label}-.*\.(egg|dist)-info", path.name)]
    tops = [folder / name for name in names]
    tops += [path for name in names for path in folder.glob(f"{name}.*") if path.suffix in {".py", ".so"}]
    found = [path for top in (*tops, *infos) for path in ([top] if top.is_file() else top.rglob("*"))]
    return sorted({path.relative_to(folder).as_posix() for path in found}) if names else []


def _is_editable(package: Distribution) -> bool:
    text = package.read_text("direct_url.json")
    return bool(text and json.loads(text).get("dir_info", {}).get("editable"))
