"""``clusterctl deploy``: a bundle becomes the current release on every node.

The order of the work is the order of this file's ``deploy``: services, examine, judge, relocate, lock, send, activate.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from provision.env.bundle.reader import Bundle, open_bundle
from provision.env.release import activation, examine, steps
from provision.env.release.legs import Payload
from provision.env.release.places import Places
from provision.env.relocation.relocate import Relocated, relocate
from provision.errors import BundleError, ClusterctlError, NodesFailedError, PreflightError, UsageError
from provision.hints import again
from provision.model import (
    CommandLine,
    Emit,
    Inventory,
    Node,
    Notice,
    Progress,
    Result,
    StageFinished,
    StageStarted,
    Step,
)
from provision.script import compile_steps, parse
from provision.services.kit.scripts import REVIEW
from provision.ssh.remote import Connections, fan_out, reading
from provision.tasks import services
from provision.tasks.answers import failures, split
from provision.tasks.hold import Lock, held
from provision.tasks.send import send
from provision.tasks.services import ServicesResult
from provision.transfer import clean, keys

if TYPE_CHECKING:
    from provision.ssh.prompts import Prompts

EXAMINE_DEADLINE = 60.0
SMOKE_DEADLINE = 600.0


@dataclass(frozen=True)
class DeployResult:
    """What a deploy did.

    Attributes:
        release_id: the release.
        states: by node name ``unchanged``, ``deployed``, ``repaired``, or what it would have done.
        bytes_sent: by this machine, to all nodes together.
        seconds: of each stage.
        steps: seconds of each step of the activation, on the node where it took longest.
        dry_run: nothing was done.
        services: what became of the node services; None where none were asked for.
    """

    release_id: str
    states: Mapping[str, str]
    bytes_sent: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[str, float] = field(default_factory=dict)
    dry_run: bool = False
    services: ServicesResult | None = None

    @property
    def changed(self) -> bool:
        """Whether the release was, or would be, brought to any node."""
        return any(state != "unchanged" for state in self.states.values())


def deploy(
    inventory: Inventory,
    nodes: Sequence[Node],
    bundle_path: Path,
    *,
    prompts: Prompts | None = None,
    dry_run: bool = False,
    scripts_to: Path | None = None,
    relay: bool = True,
    repair: bool = False,
    accept_unrewritable: bool = False,
    with_services: bool = True,
    emit: Emit,
) -> DeployResult:
    """Bring a bundle to the nodes as the release behind the inventory's prefix.

    Args:
        inventory: the cluster.
        nodes: those of its nodes that are meant.
        bundle_path: the bundle.
        prompts: how to ask for a password or about a host key; None: nobody can answer.
        dry_run: examine and say what would be done; nothing is written on any node.
        scripts_to: with ``dry_run``, a folder that the scripts are written to, for review.
        relay: nodes may pass the bytes on to one another.
        repair: bring the release again where it is there already; what is as it should be is not sent.
        accept_unrewritable: go on although some files will keep the old prefix.
        with_services: set up the inventory's services first.
        emit: is told about the progress.

    Raises:
        BundleError: the bundle is damaged or not a bundle, or holds files that cannot be made to work there.
        PreflightError: nodes that cannot take the release; nothing was changed anywhere.
        NodesFailedError: some nodes failed, the others are done.
    """
    bundle = open_bundle(bundle_path)
    places = Places.of(inventory, bundle.manifest.release_id)
    serviced = None
    with Connections(inventory, prompts) as connections:  # also for services: a password is asked for once
        if with_services and inventory.services:
            try:
                serviced = services.apply(
                    inventory, nodes, connections=connections, dry_run=dry_run, scripts_to=scripts_to, emit=emit
                )
            except NodesFailedError as error:
                error.nothing_done = True  # of the deploy itself
                raise
        facts = _examine(inventory, nodes, connections, bundle, places, repair=repair, emit=emit)
        todo = examine.describe(facts, places, repair=repair)
        work = [node for node in nodes if todo[node.name] != "unchanged"]
        if not dry_run:
            _forget(inventory, [node for node in nodes if facts[node.name].relay_left], connections, places)
        if not work and scripts_to is None:
            return DeployResult(places.release_id, todo, dry_run=dry_run, services=serviced)
        relocated = _relocate(bundle, places, inventory.typed, accept_unrewritable=accept_unrewritable, emit=emit)
        naming = activation.steps(inventory, bundle.manifest)
        activating = steps.activate(places, bundle.manifest, relocated, repair=repair, naming=naming)
        if scripts_to is not None:
            _write_scripts(scripts_to, nodes, steps.gather(places, repair=repair), activating)
        if dry_run:
            return DeployResult(places.release_id, todo, dry_run=dry_run, services=serviced)

        seconds: dict[str, float] = {}
        lock = Lock.of_releases(inventory)
        with held(inventory, work, connections, lock, "deploy") as shared:
            own = [node for node in work if not shared[node.name]]
            receivers = [node for node in own if todo[node.name] in ("send", "repair")]
            payload = Payload(bundle, relocated)
            sent = send(
                inventory, receivers, connections, lock, payload, places, facts, repair=repair, relay=relay, emit=emit
            )
            seconds |= sent.seconds
            failed = sent.failed

            began = time.monotonic()
            times = _activate_all(
                work, shared, failed, lambda these: _activate(these, connections, lock, activating, failed, emit)
            )
            seconds["activate"] = time.monotonic() - began
    if failed:
        raise _failed(inventory, failed, nodes)
    states = {node.name: "unchanged" for node in nodes} | {
        node.name: f"shared with {shared[node.name]}" if shared[node.name] else _past(todo[node.name]) for node in work
    }
    return DeployResult(places.release_id, states, sent.bytes, seconds, times, services=serviced)


def _forget(inventory: Inventory, nodes: Sequence[Node], connections: Connections, places: Places) -> None:
    """Remove the keys that the relay of a killed deploy has left, unless another one is at work there."""
    if nodes:
        with suppress(PreflightError), held(inventory, nodes, connections, Lock.of_releases(inventory), "deploy"):
            clean(inventory, nodes, connections, places.releases)


def _past(word: str) -> str:
    return {"repair": "repaired"}.get(word, "deployed")


def _failed(inventory: Inventory, failed: Mapping[str, str], nodes: Sequence[Node]) -> NodesFailedError:
    done = [node.name for node in nodes if node.name not in failed]
    return NodesFailedError(
        f"deploy failed on {len(failed)} of {len(nodes)} nodes",
        reasons=failed,
        hint=f"fix what is named, then: {again(inventory.typed, 'deploy')}"
        + (f"; {len(done)} nodes are done and stay unchanged" if done else ""),
    )


def _relocate(
    bundle: Bundle, places: Places, typed: CommandLine, *, accept_unrewritable: bool, emit: Emit
) -> Relocated:
    """The files that name the prefix, as they must be at the release's path."""
    relocated = relocate(bundle.manifest, bundle.prefix_files(), places.root / "releases" / places.release_id)
    for warning in relocated.warnings:
        emit(Notice(warning, "warning"))
    if relocated.unrewritable:
        listed = "\n".join(f"  {path}: {why}" for path, why in relocated.unrewritable)
        text = f"{len(relocated.unrewritable)} files cannot be made to work at {places.root}:\n{listed}"
        if not accept_unrewritable:
            raise BundleError(
                text,
                hint="choose a shorter prefix in the inventory, or go on without them: "
                + again(typed, "deploy", "--accept-unrewritable"),
            )
        emit(Notice(text, "warning"))
    return relocated


