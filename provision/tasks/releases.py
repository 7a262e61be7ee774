"""``clusterctl releases``, ``rollback``, ``prune`` and ``verify``: the releases that lie on the nodes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from provision.env.release import steps, upkeep
from provision.env.release.paths import ReleasePaths
from provision.env.release.upkeep import Releases
from provision.errors import ClusterctlError, NodesFailedError, PreflightError, UsageError
from provision.hints import again
from provision.model import Emit, Finding, Found, Inventory, Node, Result, StageFinished, StageStarted, Step
from provision.script import compile_steps
from provision.ssh.remote import Connections, fan_out, reading
from provision.tasks.answers import failures, reason, split
from provision.tasks.hold import Lock, held

if TYPE_CHECKING:
    from provision.ssh.prompts import Prompts

_DEADLINE = 120.0
_VERIFY_DEADLINE = 3600.0  # every file of a release is read


@dataclass(frozen=True)
class Switched:
    """What ``rollback`` did: by node name, the release before and after."""

    nodes: Mapping[str, tuple[str, str]]

    @property
    def changed(self) -> bool:
        """Whether any node was switched."""
        return any(before != after for before, after in self.nodes.values())


@dataclass(frozen=True)
class Pruned:
    """What ``prune`` removed, or would, and what it left because a process runs from it; by node name."""

    removed: Mapping[str, tuple[str, ...]]
    in_use: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dry_run: bool = False


@dataclass(frozen=True)
class Verified:
    """What ``verify`` found.

    Attributes:
        findings: one for each node that was read.
        absent: the nodes that have no release to be verified; they have a finding too.
        unread: by name, why a node could not be read.
        hints: what their errors say is to be done.
    """

    findings: tuple[Finding, ...]
    absent: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    hints: tuple[str, ...] = ()


def releases(
    inventory: Inventory, nodes: Sequence[Node], *, prompts: Prompts | None = None
) -> tuple[dict[str, Releases], dict[str, str]]:
    """What lies on every node, and the nodes that did not answer, each with its reason.

    Raises:
        NodesFailedError: none answered.
    """
    with Connections(inventory, prompts) as connections:
        answers = _look(inventory, nodes, connections)
    silent = {
        node.name: reason(answer, inventory, node)
        for node in nodes
        if isinstance(answer := answers[node.name], ClusterctlError)
    }
    if len(silent) == len(nodes):
        split(inventory, nodes, answers, command="releases")
    return {name: answer for name, answer in answers.items() if isinstance(answer, Releases)}, silent


def rollback(
    inventory: Inventory, nodes: Sequence[Node], *, to: str | None = None, prompts: Prompts | None = None, emit: Emit
) -> Switched:
    """Make the previous release the current one again, in one rename on each node.

    Args:
        inventory: the cluster.
        nodes: those of its nodes that are meant.
        to: the release; None: the one that each node had before.
        prompts: how to ask for a password or about a host key.
        emit: is told about the progress.

    Raises:
        PreflightError: a node has no such release; nothing was changed anywhere.
        NodesFailedError: some nodes failed, the others are done.
    """
    lock = Lock.of_releases(inventory)
    with (
        Connections(inventory, prompts) as connections,
        held(inventory, nodes, connections, lock, "rollback") as shared,
    ):
        found = _list(inventory, nodes, connections, command="rollback")
        goals = {name: _goal(has, to) for name, has in found.items()}
        _refuse_missing(goals, found, to)
        chosen = {name: goal for name, goal in goals.items() if goal is not None}
        if to is None and len(set(chosen.values())) > 1:
            raise PreflightError(
                "the nodes' previous releases differ; nothing was changed",
                reasons={name: f"would go back from {found[name].current} to {goal}" for name, goal in chosen.items()},
                hint="name one: " + again(inventory.typed, "rollback", to="RELEASE"),
            )
        before = {name: has.current or "none" for name, has in found.items()}
        own = [node for node in nodes if not shared[node.name]]
        work = [node for node in own if before[node.name] != chosen[node.name]]
        plan = {node.name: [steps.switch(ReleasePaths.of(inventory, chosen[node.name]))] for node in work}
        _apply(inventory, work, connections, lock, plan, "Switching back", emit, "rollback")
    return Switched({name: (before[name], goal) for name, goal in chosen.items()})


def prune(
    inventory: Inventory,
    nodes: Sequence[Node],
    *,
    keep: int = 2,
    dry_run: bool = False,
    prompts: Prompts | None = None,
    emit: Emit,
) -> Pruned:
    """Remove old releases and what broken deploys left; never the current one, nor one that a process runs from.

    Args:
        inventory: the cluster.
        nodes: those of its nodes that are meant.
        keep: releases that stay on each node, the current one among them.
        dry_run: only say what would be removed.
        prompts: how to ask for a password or about a host key.
        emit: is told about the progress.

    Raises:
        NodesFailedError: some nodes failed, the others are done.
    """
    if keep < 1:
        raise UsageError("the current release always stays", hint=again(inventory.typed, "prune", keep="1"))
    lock = Lock.of_releases(inventory)
    with ExitStack() as stack:
        connections = stack.enter_context(Connections(inventory, prompts))
        if dry_run:  # the lock is a folder on the nodes: who shares the root is read off what lies there
            everywhere = _list(inventory, nodes, connections, command="prune", used=True)
            shared: Mapping[str, str] = _sharers(nodes, everywhere)
        else:
            shared = stack.enter_context(held(inventory, nodes, connections, lock, "prune"))
            everywhere = _list(inventory, nodes, connections, command="prune", used=True)
        own = [node for node in nodes if not shared[node.name]]
        used = _used_by_sharers(everywhere, shared)
        removable = {node.name: _unused(everywhere[node.name].removable(keep), used) for node in own}
        left = {node.name: everywhere[node.name].left for node in own}
        in_use = {name: tuple(r for r in has.used if r != has.current) for name, has in everywhere.items()}
        if not dry_run:
            work = [node for node in own if removable[node.name] or left[node.name]]
            plan = {
                node.name: [
                    *(steps.remove(ReleasePaths.of(inventory, release)) for release in removable[node.name]),
                    steps.discard("leftovers", [f"{inventory.root}/releases/{name}" for name in left[node.name]]),
                ]
                for node in work
            }
            _apply(inventory, work, connections, lock, plan, "Removing old releases", emit, "prune")
    removed = {name: (*names, *left[name]) for name, names in removable.items()}
    return Pruned(removed, {name: names for name, names in in_use.items() if names}, dry_run=dry_run)


def verify(
    inventory: Inventory,
    nodes: Sequence[Node],
    *,
    release: str | None = None,
    prompts: Prompts | None = None,
    emit: Emit,
) -> Verified:
    """Compare the current release of every node, or ``release``, with what was deployed: every file is read.

    A node that does not answer, or has no such release, keeps no other from being verified.

    Raises:
        PreflightError: no node has a release of the name ``release``.
    """
    with Connections(inventory, prompts) as connections:
        listing = upkeep.listing(inventory)
        began = time.monotonic()
        emit(StageStarted("verify", "Comparing every file", len(nodes), "nodes"))
        absent: dict[str, Finding] = {}

        def check(node: Node) -> Finding:
            result = connections[node].run(listing, deadline=_DEADLINE)
            with reading(node):
                has = upkeep.read_listing(result.out)
            goal = _named(release, (*has.complete, *has.broken)) if release else has.current
            if goal is None:
                absent[node.name] = upkeep.absent(node.name, has, release)
                return absent[node.name]
            script = upkeep.verify(ReleasePaths.of(inventory, goal).release)
            result = connections[node].run(script, deadline=_VERIFY_DEADLINE)
            with reading(node):
                return upkeep.findings(node.name, goal, result.out)

        answers = fan_out(nodes, check)
    unread = {
        node.name: reason(answer, inventory, node)
        for node in nodes
        if isinstance(answer := answers[node.name], ClusterctlError)
    }
    if release and absent and len(absent) + len(unread) == len(nodes):
        raise PreflightError(
            f"no node has a release {release}",
            reasons={name: finding.observed for name, finding in absent.items()} | unread,
            hint="clusterctl releases",
        )
    result = tuple(answer for node in nodes if isinstance(answer := answers[node.name], Finding))
    states = {finding.node: "as deployed" if finding.verdict == "OK" else "differs" for finding in result}
    states |= dict.fromkeys(absent, "no release") | dict.fromkeys(unread, "not verified")
    bad = sum(state != "as deployed" for state in states.values())
    emit(StageFinished("verify", time.monotonic() - began, states, failed=bad))
    for finding in result:
        if finding.verdict != "OK":
            emit(Found(finding))
    hints = dict.fromkeys(each.hint for each in answers.values() if isinstance(each, ClusterctlError) and each.hint)
    return Verified(result, tuple(node.name for node in nodes if node.name in absent), unread, tuple(hints))


def _goal(has: Releases, to: str | None) -> str | None:
    return has.previous if to is None else _named(to, has.complete)


def _named(beginning: str, releases: Iterable[str]) -> str | None:
    """The release whose name begins so; None if there is none."""
    found = [release for release in releases if release.startswith(beginning)]
    if len(found) > 1:
        raise UsageError(f"{beginning} may be {' or '.join(found)}", hint="name more of it")
    return found[0] if found else None


def _refuse_missing(goals: Mapping[str, str | None], found: Mapping[str, Releases], wanted: str | None) -> None:
    what = f"no release {wanted}" if wanted else "no release to go to"
    missing = {
        name: f"has {what}; there: {', '.join(found[name].complete) or 'none'}"
        for name, goal in goals.items()
        if goal is None
    }
    if missing:
        raise PreflightError(
            f"{len(missing)} of {len(goals)} nodes cannot do this; nothing was changed",
            reasons=missing,
            hint="clusterctl releases",
        )


def _sharers(nodes: Sequence[Node], found: Mapping[str, Releases]) -> dict[str, str]:
    """By node, the one before it that sees the same folder of releases; "" for the first, and for those that do not."""
    first: dict[str, str] = {}
    for node in nodes:
        if found[node.name].same:
            first.setdefault(found[node.name].same, node.name)
    before = {node.name: first.get(found[node.name].same, node.name) for node in nodes}
    return {name: "" if other == name else other for name, other in before.items()}


def _used_by_sharers(found: Mapping[str, Releases], shared: Mapping[str, str]) -> frozenset[str]:
    """Releases in use on nodes that see another node's files: those stay everywhere."""
    return frozenset(
        release for name, has in found.items() if shared[name] for release in (*has.used, has.current or "")
    )


