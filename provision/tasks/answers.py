"""What nodes answered, sorted: who did not answer at all, on whom a step failed, and the sentences about it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from provision.errors import ClusterctlError, NodesFailedError, Reason, within
from provision.hints import again
from provision.inventory import fold, likely_typo
from provision.model import Inventory, Node, Result
from provision.script import parse
from provision.ssh.wire import RemoteError

Answer = TypeVar("Answer")


def split(
    inventory: Inventory,
    nodes: Sequence[Node],
    answers: Mapping[str, Answer | ClusterctlError],
    *,
    command: str,
    also: Mapping[str, str] | None = None,
    nothing: str = "nothing was changed",
) -> dict[str, Answer]:
    """The answers of all nodes, when all gave one; else one error, with what is ``also`` wrong on nodes that did.

    Raises:
        NodesFailedError: some did not; the error names each with its reason, and how to go on without them.
    """
    missing = {
        node.name: reason(answer, inventory, node)
        for node in nodes
        if isinstance(answer := answers[node.name], ClusterctlError)
    }
    if missing:
        raise NodesFailedError(
            f"no answer from {len(missing)} of {len(nodes)} nodes; {nothing}",
            reasons=missing | dict(also or {}),
            hint=hint(answers.values(), without(inventory, missing, len(nodes), command)),
            nothing_done=True,
        )
    return {name: answer for name, answer in answers.items() if not isinstance(answer, ClusterctlError)}


def failures(
    inventory: Inventory,
    nodes: Sequence[Node],
    answers: Mapping[str, Result | ClusterctlError],
    tokens: Mapping[str, str],
) -> dict[str, str]:
    """The nodes on which a compiled script failed, each with its reason."""
    failed = {}
    for node in nodes:
        answer = answers[node.name]
        if isinstance(answer, ClusterctlError):
            failed[node.name] = reason(answer, inventory, node)
            continue
        broken = next((step for step in parse(tokens[node.name], answer.out) if step.state == "failed"), None)
        if broken is not None:
            failed[node.name] = f"{broken.name}: {broken.detail.strip() or 'failed without a message'}"
        elif answer.rc != 0:
            failed[node.name] = answer.err.strip() or f"the script ended with status {answer.rc}"
    return failed


def reason(error: ClusterctlError, inventory: Inventory, node: Node) -> str:
    """One sentence for a node's failure, with the likely typo in its address when there is one."""
    why = (
        error.reason if isinstance(error, RemoteError) else Reason.about(str(error), node.name, node.address, node.port)
    )
    typo = likely_typo(inventory, node)
    return within(f"{{}} ({typo})", why) if typo else why


def without(inventory: Inventory, silent: Collection[str], asked: int, command: str, *flags: str) -> str:
    """How to continue without nodes that did not answer; what to look at where none did.

    Args:
        inventory: the cluster, with the command that was typed.
        silent: the nodes that did not answer.
        asked: how many nodes were asked.
        command: the command's name, for where no command line was parsed.
        flags: options to add.
    """
    if len(silent) == asked:
        return "none answered: look at their address, user and key in the inventory, then: clusterctl check"
    return "to go on without: " + again(
        inventory.typed, inventory.typed.command or command, *flags, exclude=fold(silent)
    )


def hint(answers: Iterable[object], last: str) -> str:
    """The next step after nodes that did not answer: what their errors say, and ``last``."""
    hints = dict.fromkeys(answer.hint for answer in answers if isinstance(answer, RemoteError) and answer.hint)
    return "; ".join([*hints, last])
