"""The runs of a cluster: found on the nodes, by one script each, and chosen by a word."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from provision.errors import ClusterctlError, NodesFailedError, UsageError
from provision.hints import again
from provision.inventory import fold
from provision.model import Inventory, Node
from provision.render import render
from provision.run import record
from provision.run.found import Run, Told, gathered, told
from provision.ssh.remote import Connections, fan_out, reading
from provision.tasks.answers import hint, reason

NEWEST = 100  # runs that a node tells of
_AT_ONCE = 64  # nodes
_LIMIT = 1 << 18  # bytes that are read of a state.json, or of the end of the samples
_DEADLINE = 30.0


@dataclass(frozen=True)
class Runs:
    """What the nodes told.

    Attributes:
        runs: by id, the oldest first.
        unreachable: nodes that did not answer, each with its reason.
        users: by node name, the uid that the inventory logs in as.
    """

    runs: Mapping[str, Run]
    unreachable: Mapping[str, str]
    users: Mapping[str, int | None]


def script(inventory: Inventory, word: str = "") -> str:
    """What a node runs to tell of its newest runs; with a word only of those that have it in their id."""
    return render("run/runs.sh.j2", root=str(inventory.root), word=word, most=NEWEST, limit=_LIMIT)


def find_all(
    inventory: Inventory,
    nodes: Sequence[Node],
    connections: Connections,
    *,
    word: str | None = None,
    need_answers: bool = True,
) -> Runs:
    """Ask the nodes for their runs: one round trip.

    Args:
        inventory: the cluster.
        nodes: those that are asked.
        connections: to them.
        word: only runs with this in their id.
        need_answers: raise where no node answered.

    Raises:
        NodesFailedError: no node answered.
    """
    record.close_all(inventory.path)
    text = script(inventory, word or "")
    names = [node.name for node in inventory.nodes]

    def ask(node: Node) -> Told:
        out = connections[node].run(text, deadline=_DEADLINE).out
        with reading(node):
            return told(node.name, out, names)

    answers = fan_out(nodes, ask, limit=_AT_ONCE)
    there = {name: answer for name, answer in answers.items() if isinstance(answer, Told)}
    unreachable = {
        node.name: reason(answer, inventory, node)
        for node in nodes
        if isinstance(answer := answers[node.name], ClusterctlError)
    }
    if need_answers and not there:
        raise NodesFailedError(
            f"no answer from {'any of ' if len(nodes) > 1 else ''}{fold(unreachable)}",
            reasons=unreachable,
            hint=hint(answers.values(), "are these nodes up? clusterctl status"),
            nothing_done=True,
        )
    return Runs(gathered(there.values()), unreachable, {name: answer.uid for name, answer in there.items()})


def find(
    inventory: Inventory,
    nodes: Sequence[Node],
    connections: Connections,
    word: str | None,
    *,
    live_first: bool = False,
    ask: Callable[[Sequence[Run]], Run] | None = None,
) -> tuple[Run, Runs]:
    """The run that a word means; see ``run.record.choose``. None is the newest.

    Args:
        inventory: the cluster.
        nodes: those that are asked.
        connections: to them.
        word: an id, a part of one, or None.
        live_first: of the runs that the word fits, the only running one; without a word the newest where none runs.
        ask: chooses among running runs where no word was given; None without a terminal.

    Raises:
        UsageError: no run is meant, or several are; the error lists them.
        NodesFailedError: no node answered.
    """
    found = find_all(inventory, nodes, connections, word=word)
    if word is not None and not found.runs:
        found = find_all(inventory, nodes, connections)  # to say which there are
    live = [run for run in found.runs.values() if run.live and (word is None or word in run.id)] if live_first else []
    if word is None and live and ask is not None:
        return ask(live), found
    if word is None and len(live) > 1:
        listed = ", ".join(f"{run.id} on {fold(run.nodes)}" for run in live)
        each = "; ".join(again(inventory.typed, "stop", words=(run.id,)) for run in live[:4])
        raise UsageError(f"{len(live)} runs are running: {listed}", hint=f"name one: {each}")
    if len(live) == 1 and word not in found.runs:
        return live[0], found
    try:
        return found.runs[record.choose(word, found.runs)], found
    except UsageError as error:
        if not found.unreachable:
            raise
        silent = f"{fold(found.unreachable)} did not answer, and may have others"
        raise UsageError(str(error), hint="; ".join(part for part in (error.hint, silent) if part)) from None


def by_name(inventory: Inventory) -> dict[str, Node]:
    """The inventory's nodes by their names."""
    return {node.name: node for node in inventory.nodes}
