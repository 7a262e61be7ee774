"""``clusterctl init``: enrolls the nodes of an existing or a new inventory."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provision.errors import InventoryError, NodesFailedError, UsageError
from provision.inventory import fold, json_schema, loading, writing
from provision.inventory.foreign import Found, read_file
from provision.inventory.new_nodes import Facts, Wanted, describe_nodes, draft_nodes, read_facts
from provision.model import UNTYPED, CommandLine, Emit, Inventory, Node, Notice
from provision.render import render
from provision.session import Outcome, Session
from provision.ssh.enrol import Enrolled, create_key, default_key, enrol

if TYPE_CHECKING:
    from provision.ssh.prompts import Prompts

DEFAULT_PREFIX = "/opt/llm/current"
_DEADLINE = 60.0  # seconds to read a node's facts; nvidia-smi has 20 of them


@dataclass(frozen=True)
class Created:
    """A new inventory: its file and text, the actions on each node, and the reasons of failed nodes."""

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


def init(session: Session) -> dict[str, str]:
    """Pin every node's host key, and install an ssh key where only a password works.

    Returns:
        The actions on each node.

    Raises:
        NodesFailedError: some nodes could not be enrolled; the others are done.
    """
    outcome = enrol_nodes(session)
    if outcome.failed:
        raise _not_enrolled(
            outcome.reasons, len(session.nodes), _next(outcome, f"then: {session.again(command='init')}")
        )
    return {name: answer.state for name, answer in outcome.ok.items()}


def enrol_nodes(session: Session) -> Outcome[Enrolled]:
    """Enrol every node, after the jump hosts. Creates the inventory's ``ssh.key`` if it is named and missing."""
    key = session.inventory.ssh.key
    if key and create_key(key):
        session.emit(Notice(f"created the ssh key {key}"))
    before = [host for host in session.inventory.ssh.jump_hosts if host not in session.inventory.nodes]
    hosts = _enrol(session, "enrol-jump-hosts", "Enrolling jump hosts", before)
    for name, why in hosts.reasons.items():
        session.warn(f"jump host {name}: {why}")
    return _enrol(session, "enrol", "Enrolling nodes", session.nodes)


def _enrol(session: Session, key: str, title: str, nodes: Sequence[Node]) -> Outcome[Enrolled]:
    return session.work(
        key,
        title,
        lambda node: enrol(session.inventory, node, session.connections),
        on=nodes,
        state=lambda answer: answer.state,
        changes=True,
    )


def create(
    path: Path,
    hosts: Sequence[Wanted],
    *,
    ssh: Mapping[str, Any],
    prefix: str | None = None,
    found: Found | None = None,
    prompts: Prompts | None = None,
    emit: Emit,
    typed: CommandLine = UNTYPED,
) -> Created:
    """Enroll the nodes of a new inventory, read their names, GPUs and networks, and write it.

    Nothing is written if no node can be reached. A node that fails while others succeed gets its line too, with what is
    known of it.

    Args:
        path: the inventory, which does not exist yet.
        hosts: the nodes.
        ssh: ``user``, ``port``, ``key`` and ``jump_hosts`` of the inventory, as far as they are known.
        prefix: the inventory's prefix.
        found: the other tool's file, if one names the hosts.
        prompts: answer questions about passwords and host keys.
        emit: receives events.
        typed: the command line, for hints.

    Raises:
        UsageError: ``path`` already exists, or cannot be written.
        InventoryError: the hosts make no valid inventory.
        NodesFailedError: no node could be enrolled.
    """
    if path.exists():
        raise UsageError(f"{path} already exists", hint="to enroll its nodes: clusterctl init")
    settings: dict[str, Any] = {"prefix": prefix or DEFAULT_PREFIX, "ssh": dict(ssh)}
    if "key" not in ssh and (key := default_key()):
        settings["ssh"]["key"] = key
    sketch = _checked(path, draft_nodes(hosts), settings, hosts, found)
    with Session(sketch, prompts=prompts, emit=emit, typed=typed) as session:
        enrolled = enrol_nodes(session)
    failed = enrolled.reasons
    ready = [node for node in sketch.nodes if node.name not in failed]
    then = "then add the missing facts to the inventory, and run: clusterctl init"
    if not ready:
        raise _not_enrolled(
            failed, len(hosts), _next(enrolled, f"nothing was written; then: {session.again(command='init')}")
        )
    facts = ask_facts(sketch, ready, emit)
    places = {index: facts[node.name] for index, node in enumerate(sketch.nodes) if node.name in facts}
    nodes, notes = describe_nodes(hosts, places)
    names = {old.name: new.name for old, new in zip(sketch.nodes, nodes, strict=True)}
    groups, left_out = found.kept_groups([node.name for node in nodes]) if found else ({}, ())
    for note in left_out:
        emit(Notice(note, "warning"))
    _checked(path, nodes, settings, hosts, found)
    text = writing.inventory_text(nodes, **settings, groups=groups, notes=notes)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(json_schema.MODELINE * json_schema.copy_beside(path) + text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    states = {names[name]: answer.state for name, answer in enrolled.ok.items()}
    return Created(path, text, states, {names[name]: why for name, why in failed.items()}, _next(enrolled, then))


def foreign(path: Path, *, group: str | None = None, emit: Emit) -> Found:
    """The nodes of an Ansible inventory, a hostfile or ClusterShell's groups; other entries are reported.

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

    The user has not seen the text, so a mistake names the source of the value: the command line or another tool's file.
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
        return loading.parse(writing.inventory_text(nodes, **settings, ranges=False), path.absolute(), origin=origin)
    except InventoryError as error:
        raise InventoryError(
            f"no inventory was written: {path} would have " + str(error).rpartition(" has ")[2],
            problems=error.problems,
            hint=f"correct {found.name} and run the command again"
            if file and found
            else "correct it on the command line",
        ) from error


def _not_enrolled(failed: Mapping[str, str], count: int, what_next: str) -> NodesFailedError:
    return NodesFailedError(f"{len(failed)} of {count} nodes could not be enrolled", reasons=failed, hint=what_next)


def _next(enrolled: Outcome[Enrolled], then: str) -> str:
    if "clusterctl init" in enrolled.hints and not enrolled.session.can_ask:
        command = enrolled.session.again(command="init")
        return f"run it on a terminal, where it can ask about host keys and passwords: {command}"
    return enrolled.hint(then)


def ask_facts(inventory: Inventory, nodes: Sequence[Node], emit: Emit) -> Mapping[str, Facts]:
    """Read the facts of nodes. A node that does not answer gets a warning; only its address is known."""
    with Session(inventory, nodes, emit=emit) as session:
        outcome = session.ask(
            "ask",
            "Reading the nodes' GPUs and networks",
            render("enrol/ask.sh.j2"),
            lambda _, out: read_facts(out),
            deadline=_DEADLINE,
        )
    if outcome.failed:
        why = next(iter(outcome.failed.values()))
        session.warn(f"{fold(outcome.failed)}: GPUs and networks are not known: {why.error}")
    return outcome.ok
