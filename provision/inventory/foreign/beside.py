"""Finds Ansible's ``group_vars/`` and ``host_vars/`` files next to an inventory, and their owners.

Follows Ansible's ``DataLoader.find_vars_files``: the first existing candidate of a name counts, in the order no suffix,
``.yml``, ``.yaml``, ``.json``. A folder means all files in and below it, in the order of their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_BYTES = 4 << 20  # of an inventory, and of all variable files next to it
MAX_FILES = 5000
_SUFFIXES = ("", ".yml", ".yaml", ".json")
_FOLDERS: dict[str, Literal["group", "host"]] = {"group_vars": "group", "host_vars": "host"}


@dataclass(frozen=True)
class VarsFile:
    """A file of variables of a group or a host.

    Attributes:
        kind: of the owner.
        owner: the name of the group or host.
        name: the file's path, relative to the inventory's folder.
        text: the content; None if the file is not read.
        why: the reason why the file is not read.
    """

    kind: Literal["group", "host"]
    owner: str
    name: str
    text: str | None = None
    why: str = ""


def vars_files(inventory: Path) -> tuple[VarsFile, ...]:
    """The variable files next to an inventory; a later file overrides an earlier one."""
    return tuple(_limited(inventory.parent, _all(inventory.parent)))


def _all(folder: Path) -> Iterator[tuple[Literal["group", "host"], str, Path, str]]:
    for name, kind in _FOLDERS.items():
        owners: dict[str, list[Path]] = {}
        for path in _listed(folder / name):
            owners.setdefault(path.name.removesuffix(_suffix(path)), []).append(path)
        for owner, paths in owners.items():
            first, *others = sorted(paths, key=lambda path: _SUFFIXES.index(_suffix(path)))
            for path in _below(first):
                yield kind, owner, path, ""
            for path in others:
                yield kind, owner, path, f"Ansible reads {first.relative_to(folder)} in its place"


def _limited(folder: Path, found: Iterator[tuple[Literal["group", "host"], str, Path, str]]) -> Iterator[VarsFile]:
    left = MAX_BYTES
    for number, (kind, owner, path, reason) in enumerate(found):
        name = str(path.relative_to(folder))
        if reason or number >= MAX_FILES:
            yield VarsFile(kind, owner, name, why=reason or f"there are more than {MAX_FILES:,} files")
            continue
        try:
            if not path.is_file():
                raise OSError(0, "it is not a file")  # noqa: TRY301
            with path.open("rb") as file:
                raw = file.read(left + 1)
            text = raw.decode("utf-8-sig")
        except (OSError, ValueError) as error:
            why = (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8"
            yield VarsFile(kind, owner, name, why=why)
            continue
        if len(raw) > left:
            yield VarsFile(kind, owner, name, why=f"the files have more than {MAX_BYTES >> 20} MiB")
            continue
        left -= len(raw)
        if text.startswith("$ANSIBLE_VAULT"):
            yield VarsFile(kind, owner, name, why="it is encrypted with Ansible Vault")
        else:
            yield VarsFile(kind, owner, name, text)


def _suffix(path: Path) -> str:
    return path.suffix if path.suffix in _SUFFIXES else ""


def _below(path: Path, *, levels: int = 10) -> Iterator[Path]:
    """The file, or the files of a folder."""
    if not path.is_dir():
        yield path
    elif levels:
        for each in _listed(path):
            if (each.is_dir() and not each.suffix) or (not each.is_dir() and each.suffix in _SUFFIXES):
                yield from _below(each, levels=levels - 1)


def _listed(folder: Path) -> list[Path]:
    """A folder's entries, sorted, without hidden files and editors' backups; empty if it cannot be read."""
    try:
        return sorted(each for each in folder.iterdir() if not each.name.startswith(".") and each.name[-1] != "~")
    except OSError:
        return []
