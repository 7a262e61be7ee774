"""``clusterctl deploy``: make a bundle the current release on every node.

The stages of ``deploy`` in order: services, examine, relocate, lock, gather, send, activate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from provision.env.bundle.reader import Bundle, open_bundle
from provision.env.release import examine, install
from provision.env.release.catalog import ReleasePaths
from provision.env.release.examine import Action, NodeFacts
from provision.env.release.install import Payload, Recipe, derive_recipe
from provision.env.relocation import relocate
from provision.errors import BundleError, ClusterctlError, NodesFailedError, PreflightError, UsageError
from provision.model import Node, Part, Step, Wire
from provision.script import compile_steps, whole
from provision.services.kit.scripts import REVIEW
from provision.session import Failure, Lock, Outcome, Sharing
from provision.session.sending import Sent, send
from provision.ssh.remote import reading
from provision.tasks import services
from provision.tasks.services import ServicesResult
from provision.transfer import Target, clean, keys, prepare

if TYPE_CHECKING:
    from provision.session import Session

EXAMINE_DEADLINE = 60.0
GATHER_DEADLINE = 3600.0  # reading and linking every file of a release, on a slow disk
SMOKE_DEADLINE = 600.0
_TIMED = ("gather", "verify", "send", "activate")


@dataclass(frozen=True)
class DeployOptions:
    """Options of a deploy.

    Attributes:
        scripts_to: with a dry run, a folder for the scripts, for review.
        relay: nodes may pass bytes on to other nodes.
        repair: replace an existing release; intact files are not sent.
        accept_unrewritable: continue even if some files will keep the old prefix.
        services: apply the inventory's services first.
    """

    scripts_to: Path | None = None
    relay: bool = True
    repair: bool = False
    accept_unrewritable: bool = False
    services: bool = True


@dataclass(frozen=True)
class DeployResult:
    """The result of a deploy.

    Attributes:
        release_id: the release.
        states: by node name ``unchanged``, ``deployed``, ``repaired``, or what a deploy would do.
        bytes_sent: by this machine, to all nodes.
        seconds: of each stage.
        steps: seconds of each step of the activation, on the slowest node.
        dry_run: nothing was changed.
        services: the result for node services; None if they were skipped.
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
        """Whether any node was, or would be, changed."""
        return any(state != Action.NOTHING.value for state in self.states.values())


@dataclass(frozen=True)
class _Release:
    """A release to deploy: its files, the lock on its folder, and the steps that make it current."""

    payload: Payload
    paths: ReleasePaths
    lock: Lock
    activating: tuple[Step, ...]
    repair: bool


@dataclass(frozen=True)
class _Existing:
    """A node's existing files of a release: keys of parts, paths of derived files, free bytes, damaged releases."""

    keys: frozenset[str]
    rewritten: frozenset[str]
    free: int | None
    damaged: tuple[str, ...]

    def lacks(self, part: Part) -> bool:
        return not self.keys & {part.key, part.group}


_DEFAULT = DeployOptions()


