"""``clusterctl push``: a data set, a model or code goes to every node; what is there already is not sent again."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from provision.data import node as scripts
from provision.data.node import Spot
from provision.data.there import Lack, lack, read
from provision.data.tree import Pushed, Tree, look, plan
from provision.env.report.words import size
from provision.errors import ClusterctlError, NodesFailedError, PreflightError
from provision.hints import again
from provision.inventory import fold
from provision.model import Emit, Inventory, Node, Notice, StageFinished, StageStarted
from provision.ssh.remote import Connections, fan_out, reading
from provision.tasks.answers import reason, split
from provision.tasks.hold import Lock, held
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
    lock: Lock
    lacks: Mapping[str, Lack] = field(default_factory=dict)
    plans: Mapping[str, Pushed] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def well(self, nodes: Iterable[Node]) -> list[Node]:
        """Those that have not failed."""
        return [node for node in nodes if node.name not in self.failed]

    def each(self, nodes: Sequence[Node], do: Callable[[Node], object]) -> None:
        """Do the same on every node; one that fails stops no other."""
        answers = fan_out(nodes, do)
        for node in nodes:
            if isinstance(answer := answers[node.name], ClusterctlError):
                self.failed[node.name] = reason(answer, self.inventory, node)

    def run(self, node: Node, script: str, stdin: bytes = b"") -> str:
        """What a script says that must end well."""
        result = self.connections[node].run(script, stdin=[stdin], deadline=_DEADLINE)
        if result.rc != 0:
            raise ClusterctlError(" ".join(result.err.split()) or f"a script ended with status {result.rc}")
        return result.out


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
        PreflightError: nodes that cannot take it, or are taken by another push; nothing was changed anywhere.
        NodesFailedError: some nodes failed, the others are done.
    """
    began = time.monotonic()
    spot = Spot.of(inventory, destination, folder=source.is_dir())
    tree = look(source)
    for path in tree.skipped:
        emit(Notice(f"{path} is a socket, pipe or device and stays behind", "warning"))
    with Connections(inventory, prompts) as connections:
        work = _Push(inventory, connections, tree, spot, emit, Lock(f"{spot.staging}.lock"))
        work.lacks = _compare(work, nodes)
        wanted = {name: each.wanted for name, each in work.lacks.items()}
        plans = {each: plan(tree, each) for each in set(wanted.values())}  # nodes that lack the same have the same
        work.plans = {name: plans[each] for name, each in wanted.items()}
        todo = [node for node in nodes if work.plans[node.name].legs or work.lacks[node.name].incomplete]
        _refuse_small(work, todo)
        states = {node.name: "unchanged" for node in nodes}
        sent = 0
        if dry_run or not todo:
            states |= {node.name: _would(work.plans[node.name]) for node in todo}
        else:
            _open(work, todo)
            todo = work.well(todo)
            with held(inventory, todo, connections, work.lock, "push") as shared:
                own = [node for node in todo if not shared[node.name]]
                _begin(work, own)
                sent = _send(work, work.well(own), relay=relay)
                opened = _place(work, work.well(own))
            _close(work, opened)
            states |= {
                node.name: f"shared with {shared[node.name]}" if shared[node.name] else "pushed" for node in todo
            }
    if work.failed:
        raise NodesFailedError(
            f"push failed on {len(work.failed)} of {len(nodes)} nodes",
            reasons=work.failed,
            hint=f"fix what is named, then: {again(inventory.typed, 'push')}; what has arrived is not sent again",
        )
    files = sum(one.type != "dir" for one in tree.found)
    seconds = time.monotonic() - began
    return PushResult(source, str(spot.destination), files, tree.size, states, sent, seconds, dry_run)


def _would(pushed: Pushed) -> str:
    return f"send {len(pushed.legs)} pieces" if pushed.legs else "put folders in order"


