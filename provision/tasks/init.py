"""``clusterctl init``: the first contact with the nodes of an inventory, and the inventory where there is none."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provision import inventory as inventory_file
from provision.errors import ClusterctlError, InventoryError, NodesFailedError, UsageError
from provision.inventory import fold, writing
from provision.inventory.asking import Facts, read_facts
from provision.inventory.choosing import Wanted, described, draft
from provision.inventory.foreign import Found, read
from provision.model import Emit, Inventory, Node, Notice, StageFinished, StageStarted
from provision.render import render
from provision.ssh.enrol import Enrolled, default_key, enrol
from provision.ssh.remote import Connections, fan_out
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
    sketch = _checked(path, writing.text(draft(hosts), **settings))
    results, failed = _enrol(sketch, prompts, emit)
    ready = [node for node in sketch.nodes if node.name not in failed]
    then = "then write what is missing into the inventory, and run: clusterctl init"
    if not ready:
        raise _not_enrolled(failed, len(hosts), _next(results, prompts, "nothing was written; run it again"))
    facts = _ask(sketch, ready, emit)
    places = {index: facts[node.name] for index, node in enumerate(sketch.nodes) if node.name in facts}
    nodes, notes = described(hosts, places)
    text = writing.text(nodes, **settings, notes=notes)
    _checked(path, text)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    names = {old.name: new.name for old, new in zip(sketch.nodes, nodes, strict=True)}
    states = {names[name]: answer.state for name, answer in results.items() if isinstance(answer, Enrolled)}
    return Created(
        path, text, states, {names[name]: why for name, why in failed.items()}, _next(results, prompts, then)
    )


def foreign(path: Path, *, group: str | None = None, emit: Emit) -> Found:
    """The nodes of an Ansible inventory or a hostfile; what has no counterpart is told.

    Raises:
        UsageError: it cannot be read, or has no such group.
        InventoryError: lines that are not understood.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"{path} cannot be read: {why}") from error
    found = read(text, str(path), group=group)
    for note in found.notes:
        emit(Notice(f"{path.name}: {note}", "warning"))
    return found


def _checked(path: Path, text: str) -> Inventory:
    """The inventory that ``text`` would be at ``path``; its mistakes are found before anything is written there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            loaded = inventory_file.load(Path(file.name))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    except InventoryError as error:
        raise InventoryError("these hosts make no inventory", problems=error.problems) from error
    return replace(loaded, path=path.absolute())


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
        return read_facts(pool[node].run(script, deadline=_DEADLINE).out)

    with Connections(inventory) as pool:
        answers = fan_out(nodes, ask)
    facts = {name: answer for name, answer in answers.items() if isinstance(answer, Facts)}
    emit(StageFinished("ask", time.monotonic() - began))
    silent = {node.name: answer for node in nodes if isinstance(answer := answers[node.name], ClusterctlError)}
    if silent:
        why = next(iter(silent.values()))
        emit(Notice(f"{fold(silent)}: not asked what it is: {why}", "warning"))
    return facts