def deploy(session: Session, bundle_path: Path, options: DeployOptions = _DEFAULT) -> DeployResult:
    """Make a bundle the current release at the inventory's prefix on every node.

    Raises:
        BundleError: the file is not a bundle or is damaged, or some files cannot work at the prefix.
        PreflightError: nodes cannot take the release; nothing was changed.
        NodesFailedError: some nodes failed; the others are done.
    """
    bundle = open_bundle(bundle_path)
    paths = ReleasePaths.of(session.inventory, bundle.manifest.release_id)
    serviced = _apply_services(session, options)
    earlier = dict(session.seconds)
    facts = _examine(session, bundle, paths, repair=options.repair)
    actions = {name: examine.action(fact, paths, repair=options.repair) for name, fact in facts.items()}
    _remove_old_keys(session, [node for node in session.nodes if facts[node.name].relay_left], paths)
    todo = [node for node in session.nodes if actions[node.name] is not Action.NOTHING]
    planned = {name: action.value for name, action in actions.items()}
    if not todo and options.scripts_to is None:
        return DeployResult(paths.release_id, planned, dry_run=session.dry_run, services=serviced)
    release = _relocate(session, bundle, paths, options)
    if options.scripts_to is not None:
        gather = install.gather_script(paths, repair=options.repair)
        write_scripts(options.scripts_to, session.nodes, gather, release.activating)
    if session.dry_run:
        return DeployResult(paths.release_id, planned, dry_run=True, services=serviced)
    with session.locked(release.lock, on=todo) as sharing:
        receivers = [node for node in sharing.own(todo) if actions[node.name].sends]
        sent = _send(session, release, receivers, facts, relay=options.relay)
        activated = activate_all(todo, sharing, sent.outcome, lambda nodes: _activate(session, release, nodes))
    (sent.outcome & activated).required()
    return DeployResult(
        paths.release_id,
        planned | {node.name: _done(actions[node.name], sharing.owner(node)) for node in todo},
        sent.bytes,
        {key: session.seconds[key] - earlier.get(key, 0.0) for key in _TIMED if key in session.seconds},
        _slowest(activated),
        services=serviced,
    )


def _apply_services(session: Session, options: DeployOptions) -> ServicesResult | None:
    if not (options.services and session.inventory.services):
        return None
    try:
        return services.apply(session, scripts_to=options.scripts_to)
    except NodesFailedError as error:
        error.nothing_done = True  # of the deploy itself
        raise


def _examine(session: Session, bundle: Bundle, paths: ReleasePaths, *, repair: bool) -> Mapping[str, NodeFacts]:
    """Examine every node; one error names all nodes that cannot take the release."""
    outcome = session.ask(
        "examine",
        "Examining nodes",
        examine.examine(session.inventory, paths.release_id, keys.comment_prefix(session.inventory)),
        lambda _, out: examine.read_facts(out),
        deadline=EXAMINE_DEADLINE,
        state=lambda facts: examine.action(facts, paths, repair=repair).value,
    )
    problems = {name: examine.judge(facts, session.inventory, bundle.manifest) for name, facts in outcome.ok.items()}
    refused = {name: problem for name, problem in problems.items() if problem}
    return outcome.refuse(refused).required(cannot="cannot take the environment")


def _remove_old_keys(session: Session, nodes: Sequence[Node], paths: ReleasePaths) -> None:
    """Remove the ssh keys that the relay of a killed deploy left, unless another deploy is running there."""
    if nodes and not session.dry_run:
        with suppress(PreflightError), session.locked(Lock.of_releases(session.inventory), on=nodes):
            clean(session.inventory, nodes, session.connections, paths.releases)


def _relocate(session: Session, bundle: Bundle, paths: ReleasePaths, options: DeployOptions) -> _Release:
    """The release, with the files that contain the prefix rewritten for its path."""
    relocated = relocate(bundle.manifest, bundle.prefix_files(), paths.root / "releases" / paths.release_id)
    for warning in relocated.warnings:
        session.warn(warning)
    if relocated.unrewritable:
        listed = "\n".join(f"  {path}: {why}" for path, why in relocated.unrewritable)
        text = f"{len(relocated.unrewritable)} files cannot work at {paths.root}:\n{listed}"
        if not options.accept_unrewritable:
            again = session.again("--accept-unrewritable")
            raise BundleError(text, hint=f"choose a shorter prefix in the inventory, or continue without them: {again}")
        session.warn(text)
    naming = install.conda_name_steps(session.inventory, bundle.manifest)
    return _Release(
        Payload(bundle, relocated),
        paths,
        Lock.of_releases(session.inventory),
        tuple(install.activate_steps(paths, bundle.manifest, relocated, repair=options.repair, naming=naming)),
        options.repair,
    )


