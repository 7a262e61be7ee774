"""Ansible's ``group_vars/`` and ``host_vars/`` beside an inventory: which files are there, and whose they are.

Ansible's own rule (its ``DataLoader.find_vars_files``): of a name's candidates the first counts, in the order without a
suffix, ``.yml``, ``.yaml``, ``.json``. A folder stands for all files in and below it, in the order of their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_BYTES = 4 << 20  # of an inventory, and of all files beside it
MAX_FILES = 5000
_SUFFIXES = ("", ".yml", ".yaml", ".json")
_FOLDERS: dict[str, Literal["group", "host"]] = {"group_vars": "group", "host_vars": "host"}


@dataclass(frozen=True)
class VarsFile:
    """A file with variables of a group or a host.

    Attributes:
        kind: whose variables they are.
        owner: the group's or the host's name.
        name: the file's, relative to the inventory's folder.
        text: what is in it; None where it is not read.
        why: why it is not read.
    """

    kind: Literal["group", "host"]
    owner: str
    name: str
    text: str | None = None
    why: str = ""


def vars_files(inventory: Path) -> tuple[VarsFile, ...]:
    """The files beside an inventory, in the order in which a later one counts before an earlier one."""
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
    """The file, or those of a folder."""
    if not path.is_dir():
        yield path
    elif levels:
        for each in _listed(path):
            if (each.is_dir() and not each.suffix) or (not each.is_dir() and each.suffix in _SUFFIXES):
                yield from _below(each, levels=levels - 1)


def _listed(folder: Path) -> list[Path]:
    """What is in a folder but hidden files and copies of editors, sorted; nothing where it cannot be read."""
    try:
        return sorted(each for each in folder.iterdir() if not each.name.startswith(".") and each.name[-1] != "~")
    except OSError:
        return []
