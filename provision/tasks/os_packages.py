"""The bundle of OS packages comes to the nodes that lack something of it, before the service installs it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError
from provision.inventory import fold
from provision.model import Emit, Inventory, Node, Notice, StageFinished, StageStarted
from provision.ospackages import node as on_node
from provision.ospackages.facts import Facts, judge, read
from provision.ospackages.node import Choice, Packages
from provision.output_text import fold_equal
from provision.ssh.remote import Connections, fan_out, reading
from provision.tasks.answers import reason
from provision.tasks.hold import Lock, held
from provision.transfer import Target, transfer

if TYPE_CHECKING:
    from collections.abc import Callable

STAGE = "os packages"
_SEND = "send os packages"
_DEADLINE = 120.0  # seconds for apt to read an index and to simulate


@dataclass
class _Work:
    """What is known of the nodes."""

    inventory: Inventory
    connections: Connections
    emit: Emit
    failed: dict[str, str] = field(default_factory=dict)

    def each(self, nodes: Sequence[Node], do: Callable[[Node], Facts | bool]) -> dict[str, Facts | bool]:
        """What every node answers; one that fails stops no other."""
        answers = fan_out(nodes, do)
        for node in nodes:
            if isinstance(answer := answers[node.name], ClusterctlError):
                self.failed[node.name] = reason(answer, self.inventory, node)
        return {name: answer for name, answer in answers.items() if not isinstance(answer, ClusterctlError)}


def bring(
    inventory: Inventory,
    nodes: Sequence[Node],
    connections: Connections,
    packages: Packages,
    *,
    dry_run: bool,
    emit: Emit,
) -> dict[str, str]:
    """Ask every node what it lacks and what apt would do there, and send the bundle to those that lack something.

    Args:
        inventory: the cluster.
        nodes: those of its nodes that are meant.
        connections: the way to them.
        packages: the bundles.
        dry_run: only ask; nothing is written on any node.
        emit: is told about the progress.

    Returns:
        By node name, why its packages cannot be installed; nothing was changed there.

    Raises:
        BundleError: a bundle is damaged.
    """
    chosen = packages.choices
    work = _Work(inventory, connections, emit)
    found = _ask(work, nodes, chosen, packages.replace)
    lacking = [node for node in nodes if node.name not in work.failed and found[node.name].lacks]
    if not dry_run:
        for choice in chosen:
            mine = [node for node in lacking if found[node.name].name == choice.name]
            if mine:
                _send(work, mine, choice)
    return work.failed


def _ask(work: _Work, nodes: Sequence[Node], chosen: Sequence[Choice], replace: Sequence[str]) -> dict[str, Facts]:
    began = time.monotonic()
    work.emit(StageStarted(STAGE, "Asking nodes for their packages", len(nodes), "nodes"))
    script, index = on_node.facts(chosen), on_node.index(chosen)

    def ask(node: Node) -> Facts:
        result = work.connections[node].run(script, stdin=[index], deadline=_DEADLINE)
        if result.rc != 0:
            raise ClusterctlError(" ".join((result.err or result.out).split()) or "its packages could not be listed")
        with reading(node):
            return read(result.out)

    answers = work.each(nodes, ask)
    found = {name: answer for name, answer in answers.items() if isinstance(answer, Facts)}
    for name, facts in found.items():
        if why := judge(facts, chosen, replace):
            work.failed[name] = why
    _warn(work, {name: facts for name, facts in found.items() if name not in work.failed})
    states = {name: "cannot" if name in work.failed else _state(facts) for name, facts in found.items()}
    work.emit(StageFinished(STAGE, time.monotonic() - began, states, failed=len(work.failed)))
    return found


def _warn(work: _Work, found: Mapping[str, Facts]) -> None:
    """What a person should know before it happens."""
    gone = {name: ", ".join((facts.changes or {}).get("remove", ())) for name, facts in found.items()}
    for text, names in fold_equal({name: text for name, text in gone.items() if text}).items():
        work.emit(Notice(f"{names}: {text} gives way; `clusterctl services undo` brings it back", "warning"))
    for name, facts in found.items():
        if facts.lacks and facts.holder:
            pid, _, program = facts.holder.partition(" ")
            wait = f"installing waits up to {on_node.LOCK_SECONDS} s for it"
            work.emit(Notice(f"{name}: {program} (process {pid}) is using dpkg; {wait}", "warning"))


def _state(facts: Facts) -> str:
    return f"lacks {', '.join(facts.lacks)}" if facts.lacks else "has all of them"


def _send(work: _Work, nodes: Sequence[Node], choice: Choice) -> None:
    began = time.monotonic()
    names = [node.name for node in nodes]
    work.emit(StageStarted(_SEND, f"Sending {choice.bundle.path.name} to {fold(names)}", None, "bytes"))
    script = on_node.opening(choice)

    def open_folder(node: Node) -> bool:
        result = work.connections[node].run(script, root=True, deadline=_DEADLINE)
        if result.rc != 0:
            raise ClusterctlError(" ".join(result.err.split()) or f"cannot make {choice.folder}")
        return "ssh" in result.out.split()

    has_ssh = work.each(nodes, open_folder)
    opened = [node for node in nodes if node.name in has_ssh]
    folder = str(choice.folder)
    if not opened:
        return
    with held(work.inventory, opened, work.connections, Lock(f"{folder}/lock"), "services apply"):
        targets = [
            Target(node, f"{folder}/transfer", f"{folder}/tree", "plain", bool(has_ssh[node.name])) for node in opened
        ]
        sent = transfer(
            work.inventory, targets, work.connections, {"plain": on_node.legs(choice)}, stage=_SEND, emit=work.emit
        )
    for node in opened:
        if error := sent.errors.get(node.name):
            work.failed[node.name] = reason(error, work.inventory, node)
    states = {name: "failed" if name in work.failed else "received" for name in names}
    work.emit(StageFinished(_SEND, time.monotonic() - began, states))