def _send(
    session: Session, release: _Release, nodes: Sequence[Node], facts: Mapping[str, NodeFacts], *, relay: bool
) -> Sent:
    """Provide nodes with the release's files: link or derive them from existing files where possible, send the rest.

    Raises:
        BundleError: the bundle is damaged; nothing was sent.
    """
    payload, paths = release.payload, release.paths
    gathered = _gather(session, release, nodes, facts)
    # Only nodes that derived the same files get the same last part. Nearly always, all of them did.
    groups = {existing.rewritten: payload.parts("plain", existing.rewritten) for existing in gathered.ok.values()}
    lacking = {
        name: [part.key for part in groups[existing.rewritten] if existing.lacks(part)]
        for name, existing in gathered.ok.items()
    }
    small = {
        name: examine.lacks_space(
            replace(facts[name], free_bytes=gathered.ok[name].free), payload.unpacked(lacking[name]), 0
        )
        for name in lacking
    }
    ready = gathered.refuse({name: why for name, why in small.items() if why})
    if not ready.ok:
        return Sent(ready)
    payload.bundle.verify(session.emit, payload.chunks({key for name in ready.ok for key in lacking[name]}))
    wires, brought = _wires(session, release, ready.of(nodes), facts, lacking)
    sent = Sent(ready, brought)
    for rewritten in dict.fromkeys(existing.rewritten for existing in ready.ok.values()):
        group = [node for node in ready.of(nodes) if ready.ok[node.name].rewritten == rewritten]
        parts = {wires[node.name]: payload.parts(wires[node.name], rewritten) for node in group}
        targets = [
            Target(node, paths.transfer, paths.incoming, wires[node.name], "ssh" in facts[node.name].tools)
            for node in group
        ]
        what = f"{payload.bundle.manifest.name} ({paths.release_id})"
        group_sent = send(session, "send", what, targets, parts, relay=relay)
        sent = Sent(sent.outcome & group_sent.outcome, sent.bytes + group_sent.bytes)
    return sent


def _wires(
    session: Session,
    release: _Release,
    nodes: Sequence[Node],
    facts: Mapping[str, NodeFacts],
    lacking: Mapping[str, Sequence[str]],
) -> tuple[Mapping[str, Wire], int]:
    """How each node receives bytes, and the bytes sent for that.

    A node without zstd gets the program first, if it lacks enough to be worth it.
    """
    has = {node.name for node in nodes if "zstd" in facts[node.name].tools}
    poor = [
        node
        for node in nodes
        if node.name not in has and release.payload.unpacked(lacking[node.name]) >= prepare.BRING_FROM
    ]
    working, sent = prepare.bring_zstd(session.connections, poor, release.paths.transfer)
    return {node.name: "zstd" if node.name in has | working else "plain" for node in nodes}, sent


def _gather(
    session: Session, release: _Release, nodes: Sequence[Node], facts: Mapping[str, NodeFacts]
) -> Outcome[_Existing]:
    """Start the release on every node from the node's existing files."""
    payload, paths = release.payload, release.paths
    bases = {node.name: _base(facts[node.name], paths) for node in nodes}
    recipes = {base: _recipe(payload, paths, base) for base in set(bases.values())}

    def gather(node: Node) -> _Existing:
        base = bases[node.name]
        script = release.lock.guarded(install.gather_script(paths, repair=release.repair, base=base))
        wanted = install.gather_input(payload.keys, recipes[base])
        result = session.run(node, script, stdin=wanted, deadline=GATHER_DEADLINE)
        if result.rc != 0 or not result.out.endswith("end\n"):
            raise ClusterctlError(" ".join(result.err.split()) or "could not create the release's folder")
        rows = [line.split() for line in result.out.splitlines()]
        entries = recipes[base].entries
        with reading(node):
            return _Existing(
                keys=frozenset(row[1] for row in rows if row[:1] == ["have"]),
                rewritten=frozenset(entries[whole(row[1])].path for row in rows if row[:1] == ["made"]),
                free=next((whole(row[1]) for row in rows if row[:1] == ["free"]), None),
                damaged=tuple(dict.fromkeys(row[1] for row in rows if row[:1] == ["damaged"])),
            )

    total = len(payload.keys)
    outcome = session.work(
        "gather",
        "Looking for existing files",
        gather,
        on=nodes,
        state=lambda existing: f"{len(existing.keys)} of {total} chunks",
        changes=True,
    )
    for name, existing in outcome.ok.items():
        for damaged in existing.damaged:
            session.warn(
                f"{name}: release {damaged} was changed after its deploy; its changed files are not reused "
                f"(clusterctl verify --limit {name} lists them)"
            )
    return outcome


