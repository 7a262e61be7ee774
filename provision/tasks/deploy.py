"""``clusterctl deploy``: a bundle becomes the current release on every node.

The order of the work is the order of this file's ``deploy``: services, examine, judge, send, activate.
"""

from __future__ import annotations

import itertools
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from provision import services
from provision.env import payload, release
from provision.env.bundle import Bundle, open_bundle
from provision.env.relocate import Relocated, relocate
from provision.errors import BundleError, ClusterctlError, NodesFailedError, PreflightError, UsageError
from provision.inventory import fold, likely_typo
from provision.model import (
    Emit,
    Inventory,
    Node,
    Notice,
    Progress,
    Remote,
    Result,
    StageFinished,
    StageStarted,
    Step,
)
from provision.script import compile_steps, parse
from provision.ssh.remote import Connections, Prompts, RemoteError, fan_out
from provision.ssh.transfer import broadcast, bulk
from provision.tasks.pack import SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

EXAMINE_DEADLINE = 60.0
REVIEW = "review"  # the token of scripts that are written for people
SMOKE_DEADLINE = 600.0


@dataclass(frozen=True)
class DeployResult:
    """What a deploy did. ``states`` maps each node to ``unchanged``, ``deployed`` or what it would have done."""

    release_id: str
    states: Mapping[str, str]
    bytes_sent: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    dry_run: bool = False

    @property
    def changed(self) -> bool:
        """Whether anything was, or would be, done on any node."""
        return any(state != "unchanged" for state in self.states.values())


def find_bundle(folder: Path) -> Path:
    """The only bundle in a folder.

    Raises:
        UsageError: there is none, or more than one.
    """
    found = sorted(folder.glob(f"*{SUFFIX}"))
    if not found:
        raise UsageError(f"no bundle (*{SUFFIX}) in {folder}", hint="clusterctl pack-env")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise UsageError(f"several bundles in {folder}: {names}", hint=f"clusterctl deploy {found[0].name}")
    return found[0]


