"""``--retry-failed``: remembers which nodes a command did not finish.

The file ``.clusterctl-failed.json`` is beside the inventory, like the pinned host keys: a JSON object that maps the
inventory's file name to commands, and each command to names of nodes. An empty file is deleted. If the folder cannot
be written, nothing is remembered, and no command fails for that.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from provision.errors import InterruptedByUser, NodesError, NodesFailedError

if TYPE_CHECKING:
    from provision.model import Inventory, Node

FILE = ".clusterctl-failed.json"

_Kept = dict[str, dict[str, list[str]]]


def last_failed(inventory: Inventory, command: str, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes that the last ``command`` did not finish."""
    names = set(_load(inventory.path).get(inventory.path.name, {}).get(command, ()))
    return tuple(node for node in nodes if node.name in names)


@contextmanager
def remembered(inventory: Inventory, command: str, nodes: Sequence[Node], *, dry_run: bool = False) -> Iterator[None]:
    """Run ``command`` within this, so that ``--retry-failed`` knows which nodes it did not finish.

    An error before any node was finished, and Ctrl-C, leave all of ``nodes`` unfinished. An error that is not about
    nodes (a wrong argument, a damaged bundle) changes nothing in the file, and neither does a dry run. Other nodes
    stay as they were.
    """
    try:
        yield
    except (NodesError, InterruptedByUser, KeyboardInterrupt) as error:
        if not dry_run:
            _keep(inventory, command, nodes, undone(error, nodes))
        raise
    if not dry_run:
        _keep(inventory, command, nodes, ())


def undone(error: BaseException, nodes: Sequence[Node]) -> tuple[str, ...]:
    """The names of the nodes that are not finished after a command ended with ``error``."""
    if isinstance(error, NodesFailedError) and not error.nothing_done:
        return tuple(node.name for node in nodes if node.name in error.reasons)
    return tuple(node.name for node in nodes)


def _keep(inventory: Inventory, command: str, nodes: Sequence[Node], failed: Sequence[str]) -> None:
    path = inventory.path
    kept = _load(path)
    before = json.dumps(kept)
    commands = kept.pop(path.name, {})
    others = {node.name for node in inventory.nodes} - {node.name for node in nodes}
    names = sorted({*others.intersection(commands.get(command, ())), *failed})
    commands = {key: value for key, value in {**commands, command: names}.items() if value}
    if commands:
        kept[path.name] = commands
    if json.dumps(kept) == before:
        return
    with suppress(OSError):
        if kept:
            _write(path.with_name(FILE), kept)
        else:
            path.with_name(FILE).unlink(missing_ok=True)


def _write(path: Path, kept: Mapping[str, object]) -> None:
    handle, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(kept, file, indent=1)
            file.write("\n")
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise


def _load(inventory: Path) -> _Kept:
    """The file's content; empty if the file does not exist or is not clusterctl's."""
    try:
        data = json.loads(inventory.with_name(FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(data, dict):
        return {}
    return {
        str(file): {
            str(key): [str(name) for name in names] for key, names in commands.items() if isinstance(names, list)
        }
        for file, commands in data.items()
        if isinstance(commands, dict)
    }