def _examine(
    inventory: Inventory,
    nodes: Sequence[Node],
    connections: Connections,
    bundle: Bundle,
    places: Places,
    *,
    repair: bool,
    emit: Emit,
) -> dict[str, examine.NodeFacts]:
    """Look at every node; one error names all that cannot take the release."""
    began = time.monotonic()
    emit(StageStarted("examine", "Examining nodes", len(nodes), "nodes"))
    script = examine.examine(inventory, places.release_id, keys.comment(inventory))

    def look(node: Node) -> examine.NodeFacts:
        out = connections[node].run(script, deadline=EXAMINE_DEADLINE).out
        with reading(node):
            return examine.read_facts(out)

    answers = fan_out(nodes, look)
    judged = {
        name: examine.judge(fact, inventory, bundle.manifest)
        for name, fact in answers.items()
        if isinstance(fact, examine.NodeFacts)
    }
    problems = {name: problem for name, problem in judged.items() if problem}
    facts = split(inventory, nodes, answers, command="deploy", also=problems)
    if problems:
        raise PreflightError(
            f"{len(problems)} of {len(nodes)} nodes cannot take the environment; nothing was changed",
            reasons=problems,
        )
    emit(StageFinished("examine", time.monotonic() - began, examine.describe(facts, places, repair=repair)))
    return facts


