"""``clusterctl train``: a training configuration runs on several nodes, each with its rank.

The order of the work: read the configuration, send the run's folder, ask every node for its facts, refuse what could
only hang, start the agents, follow them to the end.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from provision.errors import (
    ClusterctlError,
    InterruptedByUser,
    RunFailedError,
    UsageError,
)
from provision.launchers import llamafactory
from provision.model import Emit, Inventory, Node, Notice, StageFinished, StageStarted
from provision.render import render
from provision.run import Launch, RunSpec, Travel, Worker, new_run_id, plan_name, travel
from provision.run.follow import Follower
from provision.ssh.remote import Connections, fan_out
from provision.tasks.prepare import Answer, prepared, run_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from provision.ssh.prompts import Prompts

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
        with prepared(inventory, nodes, connections, run, luggage, emit) as answers:
            spec = _spec(inventory, nodes, run, luggage, answers)
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


def _spec(
    inventory: Inventory, nodes: Sequence[Node], run: str, luggage: Travel, answers: Mapping[str, Answer]
) -> RunSpec:
    """Everything the launcher needs to know."""
    head = nodes[0]
    return RunSpec(
        id=run,
        workers=tuple(Worker(node, answers[node.name].facts) for node in nodes),
        prefix=inventory.root / "releases" / answers[head.name].release,
        folder=run_folder(inventory, run),
        config=luggage.config_name,
        master=head.train_address,
        port=answers[head.name].facts.port or 0,
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
    temporary.touch(mode=0o600)  # the environment of the run may hold secrets
    temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(folder / "run.json")
