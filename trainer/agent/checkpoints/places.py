"""Finds the checkpoints below an output folder: folders by the files in them, and single files.

They are in the output folder itself or in folders below it, such as ``checkpoints/`` (accelerate) and
``lightning_logs/version_0/checkpoints/`` (Lightning). A folder in a checkpoint belongs to it. Links are not followed:
a link to a checkpoint beside it is a *pointer* to it, like DeepSpeed's text file ``latest``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

from ..link.copies import TEMPORARY
from .layouts import is_checkpoint
from .names import KEPT, LARGE, is_single

LATEST = "latest"
DEEP = 4  # folders from the output folder to a checkpoint
ENTRIES = 50_000  # files and folders that are examined
POINTERS = 16
TAG = 4096  # bytes of a pointer


class Seen(NamedTuple):
    """A checkpoint. ``name`` is its path below the output folder. ``single``: it is one file."""

    name: str
    single: bool


class Pointer(NamedTuple):
    """A file or link that names a checkpoint in its folder. ``link``: it is a link."""

    name: str
    tag: str
    link: bool


class Found(NamedTuple):
    """Everything below an output folder.

    Attributes:
        checkpoints: in the order of their names.
        parts: single files beside them that are no whole checkpoint, such as ``optimizer.pt``.
        pointers: by path, what names a checkpoint.
        kept: the highest number of a folder ``kept-N``; 0 without one.
    """

    checkpoints: Tuple[Seen, ...] = ()
    parts: Tuple[str, ...] = ()
    pointers: Tuple[Pointer, ...] = ()
    kept: int = 0


def text_of(path: Path) -> str:
    """The start of a text file, without white space around it; "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(TAG).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def find(output: Path) -> Found:
    """Find the checkpoints of this node. Without a folder there are none."""
    search = _Search(output)
    search.folder("", 0)
    return Found(tuple(search.checkpoints), tuple(search.parts), tuple(search.pointers[:POINTERS]), search.kept)


class _Search:
    def __init__(self, output: Path) -> None:
        self._output = output
        self._left = ENTRIES
        self.checkpoints: List[Seen] = []
        self.parts: List[str] = []
        self.pointers: List[Pointer] = []
        self.kept = 0

    def _entries(self, below: str) -> Optional[Dict[str, "os.DirEntry[str]"]]:
        """The entries of a folder by name, sorted; None if it cannot be read or too much was examined."""
        found: Dict[str, os.DirEntry[str]] = {}
        try:
            with os.scandir(self._output / below) as entries:
                for entry in entries:
                    self._left -= 1
                    if self._left < 0:
                        return None
                    if not entry.name.startswith(TEMPORARY):
                        found[entry.name] = entry
        except OSError:
            return None
        return dict(sorted(found.items()))

    def folder(self, below: str, depth: int, known: Optional[Dict[str, "os.DirEntry[str]"]] = None) -> None:
        """Find the checkpoints in a folder, which is no checkpoint itself."""
        entries = self._entries(below) if known is None else known
        for name, entry in (entries or {}).items():
            path = below + name
            if entry.is_symlink():
                tag = os.readlink(entry.path).rstrip("/")
                if tag in (entries or {}):
                    self.pointers.append(Pointer(path, tag, link=True))
            elif entry.is_dir(follow_symlinks=False):
                kept = KEPT.match(name) if not below else None
                if kept:
                    self.kept = max(self.kept, int(kept.group(1)))
                elif depth < DEEP and not name.startswith("."):
                    self._inside(path, depth)
            elif entry.is_file(follow_symlinks=False):
                if name == LATEST:
                    self.pointers.append(Pointer(path, text_of(Path(entry.path)), link=False))
                elif is_single(name):
                    self.checkpoints.append(Seen(path, single=True))
                elif name.endswith(LARGE):
                    self.parts.append(path)

    def _inside(self, path: str, depth: int) -> None:
        entries = self._entries(path)
        if entries is None:
            return
        folders = {name for name, entry in entries.items() if entry.is_dir(follow_symlinks=False)}
        if is_checkpoint(path, set(entries) - folders, folders):
            self.checkpoints.append(Seen(path, single=False))
        else:
            self.folder(path + "/", depth + 1, entries)
