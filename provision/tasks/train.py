"""``clusterctl train``: a training runs on several nodes, each with its rank.

The order of the work: read what was given, send the run's folder and pass the gate (``tasks/gate.py``), let a launcher
make every node's plan, start the agents, and follow them to the end (``tasks/begin.py``).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError, UsageError
from provision.hints import again
from provision.inventory.document import shown
from provision.launchers import choose, launch
from provision.masking import mask_words
from provision.model import Emit, Inventory, Node, Notice
from provision.run import Job, Launch, RunSpec, Travel, new_run_id
from provision.run.config import MisspelledKeyError
from provision.run.record import TrainResult
from provision.run.spec import VISIBLE, choose_nodes, workers
from provision.ssh.remote import Connections
from provision.tasks.begin import Beginning, Following
from provision.tasks.gate import Gated, GateOptions, gate
from provision.tasks.prepare import run_folder
from provision.tasks.zero import packed
from trainer.contract import Link, Plan

if TYPE_CHECKING:
    from provision.ssh.prompts import Prompts

DEFAULT_CONFIG = "train.yaml"
GRACE = 10.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}")


@dataclass(frozen=True)
class Policy:
    """What is done about failures.

    Attributes:
        restarts: how often a failed attempt is begun again.
        lost_after: seconds of silence after which a node counts as lost.
        hang_after: seconds without progress that count as a hang; None: the run's own pace tells.
        hang_policy: what a hang does, ``stop`` or ``warn``.
    """

    restarts: int = 0
    lost_after: float = 60.0
    hang_after: float | None = None
    hang_policy: str = "stop"


@dataclass(frozen=True)
class Training:
    """A training as it was asked for.

    Attributes:
        job: what runs.
        words: what the user typed for it, for the record.
        name: a word for the run's id; None: the name of the config or script.
        env: variables beside the inventory's, over which they win.
        policy: what is done about failures.
        gate: how strict the gate is.
        zero: DeepSpeed's configuration to make where a config names none: a stage, or a stage with ``-offload``.
        following: how the run is followed.
    """

    job: Job
    words: tuple[str, ...] = ()
    name: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    policy: Policy = Policy()
    gate: GateOptions = field(default_factory=GateOptions)
    zero: str | None = None
    following: Following = field(default_factory=Following)


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
        also = "" if inventory.alone else f", and {inventory.path.name} has no train.config"
        raise UsageError(
            f"no training configuration: there is no {DEFAULT_CONFIG} in this folder{also}",
            hint="name what to train: clusterctl train CONFIG.yaml, SCRIPT.py or -m MODULE; "
            "or a command: clusterctl train -- torchrun …",
        )
    return here


def train(
    inventory: Inventory, nodes: Sequence[Node], asked: Training, *, prompts: Prompts | None = None, emit: Emit
) -> TrainResult:
    """Train over ``nodes``; the first of them is rank 0.

    Raises:
        UsageError: what was given cannot be used.
        PreflightError: nodes that cannot take part; nothing was started.
        NodesFailedError: nodes that cannot be reached; nothing was started.
        RunFailedError: the run failed; every node was stopped.
        InterruptedByUser: it was stopped, by Ctrl-C or by another command.
    """
    inventory, chosen = _chosen(inventory, nodes, asked)
    luggage = _packed(inventory, asked)
    for text in luggage.notices:
        emit(Notice(text))
    run = _run_id(asked)
    options = replace(asked.gate, visible=visible(asked.job, chosen, inventory.train.env))
    with Connections(inventory, prompts) as connections:
        with gate(inventory, chosen, connections, run, luggage, options, emit) as passed:
            spec = _spec(inventory, passed, run, luggage, asked)
            launched = launch(spec)
            for notice in launched.notices:
                emit(notice)
            link_port = passed.answers[passed.nodes[0].name].facts.link_port
            plans = linked(launched, spec, link_port, secrets.token_hex(16), asked.policy.lost_after)
            about = {
                "master": f"{spec.master}:{spec.port}",
                "prefix": str(spec.prefix),
                "folder": str(spec.folder),
                "launcher": choose(asked.job),
                "argv": mask_words(asked.words),
            }
        return Beginning(inventory, connections, passed.nodes, run, plans, about).go(asked.following, emit)


def dry_run(
    inventory: Inventory, nodes: Sequence[Node], asked: Training, *, prompts: Prompts | None = None, emit: Emit
) -> tuple[RunSpec, Launch]:
    """What would be started. The nodes are asked for their facts, by an agent in a temporary folder that goes again.

    Raises:
        UsageError: what was given cannot be used.
        PreflightError: nodes that cannot take part.
        NodesFailedError: nodes that cannot be reached.
    """
    inventory, chosen = _chosen(inventory, nodes, asked)
    luggage = _packed(inventory, asked)
    run = _run_id(asked)
    scratch = f"/tmp/clusterctl-dry-run-{secrets.token_hex(8)}"  # noqa: S108 - on the nodes, under a random name
    options = replace(asked.gate, visible=visible(asked.job, chosen, inventory.train.env), scratch=scratch)
    found: list[tuple[RunSpec, Launch]] = []
    with (
        suppress(_DryRunOverError),
        Connections(inventory, prompts) as connections,
        gate(inventory, chosen, connections, run, luggage, options, emit) as passed,
    ):
        spec = _spec(inventory, passed, run, luggage, asked)
        found.append((spec, launch(spec)))
        raise _DryRunOverError("a dry run starts nothing")
    return found[0]


class _DryRunOverError(ClusterctlError):
    """The end of a dry run: what was sent to the nodes goes again, as after a refusal."""


def linked(launched: Launch, spec: RunSpec, port: int | None, token: str, lost_after: float) -> list[Plan]:
    """The plans with the agents' link: where rank 0's agent listens, and the token by which they know one another.

    Raises:
        UsageError: rank 0's node has no port for it.
    """
    if len(launched.plans) < 2:
        return list(launched.plans)
    if port is None:
        raise UsageError(f"{spec.workers[0].node.name} has no second free port, for the agents of the nodes")
    link = Link(spec.master, port, token, tuple(worker.node.name for worker in spec.workers), lost_after)
    return [plan._replace(link=link) for plan in launched.plans]


def _chosen(inventory: Inventory, nodes: Sequence[Node], asked: Training) -> tuple[Inventory, tuple[Node, ...]]:
    """The inventory with the command line's variables, and the nodes that the job leaves."""
    chosen = choose_nodes(asked.job, nodes)
    env = {**inventory.train.env, **asked.env}
    return replace(inventory, train=replace(inventory.train, env=env)), chosen


