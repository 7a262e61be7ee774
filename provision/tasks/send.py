"""Bring a release's files to the nodes that lack them: linked or made from what is there, the rest sent."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from provision.env.release import steps
from provision.env.release.derive import Recipe, recipe
from provision.env.release.examine import NodeFacts, lacks_space
from provision.env.release.legs import Payload
from provision.env.release.paths import ReleasePaths
from provision.env.report.words import size
from provision.errors import ClusterctlError
from provision.inventory import fold
from provision.model import Emit, Inventory, Leg, Node, Notice, StageFinished, StageStarted, Wire
from provision.script import whole
from provision.ssh.remote import Connections, fan_out, reading
from provision.tasks.answers import reason
from provision.tasks.hold import Lock
from provision.transfer import Target, transfer

GATHER_DEADLINE = 3600.0  # reading and linking every file of a release, on a slow disk


@dataclass
class Sent:
    """What became of the sending.

    Attributes:
        bytes: that left this machine.
        failed: the nodes that failed, each with its reason.
        seconds: of gathering, verifying and sending.
    """

    bytes: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _There:
    """What a node has of a release that it is to get: keys of legs, paths of rewritten files, bytes for the rest."""

    keys: frozenset[str]
    made: frozenset[str]
    free: int | None

    def lacks(self, leg: Leg) -> bool:
        return not self.keys & {leg.key, leg.group}


def send(
    inventory: Inventory,
    nodes: Sequence[Node],
    connections: Connections,
    lock: Lock,
    payload: Payload,
    places: ReleasePaths,
    facts: Mapping[str, NodeFacts],
    *,
    repair: bool,
    relay: bool,
    emit: Emit,
) -> Sent:
    """Unpack the release beside the others on every node of ``nodes``.

    Raises:
        BundleError: the bundle is damaged; nothing was sent then.
    """
    sent = Sent()
    began = time.monotonic()
    there = _gather(inventory, nodes, connections, lock, payload, places, facts, repair=repair, sent=sent, emit=emit)
    sent.seconds["gather"] = time.monotonic() - began
    wires: dict[str, Wire] = {name: "zstd" if "zstd" in facts[name].tools else "plain" for name in there}
    wanted: set[str] = set()
    for name, has in tuple(there.items()):
        lacking = [leg.key for leg in payload.legs(wires[name], has.made) if has.lacks(leg)]
        if problem := lacks_space(replace(facts[name], free_bytes=has.free), payload.unpacked(lacking), 0):
            sent.failed[name] = problem
            del there[name]
        wanted.update(lacking)
    if not there:
        return sent
    began = time.monotonic()
    payload.bundle.verify(emit, payload.chunks(wanted))
    sent.seconds["verify"] = time.monotonic() - began
    sent.seconds["send"] = 0.0
    # Only nodes that made the same files themselves get the same last leg: nearly always all of them do.
    for made in dict.fromkeys(has.made for has in there.values()):
        group = [node for node in nodes if node.name in there and there[node.name].made == made]
        targets = [
            Target(
                node=node,
                folder=places.transfer,
                into=places.incoming,
                wire=wires[node.name],
                has_ssh="ssh" in facts[node.name].tools,
            )
            for node in group
        ]
        legs = {wire: payload.legs(wire, made) for wire in {target.wire for target in targets}}
        began = time.monotonic()
        names = [node.name for node in group]
        title = f"Sending {payload.bundle.manifest.name} ({places.release_id}) to {fold(names)}"
        emit(StageStarted("send", title, None, "bytes"))
        result = transfer(inventory, targets, connections, legs, relay=relay, emit=emit)
        sent.bytes += result.sent
        sent.seconds["send"] += time.monotonic() - began
        states = {name: "failed" if result.errors.get(name) else "received" for name in names}
        summary = f"{size(result.sent)} left this machine"
        emit(StageFinished("send", time.monotonic() - began, states, summary))
        for node in group:
            if error := result.errors.get(node.name):
                sent.failed[node.name] = reason(error, inventory, node)
    return sent


def _gather(
    inventory: Inventory,
    nodes: Sequence[Node],
    connections: Connections,
    lock: Lock,
    payload: Payload,
    places: ReleasePaths,
    facts: Mapping[str, NodeFacts],
    *,
    repair: bool,
    sent: Sent,
    emit: Emit,
) -> dict[str, _There]:
    """Begin the release on every node; by node name, what it has of it already."""
    began = time.monotonic()
    emit(StageStarted("gather", "Looking for what is there already", len(nodes), "nodes"))
    bases = {node.name: _base(facts[node.name], places) for node in nodes}
    recipes = {base: _recipe(payload, places, base) for base in set(bases.values())}

    def ask(node: Node) -> tuple[_There, list[str]]:
        base = bases[node.name]
        script = lock.guarded(steps.gather(places, repair=repair, base=base))
        wanted = steps.wanted(payload.keys, recipes[base])
        result = connections[node].run(script, stdin=[wanted], deadline=GATHER_DEADLINE)
        if result.rc != 0 or not result.out.endswith("end\n"):
            raise ClusterctlError(" ".join(result.err.split()) or "could not begin the release")
        rows = [line.split() for line in result.out.splitlines()]
        entries = recipes[base].entries
        with reading(node):
            found = _There(
                keys=frozenset(row[1] for row in rows if row[:1] == ["have"]),
                made=frozenset(entries[whole(row[1])].path for row in rows if row[:1] == ["made"]),
                free=next((whole(row[1]) for row in rows if row[:1] == ["free"]), None),
            )
            return found, list(dict.fromkeys(row[1] for row in rows if row[:1] == ["damaged"]))

    answers = fan_out(nodes, ask)
    there: dict[str, _There] = {}
    states: dict[str, str] = {}
    for node in nodes:
        answer = answers[node.name]
        if isinstance(answer, ClusterctlError):
            sent.failed[node.name] = reason(answer, inventory, node)
            states[node.name] = "failed"
            continue
        there[node.name], damaged = answer
        states[node.name] = f"{len(there[node.name].keys)} of {len(payload.keys)} chunks"
        for release in damaged:
            emit(
                Notice(
                    f"{node.name}: release {release} was changed after its deploy; what differs is not reused "
                    f"(clusterctl verify --limit {node.name} names it)",
                    "warning",
                )
            )
    emit(StageFinished("gather", time.monotonic() - began, states))
    return there


def _base(facts: NodeFacts, places: ReleasePaths) -> str:
    """The release that a node runs now, when it is another one; empty if there is none."""
    current = PurePosixPath(facts.prefix_link or "").name
    return current if current != places.release_id else ""


def _recipe(payload: Payload, places: ReleasePaths, base: str) -> Recipe:
    """How to make rewritten files from those of the release ``base``."""
    if not base:
        return Recipe()
    old = PurePosixPath(places.releases) / base
    return recipe(payload.bundle.manifest, payload.bundle.prefix_files(), payload.relocated, old)
