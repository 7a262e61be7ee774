"""``clusterctl push``: a data set, a model or code goes to every node; what is there already is not sent again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from provision.data import node as place
from provision.data.node import Spot, There
from provision.data.tree import Pushed, Tree, look, plan
from provision.env.report.words import size
from provision.errors import ClusterctlError, NodesFailedError, PreflightError
from provision.inventory import fold
from provision.model import Emit, Inventory, Leg, Node, Notice, StageFinished, StageStarted, Wire
from provision.ssh.remote import Connections, fan_out
from provision.tasks.answers import reason, split
from provision.tasks.hold import guarded, held, lock_of
from provision.transfer import Target, transfer

if TYPE_CHECKING:
    from provision.ssh.prompts import Prompts

_DEADLINE = 3600.0  # looking at, or renaming, a million files


@dataclass(frozen=True)
class PushResult:
    """What a push did. Sizes in bytes; ``states`` maps each node to ``unchanged``, ``pushed`` or what it would do."""

    source: Path
    destination: str
    files: int
    size: int
    states: Mapping[str, str]
    bytes_sent: int = 0
    seconds: float = 0.0
    dry_run: bool = False

    @property
    def changed(self) -> bool:
        """Whether anything was, or would be, done on any node."""
        return any(state != "unchanged" for state in self.states.values())


@dataclass
class _Push:
    """One push: what goes where, and what is known of the nodes."""

    inventory: Inventory
    connections: Connections
    tree: Tree
    spot: Spot
    emit: Emit
    failed: dict[str, str] = field(default_factory=dict)


def push(
    inventory: Inventory,
    nodes: Sequence[Node],
    source: Path,
    destination: str,
    *,
    relay: bool = True,
    dry_run: bool = False,
    prompts: Prompts | None = None,
    emit: Emit,
) -> PushResult:
    """Bring a file or folder to the nodes; it will be known there as ``destination``.

    A file that a node has with the same mode, size and time is not sent. Files that lie there and not here stay.

    Args:
        inventory: the cluster.
        nodes: those of its nodes that are meant.
        source: the file or folder.
        destination: its absolute path on the nodes.
        relay: nodes may pass the bytes on to one another.
        dry_run: only say what would be sent.
        prompts: how to ask for a password or about a host key.
        emit: is told about the progress.

    Raises:
        UsageError: the source cannot be read, or the destination is no place for it.
        BundleError: a file changed while it was read.
        PreflightError: nodes that cannot take it; nothing was changed anywhere.
        NodesFailedError: some nodes failed, the others are done.
    """
    began = time.monotonic()
    spot = Spot.of(inventory, destination)
    tree = look(source)
    for path in tree.skipped:
        emit(Notice(f"{path} is a socket, pipe or device and stays behind", "warning"))
    with Connections(inventory, prompts) as connections:
        work = _Push(inventory, connections, tree, spot, emit)
        there = _compare(work, nodes)
        plans = {name: plan(tree, place.differing(tree, has)) for name, has in there.items()}
        todo = [node for node in nodes if _differs(tree, plans[node.name], there[node.name])]
        _refuse_small(todo, plans, there)
        states = {node.name: "unchanged" for node in nodes}
        sent = 0
        if dry_run or not todo:
            states |= {node.name: f"send {len(plans[node.name].legs)} pieces" for node in todo}
        else:
            with held(inventory, todo, connections, spot.staging) as shared:
                own = [node for node in todo if not shared[node.name]]
                sent = _send(work, own, plans, there, relay=relay)
                _place(work, [node for node in own if node.name not in work.failed], plans)
            states |= {
                node.name: f"shared with {shared[node.name]}" if shared[node.name] else "pushed" for node in todo
            }
    if work.failed:
        raise NodesFailedError(
            f"push failed on {len(work.failed)} of {len(nodes)} nodes",
            reasons=work.failed,
            hint="mend what is named and run the same command again; what has arrived is not sent again",
        )
    files = sum(one.type != "dir" for one in tree.found)
    seconds = time.monotonic() - began
    return PushResult(source, str(spot.destination), files, tree.size, states, sent, seconds, dry_run)


def _differs(tree: Tree, pushed: Pushed, there: There) -> bool:
    return bool(pushed.legs) or place.missing_folders(tree, there)


def _compare(work: _Push, nodes: Sequence[Node]) -> dict[str, There]:
    """What every node has; one error names all that cannot take the rest."""
    began = time.monotonic()
    work.emit(StageStarted("compare", "Comparing with the nodes", len(nodes), "nodes"))
    script = place.compare(work.spot)
    wanted = place.paths(work.tree)

    def ask(node: Node) -> There | str:
        result = work.connections[node].run(script, stdin=[wanted], deadline=_DEADLINE)
        if result.out.startswith("refuse "):
            return result.out.strip().removeprefix("refuse ")
        return place.read_there(result.out)

    answers = fan_out(nodes, ask)
    refused = {name: answer for name, answer in answers.items() if isinstance(answer, str)}
    split(work.inventory, nodes, answers, command="push", also=refused)
    if refused:
        raise PreflightError(
            f"{len(refused)} of {len(nodes)} nodes cannot take {work.spot.destination}; nothing was changed",
            reasons=refused,
        )
    there = {name: answer for name, answer in answers.items() if isinstance(answer, There)}
    states = {
        name: f"{len(place.differing(work.tree, has))} of {len(work.tree.found)} differ" for name, has in there.items()
    }
    work.emit(StageFinished("compare", time.monotonic() - began, states))
    return there


def _refuse_small(nodes: Sequence[Node], plans: Mapping[str, Pushed], there: Mapping[str, There]) -> None:
    small = {
        node.name: f"{size(free)} free, {size(plans[node.name].size)} are needed; free some space"
        for node in nodes
        if (free := there[node.name].free_bytes) is not None and free < plans[node.name].size
    }
    if small:
        raise PreflightError(f"{len(small)} of {len(nodes)} nodes are too full; nothing was changed", reasons=small)


def _send(
    work: _Push, nodes: Sequence[Node], plans: Mapping[str, Pushed], there: Mapping[str, There], *, relay: bool
) -> int:
    """Bring what each node lacks beside its place; nodes that lack the same get it in one transfer."""
    spot = work.spot
    answers = fan_out(nodes, lambda node: work.connections[node].run(place.begin(spot), deadline=_DEADLINE))
    for node in nodes:
        answer = answers[node.name]
        if isinstance(answer, ClusterctlError):
            work.failed[node.name] = reason(answer, work.inventory, node)
        elif answer.rc != 0:
            work.failed[node.name] = " ".join(answer.err.split()) or "could not begin"
    alike: dict[tuple[str, ...], list[Node]] = {}
    for node in nodes:
        if node.name not in work.failed:
            alike.setdefault(tuple(leg.key for leg in plans[node.name].legs), []).append(node)
    sent = 0
    for group in alike.values():
        targets = [
            Target(
                node=node, folder=spot.transfer, into=spot.into, wire="plain", has_ssh="ssh" in there[node.name].tools
            )
            for node in group
        ]
        legs: dict[Wire, tuple[Leg, ...]] = {"plain": plans[group[0].name].legs}
        began = time.monotonic()
        names = [node.name for node in group]
        work.emit(StageStarted("send", f"Sending {spot.destination.name} to {fold(names)}", None, "bytes"))
        result = transfer(work.inventory, targets, work.connections, legs, relay=relay, emit=work.emit)
        sent += result.sent
        received = {name: "failed" if result.errors.get(name) else "received" for name in names}
        work.emit(StageFinished("send", time.monotonic() - began, received))
        for node in group:
            if error := result.errors.get(node.name):
                work.failed[node.name] = reason(error, work.inventory, node)
    return sent


def _place(work: _Push, nodes: Sequence[Node], plans: Mapping[str, Pushed]) -> None:
    """Move what has arrived to its place."""
    began = time.monotonic()
    work.emit(StageStarted("place", "Moving to its place", len(nodes), "nodes"))
    script = guarded(lock_of(work.inventory, work.spot.staging), place.place(work.spot))

    def move(node: Node) -> None:
        result = work.connections[node].run(script, stdin=[place.moves(plans[node.name])], deadline=_DEADLINE)
        if result.rc != 0 or not result.out.endswith("end\n"):
            raise ClusterctlError(" ".join(result.err.split()) or "could not move what has arrived to its place")

    answers = fan_out(nodes, move)
    for node in nodes:
        if isinstance(answer := answers[node.name], ClusterctlError):
            work.failed[node.name] = reason(answer, work.inventory, node)
    states = {node.name: "failed" if node.name in work.failed else "in place" for node in nodes}
    work.emit(StageFinished("place", time.monotonic() - began, states))