def _activate_all(
    work: Sequence[Node],
    shared: Mapping[str, str],
    failed: dict[str, str],
    activate: Callable[[Sequence[Node]], dict[str, float]],
) -> dict[str, float]:
    """Activate on the nodes that hold their root, then on those that see the same files; the steps' seconds.

    A node that fails keeps its own reason. One that shares the root of a failed node is not tested, and its reason
    names that node. A test that fails on a sharing node says nothing about the others.

    Args:
        work: the nodes.
        shared: by node name, the node that holds its root; "" for one that holds its own.
        failed: the nodes that failed so far, each with its reason; those that fail here are added.
        activate: activates on some nodes, and adds those that fail to ``failed``.
    """
    times = activate([node for node in work if not shared[node.name] and node.name not in failed])
    others = [node for node in work if shared[node.name]]
    activate([node for node in others if shared[node.name] not in failed])
    for node in others:
        owner = shared[node.name]
        if owner in failed:
            failed.setdefault(node.name, f"shares its files with {owner}, which failed")
    return times


def _activate(
    nodes: Sequence[Node],
    connections: Connections,
    lock: Lock,
    activating: Sequence[Step],
    failed: dict[str, str],
    emit: Emit,
) -> dict[str, float]:
    """Make what has arrived a release, test it at its own path, then switch the prefix to it; the steps' seconds."""
    if not nodes:
        return {}
    began = time.monotonic()
    emit(StageStarted("activate", "Testing and switching", len(nodes), "nodes"))
    tokens = {node.name: secrets.token_hex(8) for node in nodes}
    finished = itertools.count(1)

    def act(node: Node) -> Result:
        script = lock.guarded(compile_steps(activating, token=tokens[node.name]))
        result = connections[node].run(script, deadline=SMOKE_DEADLINE)
        emit(Progress("activate", next(finished), len(nodes)))
        return result

    answers: dict[str, Result | ClusterctlError] = fan_out(nodes, act)
    failed.update(failures(connections.inventory, nodes, answers, tokens))
    states = {node.name: "failed" if node.name in failed else "current" for node in nodes}
    emit(StageFinished("activate", time.monotonic() - began, states))
    results = [parse(tokens[name], answer.out) for name, answer in answers.items() if isinstance(answer, Result)]
    return {
        step.name: max(each.seconds for result in results for each in result if each.name == step.name)
        for result in results
        for step in result
    }


def _write_scripts(folder: Path, nodes: Sequence[Node], gather: str, activating: Sequence[Step]) -> None:
    """The scripts as they would run, one file for each node and stage."""
    text = compile_steps(activating, token=REVIEW)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for node in nodes:
            (folder / f"{node.name}-1-gather.sh").write_text(gather, encoding="utf-8")
            (folder / f"{node.name}-2-activate.sh").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the scripts to {folder}: {error.strerror}") from error
