"""``clusterctl init``: the first contact with the nodes of an inventory, and the inventory where there is none."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provision.errors import ClusterctlError, InventoryError, NodesFailedError, UsageError
from provision.inventory import fold, loading, writing
from provision.inventory.asking import Facts, read_facts
from provision.inventory.choosing import Wanted, described, draft
from provision.inventory.foreign import Found, read_file
from provision.model import Emit, Inventory, Node, Notice, StageFinished, StageStarted
from provision.render import render
from provision.ssh.enrol import Enrolled, default_key, enrol
from provision.ssh.remote import Connections, fan_out, reading
from provision.tasks.answers import hint, reason

if TYPE_CHECKING:
    from provision.ssh.prompts import Prompts

DEFAULT_PREFIX = "/opt/llm/current"
_DEADLINE = 60.0  # seconds for a node to tell about itself; nvidia-smi has 20 of them


@dataclass(frozen=True)
class Created:
    """A new inventory: its file and text, what was done on each node, and why on some it was not."""

    path: Path
    text: str
    states: Mapping[str, str]
    failed: Mapping[str, str]
    hint: str = ""

    def raise_failed(self) -> None:
        """Raise one error for all nodes that could not be enrolled.

        Raises:
            NodesFailedError: there are some.
        """
        if self.failed:
            raise _not_enrolled(self.failed, len(self.failed) + len(self.states), self.hint)


def init(inventory: Inventory, *, prompts: Prompts | None = None, emit: Emit) -> dict[str, str]:
    """Pin every node's host key, and install an ssh key where only a password works.

    Returns:
        What was done for each node.

    Raises:
        NodesFailedError: some nodes could not be enrolled, the others are done.
    """
    results, failed = _enrol(inventory, prompts, emit)
    if failed:
        raise _not_enrolled(failed, len(inventory.nodes), _next(results, prompts, "then again: clusterctl init"))
    return {name: answer.state for name, answer in results.items() if isinstance(answer, Enrolled)}


def create(
    path: Path,
    hosts: Sequence[Wanted],
    *,
    ssh: Mapping[str, Any],
    prefix: str | None = None,
    found: Found | None = None,
    prompts: Prompts | None = None,
    emit: Emit,
) -> Created:
    """Enrol the nodes of a new inventory, ask them what they are, and write it.

    Nothing is written where no node can be reached. A node that fails while others do not has its line all the same,
    with what is known of it.

    Args:
        path: the inventory; there is none yet.
        hosts: who is meant.
        ssh: ``user``, ``port`` and ``key`` of the inventory, as far as they are known.
        prefix: the inventory's prefix.
        found: the file that names the hosts, where it is one.
        prompts: how to ask for a password or about a host key.
        emit: is told about the progress.

    Raises:
        UsageError: ``path`` is there already, or cannot be written.
        InventoryError: the hosts make no valid inventory.
        NodesFailedError: no node could be enrolled.
    """
    if path.exists():
        raise UsageError(f"{path} is there already", hint="to enrol the nodes that it names: clusterctl init")
    settings: dict[str, Any] = {"prefix": prefix or DEFAULT_PREFIX, "ssh": dict(ssh)}
    if "key" not in ssh and (key := default_key()):
        settings["ssh"]["key"] = key
    sketch = _checked(path, draft(hosts), settings, hosts, found)
    results, failed = _enrol(sketch, prompts, emit)
    ready = [node for node in sketch.nodes if node.name not in failed]
    then = "then write what is missing into the inventory, and run: clusterctl init"
    if not ready:
        raise _not_enrolled(failed, len(hosts), _next(results, prompts, "nothing was written; run it again"))
    facts = _ask(sketch, ready, emit)
    places = {index: facts[node.name] for index, node in enumerate(sketch.nodes) if node.name in facts}
    nodes, notes = described(hosts, places)
    names = {old.name: new.name for old, new in zip(sketch.nodes, nodes, strict=True)}
    groups, left_out = found.kept_groups([node.name for node in nodes]) if found else ({}, ())
    for note in left_out:
        emit(Notice(note, "warning"))
    _checked(path, nodes, settings, hosts, found)
    text = writing.text(nodes, **settings, groups=groups, notes=notes)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    states = {names[name]: answer.state for name, answer in results.items() if isinstance(answer, Enrolled)}
    return Created(
        path, text, states, {names[name]: why for name, why in failed.items()}, _next(results, prompts, then)
    )


def foreign(path: Path, *, group: str | None = None, emit: Emit) -> Found:
    """The nodes of an Ansible inventory, a hostfile or ClusterShell's groups; what has no counterpart is told.

    Raises:
        UsageError: it cannot be read, or has no such group.
        InventoryError: lines that are not understood.
    """
    found = read_file(path, group=group)
    for note in found.notes:
        emit(Notice(f"{path.name}: {note}", "warning"))
    return found


def _checked(
    path: Path, nodes: Sequence[Node], settings: Mapping[str, Any], hosts: Sequence[Wanted], found: Found | None
) -> Inventory:
    """The inventory that these nodes would be at ``path``; mistakes are found before anything is written there.

    Nobody has seen its text: a mistake names who wrote the value, on the command line or in another tool's file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-"):
            pass
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", hint="name another file: clusterctl init -i FILE"
        ) from error
    origins = {node.name: each.origin for node, each in zip(nodes, hosts, strict=True)}
    file = f"{found.name} " if found and found.name else ""

    def origin(place: tuple[str, ...]) -> str:
        if place[:1] == ("nodes",) and len(place) > 1:
            return f"{file}{origins.get(place[1]) or place[1]}"
        if place[:1] == ("ssh",) and found and found.ssh.get(place[-1]) == settings["ssh"].get(place[-1]):
            return f"{file}{place[-1]}"
        return {("prefix",): "--prefix", ("ssh", "user"): "--user"}.get(place, ".".join(place))

    try:
        return loading.parse(writing.text(nodes, **settings, ranges=False), path.absolute(), origin=origin)
    except InventoryError as error:
        raise InventoryError(
            f"no inventory was written: {path} would have " + str(error).rpartition(" has ")[2],
            problems=error.problems,
            hint=f"correct {found.name} and run the command again"
            if file and found
            else "correct it on the command line",
        ) from error