def _compare(work: _Push, nodes: Sequence[Node]) -> dict[str, Lack]:
    """What every node lacks; one error names all that cannot take it."""
    began = time.monotonic()
    work.emit(StageStarted("compare", "Comparing with the nodes", len(nodes), "nodes"))
    token = secrets.token_hex(8)
    script = scripts.compare(work.spot, token)
    wanted = scripts.paths(work.tree)
    known: dict[frozenset[str], frozenset[str]] = {}  # most nodes lack the same, which may be a million names

    def ask(node: Node) -> Lack:
        out = work.connections[node].run(script, stdin=[wanted], deadline=_DEADLINE).out
        with reading(node):
            found = lack(work.tree, read(out, token), str(work.spot.destination))
        return replace(found, wanted=known.setdefault(found.wanted, found.wanted))

    answers = fan_out(nodes, ask)
    refused = {name: each.refused for name, each in answers.items() if isinstance(each, Lack) and each.refused}
    lacks = split(work.inventory, nodes, answers, command="push", also=refused)
    if refused:
        raise PreflightError(
            f"{len(refused)} of {len(nodes)} nodes cannot take {work.spot.destination}; nothing was changed",
            reasons=refused,
        )
    states = {name: f"{len(each.wanted)} of {len(work.tree.found)} differ" for name, each in lacks.items()}
    work.emit(StageFinished("compare", time.monotonic() - began, states))
    return lacks


def _refuse_small(work: _Push, nodes: Sequence[Node]) -> None:
    small = {}
    for node in nodes:
        has, needed = work.lacks[node.name], work.plans[node.name].room
        if has.free_bytes is not None and has.free_bytes + has.staged < needed:
            here = f" beside {size(has.staged)} of a broken push in {work.spot.staging}" if has.staged else ""
            small[node.name] = f"{size(has.free_bytes)} free{here}, {size(needed)} are needed; free some space"
    if small:
        raise PreflightError(f"{len(small)} of {len(nodes)} nodes are too full; nothing was changed", reasons=small)


def _open(work: _Push, nodes: Sequence[Node]) -> None:
    """Make the destination, or open it for its owner: what is on its way lies in it, and the lock."""
    if work.spot.folder:
        script = scripts.open_folder(work.spot, work.tree.mode)
        work.each(nodes, lambda node: work.run(node, script))


def _begin(work: _Push, nodes: Sequence[Node]) -> None:
    """Make room for what each node lacks; legs that only others lack count there as if they were there."""
    script = work.lock.guarded(scripts.begin(work.spot))
    keys = tuple(dict.fromkeys(leg.key for node in nodes for leg in work.plans[node.name].legs))
    work.each(nodes, lambda node: work.run(node, script, scripts.expected(work.plans[node.name], keys)))


def _send(work: _Push, nodes: Sequence[Node], *, relay: bool) -> int:
    """Bring what each node lacks beside its place, whatever each of them lacks in one transfer."""
    nodes = [node for node in nodes if work.plans[node.name].legs]
    if not nodes:
        return 0
    began = time.monotonic()
    spot, names = work.spot, [node.name for node in nodes]
    work.emit(StageStarted("send", f"Sending {spot.destination.name} to {fold(names)}", None, "bytes"))
    targets = [Target(node, spot.transfer, spot.into, "plain", work.lacks[node.name].has_ssh) for node in nodes]
    legs = {leg.key: leg for node in nodes for leg in work.plans[node.name].legs}
    result = transfer(
        work.inventory, targets, work.connections, {"plain": tuple(legs.values())}, relay=relay, emit=work.emit
    )
    received = {name: "failed" if result.errors.get(name) else "received" for name in names}
    work.emit(StageFinished("send", time.monotonic() - began, received))
    for node in nodes:
        if error := result.errors.get(node.name):
            work.failed[node.name] = reason(error, work.inventory, node)
    return result.sent


def _place(work: _Push, nodes: Sequence[Node]) -> list[Node]:
    """Move what has arrived to its place; the nodes on which the destination is to be closed after that."""
    began = time.monotonic()
    work.emit(StageStarted("place", "Moving to its place", len(nodes), "nodes"))
    script = work.lock.guarded(scripts.place(work.spot))
    opened = []

    def move(node: Node) -> None:
        told = scripts.moves(work.plans[node.name], work.lacks[node.name].folders)
        words = work.run(node, script, told).split()
        if words[-1:] != ["end"]:
            raise ClusterctlError("could not move what has arrived to its place")
        if "open" in words:
            opened.append(node)

    work.each(nodes, move)
    states = {node.name: "failed" if node.name in work.failed else "in place" for node in nodes}
    work.emit(StageFinished("place", time.monotonic() - began, states))
    return opened


def _close(work: _Push, nodes: Sequence[Node]) -> None:
    script = scripts.close_folder(work.spot)
    work.each(nodes, lambda node: work.run(node, script))
