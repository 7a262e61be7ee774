"""``clusterctl init``: the first contact with the nodes of an inventory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from provision.errors import NodesFailedError
from provision.ssh.enrol import Enrolled, enrol
from provision.ssh.enrol import new_inventory as write_inventory
from provision.tasks.answers import hint, reason

if TYPE_CHECKING:
    from provision.model import Emit, Inventory
    from provision.ssh.prompts import Prompts

__all__ = ["init", "write_inventory"]


def init(inventory: Inventory, *, prompts: Prompts | None = None, emit: Emit) -> dict[str, str]:
    """Pin every node's host key, and install an ssh key where only a password works.

    Returns:
        What was done for each node.

    Raises:
        NodesFailedError: some nodes could not be enrolled, the others are done.
    """
    results = enrol(inventory, inventory.nodes, prompts=prompts, emit=emit)
    failed = {
        node.name: reason(answer, inventory, node)
        for node in inventory.nodes
        if not isinstance(answer := results[node.name], Enrolled)
    }
    if failed:
        alone = "run it on a terminal: there it can ask about host keys and for a password"
        raise NodesFailedError(
            f"{len(failed)} of {len(inventory.nodes)} nodes could not be enrolled",
            reasons=failed,
            hint=hint(results.values(), "then again: clusterctl init") if prompts else alone,
        )
    return {name: answer.state for name, answer in results.items() if isinstance(answer, Enrolled)}
