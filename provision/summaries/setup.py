"""After what prepares a cluster: ``init`` and ``sandbox``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from provision.inventory import fold
from provision.output_text import fold_equal
from provision.summaries._summary import Summary

if TYPE_CHECKING:
    from provision.sandbox import Sandbox
    from provision.tasks.init import Created


def enrolled(states: Mapping[str, str]) -> Summary:
    """After ``init``."""
    text = "\n".join(f"{names}: {state}" for state, names in fold_equal(states).items())
    return {"nodes": dict(states)}, text


def created(result: Created) -> Summary:
    """After ``init`` has written an inventory: what was done on the nodes, and the file."""
    data, text = enrolled(result.states)
    text = f"{text}\nwrote {result.path}:\n" + "\n".join(f"  {line}" for line in result.text.splitlines())
    return {**data, "inventory": str(result.path), "text": result.text}, text


def sandbox_up(box: Sandbox) -> Summary:
    """After ``sandbox up``."""
    data = _sandbox(box)
    return data, f"{fold(data['nodes'])} are up; inventory.yaml, known_hosts and id_ed25519 are in {box.directory}"


def sandboxes(boxes: Sequence[Sandbox]) -> Summary:
    """After ``sandbox list``."""
    lines = [f"{box.name}: {fold(_sandbox(box)['nodes'])}, {box.status}, {box.directory}" for box in boxes]
    return {"sandboxes": [_sandbox(box) for box in boxes]}, "\n".join(lines) or "no sandbox on this machine"


def _sandbox(box: Sandbox) -> dict[str, Any]:
    return {
        "name": box.name,
        "state": box.status,
        "directory": str(box.directory),
        "nodes": {node.name: node.address for node in box.nodes},
    }
