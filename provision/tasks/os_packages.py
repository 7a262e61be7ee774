"""Sends bundles of OS packages to the nodes that lack packages, before the service installs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from provision.errors import ClusterctlError
from provision.model import Node, Part, Wire
from provision.ospackages import node as on_node
from provision.ospackages.node import Choice, Facts, Packages, judge, read
from provision.output_text import fold_equal
from provision.session import Lock, Outcome
from provision.session.sending import send
from provision.ssh.remote import reading
from provision.transfer import Target

if TYPE_CHECKING:
    from provision.session import Session

_DEADLINE = 120.0  # seconds for apt to read an index and to simulate


def send_packages(session: Session, packages: Packages) -> Outcome[Any]:
    """Simulate the installation on every node, and send the bundle to the nodes that lack packages.

    Returns:
        The nodes where the packages cannot be installed, in ``failed``; nothing was changed there.

    Raises:
        BundleError: a bundle is damaged.
    """
    chosen = packages.choices
    found = _ask(session, chosen, packages.replace)
    _warn(session, found.ok)
    done: Outcome[Any] = Outcome(session, {}, found.failed, changes=True)
    for choice in () if session.dry_run else chosen:
        lacking = [node for node in found.of(session.nodes) if found.ok[node.name].lacks]
        done &= _send(session, choice, [node for node in lacking if found.ok[node.name].name == choice.name])
    return Outcome(session, {}, done.failed, changes=True)


def _ask(session: Session, chosen: Sequence[Choice], replace: Sequence[str]) -> Outcome[Facts]:
    script, index = on_node.facts(chosen), on_node.index(chosen)

    def ask(node: Node) -> Facts:
        result = session.run(node, script, stdin=index, deadline=_DEADLINE)
        if result.rc != 0:
            raise ClusterctlError(" ".join((result.err or result.out).split()) or "its packages could not be listed")
        with reading(node):
            facts = read(result.out)
        if why := judge(facts, chosen, replace):
            raise ClusterctlError(why)
        return facts

    def state(facts: Facts) -> str:
        return f"lacks {', '.join(facts.lacks)}" if facts.lacks else "complete"

    return session.work("os packages", "Comparing packages", ask, state=state)


def _warn(session: Session, found: Mapping[str, Facts]) -> None:
    """Warn about packages that will be removed, and about processes that the installation will wait for."""
    removed = {name: ", ".join((facts.changes or {}).get("remove", ())) for name, facts in found.items()}
    for text, names in fold_equal({name: text for name, text in removed.items() if text}).items():
        session.warn(f"{names}: {text} will be removed; `clusterctl services undo` restores it")
    for name, facts in found.items():
        if facts.lacks and facts.holder:
            pid, _, program = facts.holder.partition(" ")
            wait = f"installing waits up to {on_node.LOCK_SECONDS} s for it"
            session.warn(f"{name}: {program} (process {pid}) is using dpkg; {wait}")


def _send(session: Session, choice: Choice, nodes: Sequence[Node]) -> Outcome[Any]:
    script, folder = on_node.opening(choice), str(choice.folder)

    def open_folder(node: Node) -> bool:
        return "ssh" in session.output(node, script, root=True, deadline=_DEADLINE).split()

    opened = session.each(open_folder, on=nodes, changes=True)
    if not opened.ok:
        return opened
    with session.locked(Lock(f"{folder}/lock"), on=opened.of(nodes)):
        targets = [
            Target(node, f"{folder}/transfer", f"{folder}/tree", "plain", opened.ok[node.name])
            for node in opened.of(nodes)
        ]
        parts: dict[Wire, Sequence[Part]] = {"plain": on_node.parts(choice)}
        return opened & send(session, "send os packages", choice.bundle.path.name, targets, parts).outcome
