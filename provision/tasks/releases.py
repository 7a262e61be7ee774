"""``clusterctl releases``, ``rollback``, ``prune`` and ``verify``: the releases on the nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from provision.env.release import catalog, install
from provision.env.release.catalog import ReleasePaths, Releases
from provision.errors import PreflightError, UsageError
from provision.model import Finding, Found, Node, Step
from provision.session import Lock, Outcome, Sharing
from provision.ssh.remote import reading

if TYPE_CHECKING:
    from provision.session import Session

_DEADLINE = 120.0
_VERIFY_DEADLINE = 3600.0  # every file of a release is read
_NO_SHARING = Sharing({})


@dataclass(frozen=True)
class Switched:
    """The result of ``rollback``: by node name, the release before and after."""

    nodes: Mapping[str, tuple[str, str]]

    @property
    def changed(self) -> bool:
        """Whether any node was switched."""
        return any(before != after for before, after in self.nodes.values())


@dataclass(frozen=True)
class Pruned:
    """The result of ``prune``, by node name: removed releases, and releases that stay since a process uses them."""

    removed: Mapping[str, tuple[str, ...]]
    in_use: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dry_run: bool = False


@dataclass(frozen=True)
class Verified:
    """The result of ``verify``.

    Attributes:
        findings: one for each node that answered.
        absent: the nodes without a release to verify; they have a finding too.
        unread: the other nodes, with the reason.
        hints: the next commands for the user.
    """

    findings: tuple[Finding, ...]
    absent: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    hints: tuple[str, ...] = ()


def releases(session: Session) -> Outcome[Releases]:
    """The releases of every node.

    Raises:
        NodesFailedError: no node answered.
    """
    found = _list(session)
    if not found.ok:
        found.required()
    return found


def rollback(session: Session, to: str | None = None) -> Switched:
    """Make the previous release, or ``to``, the current one again, in one rename on each node.

    Raises:
        PreflightError: a node has no such release; nothing was changed.
        NodesFailedError: some nodes failed; the others are done.
    """
    lock = Lock.of_releases(session.inventory)
    with session.locked(lock) as sharing:
        found = _list(session).required()
        goals = _rollback_goals(session, found, to)
        before = {name: has.current or "none" for name, has in found.items()}
        plan = {
            node.name: [install.switch_step(ReleasePaths.of(session.inventory, goals[node.name]))]
            for node in sharing.own(session.nodes)
            if before[node.name] != goals[node.name]
        }
        session.apply("apply", "Switching back", plan, lock=lock, deadline=_DEADLINE).required()
    return Switched({name: (before[name], goal) for name, goal in goals.items()})


def prune(session: Session, keep: int = 2) -> Pruned:
    """Remove old releases and leftovers of failed deploys; never the current release, nor one that a process uses.

    Args:
        session: the command's session.
        keep: how many releases stay on each node, including the current one.

    Raises:
        NodesFailedError: some nodes failed; the others are done.
    """
    if keep < 1:
        raise UsageError("the current release always stays", hint=session.again(command="prune", keep="1"))
    lock = Lock.of_releases(session.inventory)
    # The lock is a folder on the nodes, which a dry run does not create. The lists also show which nodes share one.
    holding: AbstractContextManager[Sharing] = nullcontext(_NO_SHARING) if session.dry_run else session.locked(lock)
    with holding as held:
        found = _list(session, used=True).required()
        sharing = _sharing_of(session.nodes, found) if session.dry_run else held
        own = sharing.own(session.nodes)
        used = frozenset(
            release
            for node in session.nodes
            if sharing.owner(node)  # these releases must stay in its owner's folder
            for release in (*found[node.name].used, found[node.name].current or "")
        )
        old = {node.name: _without(found[node.name].removable(keep), used) for node in own}
        removed = {node.name: (*old[node.name], *found[node.name].left) for node in own}
        plan = {name: _removal(session, old[name], found[name].left) for name in removed if removed[name]}
        if not session.dry_run:
            session.apply("apply", "Removing old releases", plan, lock=lock, deadline=_VERIFY_DEADLINE).required()
    in_use = {name: _without(has.used, {has.current}) for name, has in found.items()}
    return Pruned(removed, {name: names for name, names in in_use.items() if names}, dry_run=session.dry_run)


def verify_release(session: Session, release: str | None = None) -> Verified:
    """Compare the current release of every node, or ``release``, with the deployed files. Reads every file.

    Raises:
        PreflightError: no node has a release of this name.
    """
    listing = catalog.list_script(session.inventory)

    def compare(node: Node) -> tuple[bool, Finding]:
        out = session.run(node, listing, deadline=_DEADLINE).out
        with reading(node):
            has = catalog.read_listing(out)
        goal = _find_release(release, (*has.complete, *has.broken)) if release else has.current
        if goal is None:
            return False, catalog.absent_finding(node.name, has, release)
        script = catalog.verify_script(ReleasePaths.of(session.inventory, goal).release)
        out = session.run(node, script, deadline=_VERIFY_DEADLINE).out
        with reading(node):
            return True, catalog.verify_finding(node.name, goal, out)

    outcome = session.work(
        "verify", "Comparing every file", compare, state=_state, wrong=lambda found: not _is_good(found)
    )
    absent = {name: finding for name, (is_there, finding) in outcome.ok.items() if not is_there}
    if release and absent and len(absent) == len(outcome.ok):
        raise PreflightError(
            f"no node has a release {release}",
            reasons={name: finding.observed for name, finding in absent.items()} | outcome.reasons,
            hint="clusterctl releases",
        )
    findings = tuple(finding for _, finding in outcome.ok.values())
    for finding in findings:
        if finding.verdict != "OK":
            session.emit(Found(finding))
    return Verified(findings, tuple(absent), outcome.reasons, outcome.hints)


def _rollback_goals(session: Session, found: Mapping[str, Releases], to: str | None) -> dict[str, str]:
    """The release that each node switches back to.

    Raises:
        PreflightError: a node has none, or the nodes would switch to different ones.
    """
    goals = {name: has.previous if to is None else _find_release(to, has.complete) for name, has in found.items()}
    chosen = {name: goal for name, goal in goals.items() if goal is not None}
    if len(chosen) < len(goals):
        what = f"no release {to}" if to else "no earlier release"
        raise PreflightError(
            f"{len(goals) - len(chosen)} of {len(goals)} nodes cannot go back; nothing was changed",
            reasons={
                name: f"has {what}; it has: {', '.join(found[name].complete) or 'none'}"
                for name in goals
                if name not in chosen
            },
            hint="clusterctl releases",
        )
    if to is None and len(set(chosen.values())) > 1:
        raise PreflightError(
            "the nodes' previous releases differ; nothing was changed",
            reasons={name: f"would go back from {found[name].current} to {goal}" for name, goal in chosen.items()},
            hint="name one: " + session.again(command="rollback", to="RELEASE"),
        )
    return chosen


def _sharing_of(nodes: Sequence[Node], found: Mapping[str, Releases]) -> Sharing:
    """Which nodes have the same folder of releases, from their lists. The first of them owns it."""
    first: dict[str, str] = {}
    for node in nodes:
        if found[node.name].same:
            first.setdefault(found[node.name].same, node.name)
    owners = {node.name: first.get(found[node.name].same, node.name) for node in nodes}
    return Sharing({name: "" if owner == name else owner for name, owner in owners.items()})


def _list(session: Session, *, used: bool = False) -> Outcome[Releases]:
    script = catalog.list_script(session.inventory, used=used)

    def read(node: Node) -> Releases:
        out = session.run(node, script, deadline=_DEADLINE).out
        with reading(node):
            return catalog.read_listing(out)

    return session.each(read)


def _removal(session: Session, old: Sequence[str], left: Sequence[str]) -> list[Step]:
    """The steps that remove releases and leftovers of failed deploys."""
    return [
        *(install.remove_step(ReleasePaths.of(session.inventory, release)) for release in old),
        install.discard_step("leftovers", [f"{session.inventory.root}/releases/{name}" for name in left]),
    ]


def _find_release(beginning: str, releases: Iterable[str]) -> str | None:
    """The release whose name starts with ``beginning``; None if there is none."""
    found = [release for release in releases if release.startswith(beginning)]
    if len(found) > 1:
        raise UsageError(f"{beginning} is ambiguous: {' or '.join(found)}", hint="add more characters of the name")
    return found[0] if found else None


def _without(names: Iterable[str], kept: Collection[str | None]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in kept)


def _is_good(found: tuple[bool, Finding]) -> bool:
    return found[1].verdict == "OK"


def _state(found: tuple[bool, Finding]) -> str:
    return "no release" if not found[0] else "OK" if _is_good(found) else "differs"