def activate_all(
    nodes: Iterable[Node],
    sharing: Sharing,
    before: Outcome[Any],
    activate: Callable[[Sequence[Node]], Outcome[tuple[Any, ...]]],
) -> Outcome[tuple[Any, ...]]:
    """Activate on the nodes that own their folder, then on nodes that share the folder of another node.

    A node that shares the folder of a failed node is skipped, and its reason names that node. A failure on a sharing
    node does not affect other nodes.

    Args:
        nodes: the nodes.
        sharing: which of them share a folder.
        before: the outcome so far; failed nodes are skipped.
        activate: activates the release on some nodes.
    """
    nodes = tuple(nodes)
    done = activate([node for node in sharing.own(nodes) if node.name not in before.failed])
    failed = {**done.failed, **before.failed}
    others = [node for node in nodes if sharing.owner(node)]
    done &= activate([node for node in others if sharing.owner(node) not in failed])
    skipped = {
        node.name: Failure(f"shares its files with {owner}, which failed")
        for node in others
        if (owner := sharing.owner(node)) in failed
    }
    return done & Outcome(done.session, {}, skipped, changes=True)


def _activate(session: Session, release: _Release, nodes: Sequence[Node]) -> Outcome[tuple[Any, ...]]:
    """Complete the release, test it at its own path, then switch the prefix to it."""
    plan = {node.name: release.activating for node in nodes}
    return session.apply(
        "activate", "Testing and switching", plan, lock=release.lock, deadline=SMOKE_DEADLINE, state="current"
    )


def write_scripts(folder: Path, nodes: Sequence[Node], gather: str, activating: Sequence[Step]) -> None:
    """Write the scripts for review, one file for each node and stage.

    Raises:
        UsageError: the folder cannot be written.
    """
    text = compile_steps(activating, token=REVIEW)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for node in nodes:
            (folder / f"{node.name}-1-gather.sh").write_text(gather, encoding="utf-8")
            (folder / f"{node.name}-2-activate.sh").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the scripts to {folder}: {error.strerror}") from error


def _done(action: Action, owner: str) -> str:
    if owner:
        return f"shared with {owner}"
    return "repaired" if action is Action.REPAIR else "deployed"


def _slowest(activated: Outcome[tuple[Any, ...]]) -> dict[str, float]:
    """The seconds of each step on the slowest node."""
    done = [step for steps_done in activated.ok.values() for step in steps_done]
    return {
        name: max(step.seconds for step in done if step.name == name) for name in dict.fromkeys(s.name for s in done)
    }


def _base(facts: NodeFacts, paths: ReleasePaths) -> str:
    """The node's current release; empty if there is none or it is the release to deploy."""
    current = PurePosixPath(facts.prefix_link or "").name
    return current if current != paths.release_id else ""


def _recipe(payload: Payload, paths: ReleasePaths, base: str) -> Recipe:
    """How to derive rewritten files from the files of the release ``base``."""
    if not base:
        return Recipe()
    old = PurePosixPath(paths.releases) / base
    return derive_recipe(payload.bundle.manifest, payload.bundle.prefix_files(), payload.relocated, old)
