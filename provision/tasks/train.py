"""``clusterctl train``: a training configuration runs on several nodes, each with its rank.

The order of the work: read the configuration, send the run's folder, ask every node for its facts, refuse what could
only hang, start the agents, follow them to the end.
"""

from __future__ import annotations

import importlib.resources
import json
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from provision.errors import (
    ClusterctlError,
    InterruptedByUser,
    NodesFailedError,
    PreflightError,
    RunFailedError,
    UsageError,
)
from provision.launchers import llamafactory
from provision.model import Emit, Inventory, Node, Notice, StageFinished, StageStarted
from provision.render import render
from provision.run import Facts, Launch, RunSpec, Travel, Worker, new_run_id, plan_name, tar_stream, travel
from provision.run.follow import Follower
from provision.ssh.remote import Connections, fan_out
from provision.tasks.deploy import hint, reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from provision.ssh.prompts import Prompts

PREPARE_DEADLINE = 600.0
DEFAULT_CONFIG = "train.yaml"
GRACE = 10.0


@dataclass(frozen=True)
class TrainResult:
    """A finished run. ``folder`` is this machine's record of it, ``output`` the path on rank 0's node."""

    run: str
    folder: Path
    nodes: tuple[str, ...]
    world_size: int
    seconds: float
    steps: int | None
    first_loss: float | None
    last_loss: float | None
    output: str


def find_config(config: Path | None, inventory: Inventory) -> Path:
    """The configuration that is meant: the one given, the inventory's ``train.config``, or ``train.yaml`` here.

    Raises:
        UsageError: there is none.
    """
    if config is not None:
        return config
    if inventory.train.config is not None:
        return inventory.train.config
    here = Path(DEFAULT_CONFIG)
    if not here.exists():
        raise UsageError(
            f"no training configuration: there is no {DEFAULT_CONFIG} in this folder, "
            f"and {inventory.path.name} has no train.config",
            hint=f"clusterctl train --inventory {inventory.path.name} CONFIG",
        )
    return here


def train(
    inventory: Inventory, nodes: Sequence[Node], config: Path, *, prompts: Prompts | None = None, emit: Emit
) -> TrainResult:
    """Train over ``nodes``; the first of them is rank 0.

    Raises:
        UsageError: the configuration cannot be used.
        PreflightError: nodes that cannot take part; nothing was started.
        NodesFailedError: nodes that cannot be reached; nothing was started.
        RunFailedError: the run failed; every node was stopped.
        InterruptedByUser: Ctrl-C; every node was stopped.
    """
    luggage = travel(config)
    for text in luggage.notices:
        emit(Notice(text))
    run = new_run_id(datetime.now(timezone.utc), config.name)
    folder = inventory.path.parent / "runs" / run
    with Connections(inventory, prompts) as connections:
        releases, facts = _prepare(inventory, nodes, connections, run, luggage, emit)
        spec = _spec(inventory, nodes, run, luggage, releases, facts)
        launch = llamafactory.launch(spec)
        for notice in launch.notices:
            emit(notice)
        folder.mkdir(parents=True)
        _record(folder, {"run": run, "state": "running", **_described(spec, launch)})
        began = time.monotonic()
        follower = Follower(run, nodes, folder, grace=GRACE, emit=emit)
        try:
            _start(spec, launch, connections, follower, emit)
        finally:
            seconds = time.monotonic() - began
            state = {"run": run, "state": follower.state, "seconds": round(seconds, 1), "losses": follower.losses}
            _record(folder, {**_described(spec, launch), **state})
    losses = follower.losses
    return TrainResult(
        run=run,
        folder=folder,
        nodes=tuple(node.name for node in nodes),
        world_size=sum(worker.processes for worker in spec.workers),
        seconds=seconds,
        steps=follower.steps,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        output=_output(spec, luggage),
    )


def _prepare(
    inventory: Inventory, nodes: Sequence[Node], connections: Connections, run: str, luggage: Travel, emit: Emit
) -> tuple[dict[str, str], dict[str, Facts]]:
    """Send the run's folder to every node and ask its agent for facts: one round trip."""
    began = time.monotonic()
    emit(StageStarted("prepare", "Preparing nodes", len(nodes), "nodes"))
    run_folder = str(_run_folder(inventory, run))
    agent = _agent_files()
    master = nodes[0].train_address

    def ask(node: Node) -> tuple[str, Facts]:
        rank = nodes.index(node)
        probe = ["--master", master, "--rank", str(rank), "--folder", run_folder]
        if inventory.train.port is not None:
            probe += ["--port", str(inventory.train.port)]
        script = render(
            "run/prepare.sh.j2",
            prefix=str(inventory.prefix),
            root=str(inventory.root),
            run=run_folder,
            probe=probe,
        )
        result = connections[node].run(script, stdin=tar_stream(luggage, agent), deadline=PREPARE_DEADLINE)
        if result.rc != 0:
            raise _RefusedError(result.err.strip() or f"the script ended with status {result.rc}")
        release, _, answer = result.out.partition("\n")
        return release.removeprefix("release "), Facts.parse(answer)

    answers = fan_out(nodes, ask)
    unreachable: dict[str, str] = {}
    refused: dict[str, str] = {}
    releases: dict[str, str] = {}
    facts: dict[str, Facts] = {}
    for node in nodes:
        answer = answers[node.name]
        if isinstance(answer, _RefusedError):
            refused[node.name] = str(answer)
        elif isinstance(answer, ClusterctlError):
            unreachable[node.name] = reason(answer, inventory, node)
        else:
            releases[node.name], facts[node.name] = answer
    if unreachable:
        raise NodesFailedError(
            f"cannot reach {len(unreachable)} of {len(nodes)} nodes; nothing was started",
            reasons={**unreachable, **refused},
            hint=hint(answers.values(), "mend what is named, or leave these nodes out with --exclude"),
        )
    if refused:
        raise PreflightError(
            f"{len(refused)} of {len(nodes)} nodes cannot take part; nothing was started",
            reasons=refused,
            hint=f"clusterctl deploy --inventory {inventory.path.name}",
        )
    if len(set(releases.values())) > 1:
        raise PreflightError(
            "the nodes have different environments; nothing was started",
            reasons={name: f"has release {release}" for name, release in releases.items()},
            hint=f"clusterctl deploy --inventory {inventory.path.name}",
        )
    states = {name: f"{fact.interface}, {_processors(fact)}" for name, fact in facts.items()}
    emit(StageFinished("prepare", time.monotonic() - began, states))
    return releases, facts