def _enrol(
    inventory: Inventory, prompts: Prompts | None, emit: Emit
) -> tuple[dict[str, Enrolled | ClusterctlError], dict[str, str]]:
    results = enrol(inventory, inventory.nodes, prompts=prompts, emit=emit)
    failed = {
        node.name: reason(answer, inventory, node)
        for node in inventory.nodes
        if not isinstance(answer := results[node.name], Enrolled)
    }
    return results, failed


def _not_enrolled(failed: Mapping[str, str], count: int, what_next: str) -> NodesFailedError:
    return NodesFailedError(f"{len(failed)} of {count} nodes could not be enrolled", reasons=failed, hint=what_next)


def _next(results: Mapping[str, object], prompts: Prompts | None, then: str) -> str:
    asks = any(isinstance(each, ClusterctlError) and each.hint == "clusterctl init" for each in results.values())
    if asks and prompts is None:
        return "run it on a terminal: there it can ask about host keys and for a password"
    return hint(results.values(), then)


def _ask(inventory: Inventory, nodes: Sequence[Node], emit: Emit) -> dict[str, Facts]:
    """What nodes say about themselves; one that does not answer is told, and known by its address only."""
    began = time.monotonic()
    emit(StageStarted("ask", "Asking nodes what they are", len(nodes), "nodes"))
    script = render("enrol/ask.sh.j2")

    def ask(node: Node) -> Facts:
        out = pool[node].run(script, deadline=_DEADLINE).out
        with reading(node):
            return read_facts(out)

    with Connections(inventory) as pool:
        answers = fan_out(nodes, ask)
    facts = {name: answer for name, answer in answers.items() if isinstance(answer, Facts)}
    silent = {node.name: answer for node in nodes if isinstance(answer := answers[node.name], ClusterctlError)}
    emit(StageFinished("ask", time.monotonic() - began, failed=len(silent)))
    if silent:
        why = next(iter(silent.values()))
        emit(Notice(f"{fold(silent)}: not asked what it is: {why}", "warning"))
    return facts
