"""``--retry-failed``: which nodes a command has left undone, kept from one command to the next.

It is kept beside the inventory, as the pinned host keys are, in ``.clusterctl-failed.json``: a JSON object that maps
the inventory's file name to the commands, and each command to names of nodes. The file is there only while there is
something in it. A folder that cannot be written to keeps nothing, and no command fails for that.
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
    """Those of ``nodes`` that were left undone when ``command`` was last at work on them."""
    names = set(_load(inventory.path).get(inventory.path.name, {}).get(command, ()))
    return tuple(node for node in nodes if node.name in names)


@contextmanager
def remembered(inventory: Inventory, command: str, nodes: Sequence[Node], *, dry_run: bool = False) -> Iterator[None]:
    """Do the work of ``command`` within this, so that a later one knows which nodes it has left undone.

    An error that stopped it before it was done anywhere, and Ctrl-C, leave all of ``nodes`` undone; one that says
    nothing about nodes (a wrong argument, a damaged bundle) leaves what is kept as it is, and so does a dry run. Nodes
    that are not among ``nodes`` stay what they were.
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
    """The names of those nodes that are not done when a command has ended with ``error``."""
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
    """What is kept; nothing where there is no such file, or one that is not ours."""
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
