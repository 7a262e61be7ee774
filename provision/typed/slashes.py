r"""Paths with backslashes, as Windows has them: ``configs\x.yaml`` becomes ``configs/x.yaml`` if that exists."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from provision.inventory.document import shown


def to_slashes(words: Sequence[str], *, always: bool = False) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words with slashes in their paths, and a notice for each that changed.

    Args:
        words: a command. An option's value may follow ``=``.
        always: also paths that do not exist here, such as a folder for results: the words are from a batch file.
    """
    changed: list[str] = []
    found = []
    for word in words:
        name, has, value = word.partition("=") if word.startswith("-") else ("", "", word)
        path = value.replace("\\", "/")
        if "\\" in value and (always or (not _exists(value) and _exists(path))):
            changed.append(f"{shown(value)}: replaced by {shown(path)}")
            found.append(name + has + path)
        else:
            found.append(word)
    return tuple(found), tuple(dict.fromkeys(changed))


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False
