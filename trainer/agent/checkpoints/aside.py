"""Moves checkpoints that cannot be used into ``kept-N`` in the output folder, so that nothing writes over them.

Each one moves in a single rename, with its path: ``out/checkpoint-30`` becomes ``out/kept-1/checkpoint-30``. The folder
is in the output folder because a rename does not leave a file system. Nodes that share the folder move each name once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Mapping, Sequence

from ..link.copies import parts_of


class AsideError(OSError):
    """A checkpoint could not be moved, so the training must not start. The text names the command to type."""


def folder_of(number: int) -> str:
    """The name of the folder."""
    return "kept-%d" % number


def move(output: Path, number: int, names: Sequence[str], pointers: Mapping[str, str]) -> int:
    """Move what this node has of ``names``, and write the text ``pointers``. Returns how many were moved.

    Raises:
        AsideError: a name cannot be moved.
        CopyError: a name leads out of the folder.
    """
    kept = output / folder_of(number)
    moved = 0
    for name in names:
        parts = parts_of(name)
        source, target = output.joinpath(*parts), kept.joinpath(*parts)
        try:
            if _through_link(output, parts[:-1]) or not os.path.lexists(source):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)
            moved += 1
        except FileNotFoundError:
            continue  # another node moved it: they share the folder
        except OSError as error:
            if isinstance(error, PermissionError) and source.is_dir() and not os.access(str(source), os.W_OK):
                continue  # another user's: the program cannot write over it either
            raise AsideError(
                "%s cannot be used, and could not be moved aside (%s); move it elsewhere, then resume: mv %s DIR"
                % (source, error.strerror, source)
            ) from error
    for name, tag in pointers.items():
        _point(output.joinpath(*parts_of(name)), tag)
    return moved


def _through_link(output: Path, parts: Sequence[str]) -> bool:
    """Whether a folder on the way is a link: what is behind it is not in the output folder."""
    return any(output.joinpath(*parts[: count + 1]).is_symlink() for count in range(len(parts)))


def _point(path: Path, tag: str) -> None:
    """Let a text file name another checkpoint."""
    temporary = path.with_name("%s.%d" % (path.name, os.getpid()))
    try:
        temporary.write_text(tag, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise AsideError("%s could not be written: %s" % (path, error.strerror)) from error