def _unused(names: Sequence[str], used: frozenset[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in used)


def _list(
    inventory: Inventory, nodes: Sequence[Node], connections: Connections, *, command: str, used: bool = False
) -> dict[str, Releases]:
    return split(inventory, nodes, _look(inventory, nodes, connections, used=used), command=command)


def _look(
    inventory: Inventory, nodes: Sequence[Node], connections: Connections, *, used: bool = False
) -> dict[str, Releases | ClusterctlError]:
    script = upkeep.listing(inventory, used=used)

    def look(node: Node) -> Releases:
        out = connections[node].run(script, deadline=_DEADLINE).out
        with reading(node):
            return upkeep.read_listing(out)

    return fan_out(nodes, look)


def _apply(
    inventory: Inventory,
    nodes: Sequence[Node],
    connections: Connections,
    lock: Lock,
    plan: Mapping[str, Sequence[Step]],
    title: str,
    emit: Emit,
    command: str,
) -> None:
    """Run every node's steps; one error names those that failed."""
    if not nodes:
        return
    began = time.monotonic()
    emit(StageStarted("apply", title, len(nodes), "nodes"))
    tokens = {node.name: secrets.token_hex(8) for node in nodes}

    def act(node: Node) -> Result:
        script = lock.guarded(compile_steps(plan[node.name], token=tokens[node.name]))
        return connections[node].run(script, deadline=_VERIFY_DEADLINE)

    answers: dict[str, Result | ClusterctlError] = fan_out(nodes, act)
    failed = failures(inventory, nodes, answers, tokens)
    states = {node.name: "failed" if node.name in failed else "done" for node in nodes}
    emit(StageFinished("apply", time.monotonic() - began, states))
    if failed:
        raise NodesFailedError(
            f"failed on {len(failed)} of {len(nodes)} nodes; the others are done",
            reasons=failed,
            hint=f"fix what is named, then: {again(inventory.typed, command)}",
        )
