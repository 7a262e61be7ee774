"""``--retry-failed``: remembers the nodes that a command did not finish.

The file ``.clusterctl-failed.json`` is next to the inventory, like the pinned host keys: a JSON object that maps the
inventory's file name to commands, and each command to names of nodes. An empty file is deleted. If the folder is not
writable, nothing is remembered, and the command does not fail.
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

_Failures = dict[str, dict[str, list[str]]]


def last_failed(inventory: Inventory, command: str, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes that the last ``command`` did not finish."""
    names = set(_load(inventory.path).get(inventory.path.name, {}).get(command, ()))
    return tuple(node for node in nodes if node.name in names)


@contextmanager
def remember_failed(
    inventory: Inventory, command: str, nodes: Sequence[Node], *, dry_run: bool = False
) -> Iterator[None]:
    """Remember the nodes that the command in this block does not finish.

    After Ctrl-C, or an error before any node was finished, these are all of ``nodes``. An error that is not about nodes
    (a wrong argument, a damaged bundle) does not change the file, and neither does a dry run. The entries of other
    nodes stay.
    """
    try:
        yield
    except (NodesError, InterruptedByUser, KeyboardInterrupt) as error:
        if not dry_run:
            _update(inventory, command, nodes, unfinished(error, nodes))
        raise
    if not dry_run:
        _update(inventory, command, nodes, ())


def unfinished(error: BaseException, nodes: Sequence[Node]) -> tuple[str, ...]:
    """The names of the nodes that are not finished after a command ended with ``error``."""
    if isinstance(error, NodesFailedError) and not error.nothing_done:
        return tuple(node.name for node in nodes if node.name in error.reasons)
    return tuple(node.name for node in nodes)


def _update(inventory: Inventory, command: str, nodes: Sequence[Node], failed: Sequence[str]) -> None:
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


def _load(inventory: Path) -> _Failures:
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