def _processors(facts: Facts) -> str:
    """What a node trains on, in two words."""
    return f"{facts.gpus} GPU{'s' if facts.gpus > 1 else ''}" if facts.gpus else f"no GPU, {facts.cpus} cores"


class _RefusedError(ClusterctlError):
    """A node that answered, and cannot take part."""


def _spec(
    inventory: Inventory,
    nodes: Sequence[Node],
    run: str,
    luggage: Travel,
    releases: dict[str, str],
    facts: dict[str, Facts],
) -> RunSpec:
    head = nodes[0]
    said = facts[head.name]
    if said.error is None and said.port_free is False:
        raise PreflightError(
            "rank 0 cannot listen; nothing was started",
            reasons={head.name: f"port {inventory.train.port} is in use there"},
            hint="take train.port out of the inventory: a free port is found then",
        )
    return RunSpec(
        id=run,
        workers=tuple(Worker(node, facts[node.name]) for node in nodes),
        prefix=inventory.root / "releases" / releases[head.name],
        folder=_run_folder(inventory, run),
        config=luggage.config_name,
        master=head.train_address,
        port=said.port or 0,
        progress=luggage.progress,
        env=inventory.train.env,
        grace=GRACE,
    )


def _start(spec: RunSpec, launch: Launch, connections: Connections, follower: Follower, emit: Emit) -> None:
    """Start every node's agent and follow them all to the end."""
    nodes = [worker.node for worker in spec.workers]
    emit(StageStarted("train", f"Training {spec.id}", None, "steps"))
    began = time.monotonic()

    def run_agent(node: Node) -> None:
        rank = nodes.index(node)
        script = render(
            "run/start.sh.j2",
            plan=json.dumps(launch.plans[rank], sort_keys=True),
            name=plan_name(rank),
            run=str(spec.folder),
            release=str(spec.prefix),
        )
        follower.follow(node, connections[node], script)

    try:
        answers = fan_out(nodes, run_agent, limit=len(nodes))
    except InterruptedByUser:
        left = follower.stop_and_wait()
        raise InterruptedByUser(
            f"run {spec.id} was interrupted and stopped on every node"
            if not left
            else f"run {spec.id} was interrupted; no answer from {', '.join(left)}",
        ) from None
    finally:
        follower.close()
    for name, answer in answers.items():
        if isinstance(answer, ClusterctlError):
            follower.lost(name, str(answer))
    emit(StageFinished("train", time.monotonic() - began, follower.states))
    if follower.failures:
        raise RunFailedError(
            f"run {spec.id} failed; every node was stopped",
            reasons=follower.failures,
            hint=f"the logs of all ranks are in {follower.folder}",
        )


def _agent_files() -> dict[str, bytes]:
    """The agent's source files, by their names in the run's folder."""
    folder = importlib.resources.files("trainer") / "agent"
    return {f"agent/{item.name}": item.read_bytes() for item in folder.iterdir() if item.name.endswith(".py")}


def _run_folder(inventory: Inventory, run: str) -> PurePosixPath:
    return inventory.root / "runs" / run


def _output(spec: RunSpec, luggage: Travel) -> str:
    """Where rank 0's node has the trained model: the folder of the trainer's own log."""
    return str((spec.folder / luggage.progress).parent) if luggage.progress else str(spec.folder)


def _described(spec: RunSpec, launch: Launch) -> dict[str, object]:
    """What a run's record says besides its state: enough to start it again by hand."""
    return {
        "master": f"{spec.master}:{spec.port}",
        "prefix": str(spec.prefix),
        "folder": str(spec.folder),
        "plans": {plan["node"]: plan for plan in launch.plans},
    }


def _record(folder: Path, content: dict[str, object]) -> None:
    """Write ``run.json`` in one rename: whoever reads it sees all of it."""
    temporary = folder / "run.json.new"
    temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(folder / "run.json")