def deploy(
    inventory: Inventory,
    nodes: Sequence[Node],
    bundle_path: Path,
    *,
    prompts: Prompts | None = None,
    dry_run: bool = False,
    scripts_to: Path | None = None,
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
        emit: is told about the progress.

    Raises:
        UsageError: the inventory asks for a service that this version does not have.
        BundleError: the bundle is damaged or not a bundle.
        PreflightError: nodes that cannot take the release; nothing was changed anywhere.
        NodesFailedError: some nodes failed, the others are done.
    """
    services.refuse_unbuilt(inventory)
    bundle = open_bundle(bundle_path)
    relocated = relocate(bundle.manifest, bundle.prefix_files(), release.release_path(inventory, bundle.manifest))
    for warning in relocated.warnings:
        emit(Notice(warning, "warning"))
    if relocated.unrewritable:
        listed = "\n".join(f"  {path}: {why}" for path, why in relocated.unrewritable)
        raise BundleError(
            f"{len(relocated.unrewritable)} files cannot be made to work at {inventory.root}:\n{listed}",
            hint="choose a shorter prefix in the inventory",
        )

    send, activate = release.steps(inventory, bundle.manifest)
    if scripts_to is not None:
        _write_scripts(scripts_to, nodes, send, activate)
    with Connections(inventory, prompts) as connections:
        facts = _examine(inventory, nodes, connections, bundle, emit)
        todo = release.describe(facts, inventory, bundle.manifest)
        if dry_run or set(todo.values()) == {"unchanged"}:
            return DeployResult(bundle.manifest.release_id, todo, dry_run=dry_run)
        seconds: dict[str, float] = {}
        failed: dict[str, str] = {}

        receivers = [node for node in nodes if facts[node.name].release == "absent"]
        began = time.monotonic()
        sent = _send(inventory, receivers, connections, bundle, relocated, send, failed, emit) if receivers else 0
        seconds["send"] = time.monotonic() - began

        rest = [node for node in nodes if node.name not in failed and todo[node.name] != "unchanged"]
        began = time.monotonic()
        _activate(rest, connections, activate, failed, emit)
        seconds["activate"] = time.monotonic() - began

    if failed:
        done = [node.name for node in nodes if node.name not in failed]
        raise NodesFailedError(
            f"deploy failed on {len(failed)} of {len(nodes)} nodes",
            reasons=failed,
            hint="mend what is named and run the same command again"
            + (f"; {len(done)} nodes are done and stay unchanged" if done else ""),
        )
    states = {name: "unchanged" if state == "unchanged" else "deployed" for name, state in todo.items()}
    return DeployResult(bundle.manifest.release_id, states, sent, seconds)


def _examine(
    inventory: Inventory, nodes: Sequence[Node], connections: Connections, bundle: Bundle, emit: Emit
) -> dict[str, release.NodeFacts]:
    """Look at every node; one error names all that cannot take the release."""
    began = time.monotonic()
    emit(StageStarted("examine", "Examining nodes", len(nodes), "nodes"))
    script = release.examine(inventory, bundle.manifest)

    def look(node: Node) -> release.NodeFacts:
        return release.read_facts(connections[node].run(script, deadline=EXAMINE_DEADLINE).out)

    answers = fan_out(nodes, look)
    facts: dict[str, release.NodeFacts] = {}
    unreachable: dict[str, str] = {}
    problems: dict[str, str] = {}
    for node in nodes:
        answer = answers[node.name]
        if isinstance(answer, ClusterctlError):
            unreachable[node.name] = reason(answer, inventory, node)
        else:
            facts[node.name] = answer
            problem = release.judge(answer, inventory, bundle.manifest)
            if problem:
                problems[node.name] = problem
    if unreachable:
        raise NodesFailedError(
            f"no answer from {len(unreachable)} of {len(nodes)} nodes; nothing was changed",
            reasons={**unreachable, **problems},
            hint=hint(answers.values(), f"to go on without: clusterctl deploy --exclude {fold(unreachable)}"),
        )
    if problems:
        raise PreflightError(
            f"{len(problems)} of {len(nodes)} nodes cannot take the environment; nothing was changed",
            reasons=problems,
        )
    todo = release.describe(facts, inventory, bundle.manifest)
    emit(StageFinished("examine", time.monotonic() - began, todo))
    return facts


def _send(
    inventory: Inventory,
    nodes: Sequence[Node],
    connections: Connections,
    bundle: Bundle,
    relocated: Relocated,
    steps: Sequence[Step],
    failed: dict[str, str],
    emit: Emit,
) -> int:
    """Stream the release to the nodes that lack it; returns the bytes sent to all of them together."""
    began = time.monotonic()
    total = payload.size(bundle, relocated)
    title = f"Sending {bundle.manifest.name} ({bundle.manifest.release_id}) to {fold(node.name for node in nodes)}"
    emit(StageStarted("send", title, total, "bytes"))
    done = 0

    def count(block: int) -> None:
        nonlocal done
        done += block
        emit(Progress("send", done, total))

    tokens = {node.name: secrets.token_hex(8) for node in nodes}
    remotes: dict[str, Remote] = {node.name: bulk(inventory, node, connections[node]) for node in nodes}
    scripts = {name: compile_steps(steps, token=token) for name, token in tokens.items()}
    answers = broadcast(remotes, scripts, payload.stream(bundle, relocated), on_bytes=count)
    failed.update(_failures(nodes, answers, tokens, inventory))
    received = [node for node in nodes if node.name not in failed]
    states = {node.name: "failed" if node.name in failed else "received" for node in nodes}
    emit(StageFinished("send", time.monotonic() - began, states, f"{total / 1e9:.2f} GB each"))
    return total * len(received)


def _activate(
    nodes: Sequence[Node], connections: Connections, steps: Sequence[Step], failed: dict[str, str], emit: Emit
) -> None:
    """Smoke-test the release at its own path, then switch the prefix to it."""
    began = time.monotonic()
    emit(StageStarted("activate", "Testing and switching", len(nodes), "nodes"))
    tokens = {node.name: secrets.token_hex(8) for node in nodes}
    finished = itertools.count(1)

    def act(node: Node) -> Result:
        script = compile_steps(steps, token=tokens[node.name])
        result = connections[node].run(script, deadline=SMOKE_DEADLINE)
        emit(Progress("activate", next(finished), len(nodes)))
        return result

    answers = fan_out(nodes, act)
    failed.update(_failures(nodes, answers, tokens, connections.inventory))
    states = {node.name: "failed" if node.name in failed else "current" for node in nodes}
    emit(StageFinished("activate", time.monotonic() - began, states))


def _failures(
    nodes: Sequence[Node],
    answers: Mapping[str, Result | ClusterctlError],
    tokens: Mapping[str, str],
    inventory: Inventory,
) -> dict[str, str]:
    """The nodes on which a stage failed, each with its reason."""
    failed = {}
    for node in nodes:
        answer = answers[node.name]
        if isinstance(answer, ClusterctlError):
            failed[node.name] = reason(answer, inventory, node)
            continue
        broken = next((step for step in parse(tokens[node.name], answer.out) if step.state == "failed"), None)
        if broken is not None:
            failed[node.name] = f"{broken.name}: {broken.detail.strip() or 'failed without a message'}"
        elif answer.rc != 0:
            failed[node.name] = answer.err.strip() or f"the script ended with status {answer.rc}"
    return failed


def reason(error: ClusterctlError, inventory: Inventory, node: Node) -> str:
    """One sentence for a node's failure, with the likely typo in its address when there is one."""
    why = error.reason if isinstance(error, RemoteError) else str(error)
    typo = likely_typo(inventory, node)
    return f"{why} ({typo})" if typo else why


def hint(answers: Iterable[object], last: str) -> str:
    """The next step after nodes that did not answer: what their errors say, and ``last``."""
    hints = dict.fromkeys(answer.hint for answer in answers if isinstance(answer, RemoteError) and answer.hint)
    return "; ".join([*hints, last])


def _write_scripts(folder: Path, nodes: Sequence[Node], send: Sequence[Step], activate: Sequence[Step]) -> None:
    """The scripts as they would run, one file for each node and stage."""
    folder.mkdir(parents=True, exist_ok=True)
    for node in nodes:
        for number, (stage, steps) in enumerate((("send", send), ("activate", activate)), start=1):
            path = folder / f"{node.name}-{number}-{stage}.sh"
            path.write_text(compile_steps(steps, token=REVIEW), encoding="utf-8")