def _packed(inventory: Inventory, asked: Training) -> Travel:
    """The files that travel; the hint about a misspelled key is the user's command with ``--force``."""
    try:
        return packed(asked.job, asked.zero, any_key=_takes_any_key(inventory, asked))
    except MisspelledKeyError as error:
        error.hint += ": " + again(inventory.typed, "train", "--force")
        raise


def _takes_any_key(inventory: Inventory, asked: Training) -> bool:
    """Whether keys of a config that look misspelled are taken: with ``--force``, or where LLaMA-Factory takes them."""
    extra = {**inventory.train.env, **asked.job.env}.get("ALLOW_EXTRA_ARGS", "0")
    return asked.gate.force or extra.lower() in ("1", "y", "true")


def visible(job: Job, nodes: Sequence[Node], env: Mapping[str, str]) -> dict[str, str]:
    """By node name, the GPUs that a job will use, as CUDA_VISIBLE_DEVICES says it; all of a node that is not named."""
    said = {**env, **job.env}.get(VISIBLE)
    if said is not None:
        return {node.name: said for node in nodes}
    chosen = {name: ",".join(gpus) for name, gpus in job.include.items() if gpus}
    if job.per_node and not job.include and not job.exclude:
        return {node.name: ",".join(map(str, range(job.per_node))) for node in nodes}
    return chosen


def _run_id(asked: Training) -> str:
    if asked.name is not None and not _NAME.fullmatch(asked.name):
        raise UsageError(
            f"--name {shown(asked.name)}: a run's id takes a word of at most 41 letters, digits, dots, - and _",
            hint="--name " + (re.sub(r"[^A-Za-z0-9._-]+", "-", asked.name).strip("-._")[:40] or "run"),
        )
    return new_run_id(datetime.now(timezone.utc), asked.name or asked.job.target)


def _spec(inventory: Inventory, passed: Gated, run: str, luggage: Travel, asked: Training) -> RunSpec:
    """Everything the launcher needs to know."""
    head = passed.nodes[0]
    facts = {name: answer.facts for name, answer in passed.answers.items()}
    return RunSpec(
        id=run,
        workers=workers(asked.job, passed.nodes, facts, inventory.train.env),
        prefix=passed.answers[head.name].prefix(inventory),
        folder=run_folder(inventory, run),
        config=luggage.config_name,
        master=head.train_address,
        port=facts[head.name].port or 0,
        progress=luggage.progress,
        env=inventory.train.env,
        grace=GRACE,
        launcher=asked.job.launcher,
        job=asked.job,
        settings=luggage.settings,
        output=luggage.output,
        hang_after=asked.policy.hang_after,
        hang_policy=asked.policy.hang_policy,
        restarts=asked.policy.restarts,
        none_ok=True,
    )
