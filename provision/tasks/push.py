"""``clusterctl push``: copy a data set, a model or code to every node. Files that a node has are not sent again."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provision import data
from provision.data import Changes, Pushed, PushTarget, Tree, find_changes, plan_parts, read_answer, scan_tree
from provision.env.text import size
from provision.errors import ClusterctlError, PreflightError
from provision.model import Node
from provision.session import Lock, Outcome
from provision.session.sending import Sent, send
from provision.transfer import Target

if TYPE_CHECKING:
    from provision.session import Session

_DEADLINE = 3600.0  # comparing or renaming a million files


@dataclass(frozen=True)
class PushResult:
    """The result of a push. Sizes in bytes; ``states`` has ``unchanged``, ``pushed`` or the intent for each node."""

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
        """Whether any node was, or would be, changed."""
        return any(state != "unchanged" for state in self.states.values())


@dataclass(frozen=True)
class Shipment:
    """The tree, its destination on the nodes, and by node name the missing files and the parts to send."""

    tree: Tree
    target: PushTarget
    needs: Mapping[str, Changes]
    plans: Mapping[str, Pushed]
    lock: Lock

    @classmethod
    def of(cls, tree: Tree, target: PushTarget, needs: Mapping[str, Changes]) -> Shipment:
        """Plan the parts for each node; nodes that lack the same files share a plan."""
        plans = {wanted: plan_parts(tree, wanted) for wanted in {each.wanted for each in needs.values()}}
        by_node = {name: plans[each.wanted] for name, each in needs.items()}
        return cls(tree, target, needs, by_node, Lock(f"{target.staging}.lock"))

    def changes(self, node: Node) -> bool:
        """Whether a push changes a node."""
        return bool(self.plans[node.name].parts or self.needs[node.name].incomplete)

    def intent(self, node: Node) -> str:
        """How a push would change a node."""
        parts = self.plans[node.name].parts
        return f"send {len(parts)} parts" if parts else "update folders"


def push(session: Session, source: Path, destination: str, *, relay: bool = True) -> PushResult:
    """Copy a file or folder to the nodes as ``destination``.

    A file that a node has with the same mode, size and time is not sent. Other files on the nodes stay.

    Args:
        session: the command's session.
        source: the file or folder.
        destination: its absolute path on the nodes.
        relay: nodes may pass bytes on to other nodes.

    Raises:
        UsageError: the source cannot be read, or the destination is invalid.
        BundleError: a file changed while it was read.
        PreflightError: nodes cannot take the files, or another push is running there; nothing was changed.
        NodesFailedError: some nodes failed; the others are done.
    """
    target = PushTarget.of(session.inventory, destination, folder=source.is_dir())
    tree = scan_tree(source)
    for path in tree.skipped:
        session.warn(f"{path} is a socket, pipe or device and is skipped")
    shipment = Shipment.of(tree, target, _compare(session, tree, target))
    todo = [node for node in session.nodes if shipment.changes(node)]
    refuse_full(shipment, todo)
    states = {node.name: "unchanged" for node in session.nodes}
    sent = Sent(Outcome(session, {}, changes=True))
    if session.dry_run:
        states |= {node.name: shipment.intent(node) for node in todo}
    elif todo:
        opened = _open(session, shipment, todo)
        with session.locked(shipment.lock, on=opened.of(todo)) as sharing:
            begun = _begin(session, shipment, sharing.own(opened.of(todo)))
            sent = _send(session, shipment, begun.of(todo), relay=relay)
            placed = _place(
                session, shipment, [node for node in begun.of(todo) if node.name not in sent.outcome.failed]
            )
        closed = _close(session, shipment, [node for node in placed.of(todo) if placed.ok[node.name]])
        done = opened & begun & sent.outcome & placed & closed
        done.required(also="files that arrived are not sent again")
        owners = {node.name: sharing.owner(node) for node in todo}
        states |= {name: f"shared with {owner}" if owner else "pushed" for name, owner in owners.items()}
    files = sum(one.type != "dir" for one in tree.found)
    seconds = sum(session.seconds.values())
    return PushResult(source, str(target.destination), files, tree.size, states, sent.bytes, seconds, session.dry_run)


def _compare(session: Session, tree: Tree, target: PushTarget) -> Mapping[str, Changes]:
    """The missing files of every node; one error names all nodes that cannot take the tree."""
    token = secrets.token_hex(8)
    known: dict[frozenset[str], frozenset[str]] = {}  # most nodes lack the same files, perhaps a million

    def answer(_: Node, out: str) -> Changes:
        found = find_changes(tree, read_answer(out, token), str(target.destination))
        return replace(found, wanted=known.setdefault(found.wanted, found.wanted))

    outcome = session.ask(
        "compare",
        "Comparing with the nodes",
        data.compare_script(target, token),
        answer,
        stdin=data.compare_input(tree),
        deadline=_DEADLINE,
        state=lambda each: f"{len(each.wanted)} of {len(tree.found)} differ",
    )
    refused = {name: each.refused for name, each in outcome.ok.items() if each.refused}
    return outcome.refuse(refused).required(cannot=f"cannot take {target.destination}")


def refuse_full(shipment: Shipment, nodes: Sequence[Node]) -> None:
    """Check that the files fit on the nodes.

    Raises:
        PreflightError: some nodes are too full; nothing was changed.
    """
    full = {}
    for node in nodes:
        has, needed = shipment.needs[node.name], shipment.plans[node.name].room
        if has.free_bytes is not None and has.free_bytes + has.staged < needed:
            staged = f" and {size(has.staged)} of an earlier push in {shipment.target.staging}" if has.staged else ""
            full[node.name] = f"{size(has.free_bytes)} free{staged}, {size(needed)} needed; free some space"
    if full:
        raise PreflightError(f"{len(full)} of {len(nodes)} nodes are too full; nothing was changed", reasons=full)


def _each(
    session: Session, nodes: Sequence[Node], script: str, stdin: Mapping[str, bytes] | None = None
) -> Outcome[str]:
    """Run a script on some nodes, where it must succeed, and return its output."""

    def one(node: Node) -> str:
        given = stdin[node.name] if stdin is not None else b""
        return session.output(node, script, stdin=given, deadline=_DEADLINE)

    return session.each(one, on=nodes, changes=True)


def _open(session: Session, shipment: Shipment, nodes: Sequence[Node]) -> Outcome[Any]:
    """Create the destination, or make it writable: arriving files and the lock are in it."""
    if not shipment.target.folder:
        return Outcome(session, {node.name: "" for node in nodes}, changes=True)
    return _each(session, nodes, data.open_script(shipment.target, shipment.tree.mode))


def _begin(session: Session, shipment: Shipment, nodes: Sequence[Node]) -> Outcome[Any]:
    """Create the staging folder. Parts for other nodes only count as present."""
    script = shipment.lock.guarded(data.begin_script(shipment.target))
    keys = tuple(dict.fromkeys(part.key for node in nodes for part in shipment.plans[node.name].parts))
    expected = {node.name: data.begin_input(shipment.plans[node.name], keys) for node in nodes}
    return _each(session, nodes, script, expected)


def _send(session: Session, shipment: Shipment, nodes: Sequence[Node], *, relay: bool) -> Sent:
    """Send missing files to the staging folder, in one transfer for all nodes."""
    target = shipment.target
    nodes = [node for node in nodes if shipment.plans[node.name].parts]
    targets = [Target(node, target.transfer, target.into, "plain", shipment.needs[node.name].has_ssh) for node in nodes]
    parts = {part.key: part for node in nodes for part in shipment.plans[node.name].parts}
    return send(session, "send", target.destination.name, targets, {"plain": tuple(parts.values())}, relay=relay)


def _place(session: Session, shipment: Shipment, nodes: Sequence[Node]) -> Outcome[bool]:
    """Move the files to the destination. The value is whether ``_open`` changed the destination's mode."""
    script = shipment.lock.guarded(data.place_script(shipment.target))

    def move(node: Node) -> bool:
        moves = data.place_input(shipment.plans[node.name], shipment.needs[node.name].folders)
        words = session.output(node, script, stdin=moves, deadline=_DEADLINE).split()
        if words[-1:] != ["end"]:
            raise ClusterctlError(f"could not move the files to {shipment.target.destination}")
        return "open" in words

    return session.work("place", "Moving into place", move, on=nodes, state=lambda _: "in place", changes=True)


def _close(session: Session, shipment: Shipment, nodes: Sequence[Node]) -> Outcome[Any]:
    """Give the destination its mode."""
    return _each(session, nodes, data.close_script(shipment.target))
