"""The source of what runs on the nodes, parts of the package ``trainer``, as it travels."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Traversable


def sources(part: str) -> dict[str, bytes]:
    """The Python files of ``trainer/PART`` by their names, which begin with ``PART/``."""
    return {f"{part}/{name}": data for name, data in _files(importlib.resources.files("trainer") / part)}


def _files(folder: Traversable) -> Iterator[tuple[str, bytes]]:
    for item in folder.iterdir():
        if item.is_dir():
            yield from ((f"{item.name}/{name}", data) for name, data in _files(item))
        elif item.name.endswith(".py"):
            yield item.name, item.read_bytes()
