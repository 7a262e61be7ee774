"""``clusterctl train``: run a training on several nodes, each with its rank.

``train`` lists the stages in their order: pack the run's files, prepare the nodes and pass the gate
(``tasks/gate.py``), let a launcher plan every node, start the agents and follow them (``tasks/start.py``).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from provision.errors import UsageError
from provision.inventory.document import shown
from provision.launchers import choose, filled, launch, pack
from provision.masking import mask_words
from provision.model import Inventory, Node, Notice
from provision.run import Facts, Job, Launch, RunFiles, RunSpec, new_run_id, resume_args
from provision.run.config import MisspelledKeyError
from provision.run.config_text import read
from provision.run.environment import started_on, started_with
from provision.run.expected import typed_band
from provision.run.fewer_nodes import Obstacle
from provision.run.ignored import unsent_text
from provision.run.preflight import preflight, to_record
from provision.run.record import TrainResult
from provision.run.save_every import save_every
from provision.run.spec import VISIBLE, choose_nodes, workers
from provision.tasks import ds_files, slurm
from provision.tasks.expected import expect
from provision.tasks.gate import GateOptions, GateResult, gate
from provision.tasks.pattern import read_pattern
from provision.tasks.resume_arg import AskResume, Place, choose_resume_arg, learn_resume_arg
from provision.tasks.runs import other_failures, run_folder
from provision.tasks.slurm import On, Reserved
from provision.tasks.start import Following
from trainer import ds_config
from trainer.agent.contract.interval import NONE
from trainer.agent.contract.plan import Copies, Link, Plan

if TYPE_CHECKING:
    from provision.session import Session

DEFAULT_CONFIG = "train.yaml"
GRACE = 10.0
LOST_AFTER = 60.0  # seconds
LOST_AFTER_WITH_SPARES = 15.0  # a node that returns later costs more time than the next spare
ZERO_CHOICES = ("0", "1", "2", "3", "2-offload", "3-offload")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}")


@dataclass(frozen=True)
class Policy:
    """How failures are handled.

    Attributes:
        restarts: how often a failed attempt is restarted.
        lost_after: seconds of silence after which a node counts as lost.
        hang_after: seconds without progress that count as a hang; None: derived from the run's own pace.
        hang_policy: what a hang does, ``stop`` or ``warn``.
        copies: how checkpoints are copied to other nodes, and whether they are saved to memory first.
    """

    restarts: int = 0
    lost_after: float = LOST_AFTER
    hang_after: float | None = None
    hang_policy: str = "stop"
    copies: Copies = field(default_factory=Copies)


@dataclass(frozen=True)
class Training:
    """The training that the user asked for.

    Attributes:
        job: what runs.
        words: the typed words, for the record.
        name: a word for the run's id; None: the name of the config or script.
        policy: how failures are handled.
        gate: how strict the gate is.
        zero: the DeepSpeed configuration to make: a stage, or a stage with ``-offload``; None: none.
        pattern: a regular expression that reads the lines of the training; None: the known formats.
        following: how the run is followed.
        notify: the shell command for events of the run; None: the inventory's; empty: none.
        expected: what it is judged by: an earlier run, ``LOW-HIGH`` seconds per step or ``none``; None: the estimate.
        save_every: how often it saves: ``auto`` or a time span; None: as its trainer does.
        ask_resume: asks for the arguments by which a script resumes; None: there is no terminal.
        spares: how many of the session's nodes, the last ones, only replace lost ones.
        min_nodes: with how many nodes the run may continue without spares; None: all.
        on: how Slurm starts it; None: without Slurm.
    """

    job: Job
    words: tuple[str, ...] = ()
    name: str | None = None
    policy: Policy = Policy()
    gate: GateOptions = field(default_factory=GateOptions)
    zero: str | None = None
    pattern: str | None = None
    following: Following = field(default_factory=Following)
    notify: str | None = None
    expected: str | None = None
    save_every: str | None = None
    ask_resume: AskResume | None = None
    spares: int = 0
    min_nodes: int | None = None
    on: On | None = None


def find_config(inventory: Inventory) -> Path:
    """The configuration of a command that names none: the inventory's ``train.config``, or ``train.yaml`` here.

    Raises:
        UsageError: neither exists.
    """
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


def train(session: Session, asked: Training) -> TrainResult:
    """Train on the session's nodes; the first of them is rank 0.

    Raises:
        UsageError: an option, the configuration or the program cannot be used.
        PreflightError: nodes cannot take part; nothing was started.
        NodesFailedError: nodes do not answer; nothing was started.
        RunFailedError: the run failed; every node was stopped.
        InterruptedByUser: it was stopped, by Ctrl-C or by another command.
    """
    chosen = None
    if asked.on is not None:
        count = None if asked.gate.asked is None else asked.gate.asked + asked.spares
        chosen = slurm.choose(
            session,
            choose_nodes(asked.job, session.nodes),  # Slurm must give no node that DeepSpeed's --exclude skips
            asked.on,
            count,
            asked.job.per_node,
            spares=asked.spares,
            min_nodes=asked.min_nodes,
        )
        session.nodes = chosen.nodes
        names = {node.name for node in chosen.nodes}
        left = {name: gpus for name, gpus in asked.job.exclude.items() if name in names}
        asked = replace(asked, job=replace(asked.job, exclude=left))
    run, files, nodes = _pack(session, asked)
    for text in (*files.notices, *([unsent_text(files.unsent)] if files.unsent else ())):
        session.emit(Notice(text))
    with slurm.reserve(session, run, nodes, asked.on, chosen) as reserved:
        return _train(session, asked, run, files, reserved)


def _train(session: Session, asked: Training, run: str, files: RunFiles, reserved: Reserved) -> TrainResult:
    """Train on nodes that the run may use."""
    nodes = reserved.nodes
    with gate(session, nodes, run, files, _gate_options(session, asked, nodes)) as passed:
        asked = _resuming(session, passed, run, files, asked)
        spec = _spec(session, passed, run, files, asked)
        saves = save_every(asked.save_every, asked.job, files.settings, other_failures(session))
        spec = replace(spec, expected=expect(session, spec, asked.expected), save=saves)
        launched = launch(spec)
        for notice in launched.notices:
            session.emit(notice)
        link_port = passed.answers[passed.nodes[0].name].facts.link_port
        plans = linked(launched, spec, link_port, secrets.token_hex(16), asked.policy.lost_after)
        about = {
            "master": f"{spec.master}:{spec.port}",
            "prefix": str(spec.prefix),
            "folder": str(spec.folder),
            "launcher": choose(asked.job),
            "argv": mask_words(asked.words),
            "unsent": {each.path: each.size for each in files.unsent},
            "resume_arg": asked.job.resume_arg if files.resuming else "",
            **started_with(session.typed, session.inventory.train.env, files, passed.content),
            **started_on({node.name: passed.answers[node.name].facts for node in passed.nodes}),
            "preflight": to_record(preflight(passed.findings, passed.dropped)),
        }
    interfaces = {worker.node.name: worker.facts.interface for worker in spec.workers}
    return reserved.start(passed.nodes, run, plans, about, interfaces, asked.following)


def dry_run(session: Session, asked: Training) -> tuple[RunSpec, Launch, RunFiles]:
    """What would start, and its files.

    An agent in a temporary folder, which is removed again, asks the nodes for their facts.

    Raises:
        UsageError: an option, the configuration or the program cannot be used.
        PreflightError: nodes cannot take part.
        NodesFailedError: nodes do not answer.
    """
    run, files, nodes = _pack(session, asked)
    scratch = f"/tmp/clusterctl-dry-run-{secrets.token_hex(8)}"  # noqa: S108 - on the nodes, under a random name
    options = replace(_gate_options(session, asked, nodes), scratch=scratch)
    with gate(session, nodes, run, files, options) as passed:
        asked = replace(asked, job=choose_resume_arg(asked.job, files, None))
        spec = _spec(session, passed, run, files, asked)
        launched = launch(spec)
        shown = filled(launched.plans, {worker.node.name: worker.facts.interface for worker in spec.workers})
        return spec, replace(launched, plans=tuple(shown)), files


def linked(launched: Launch, spec: RunSpec, port: int | None, token: str, lost_after: float) -> list[Plan]:
    """The plans with the agents' link: where rank 0's agent listens, and the token that identifies the agents.

    Raises:
        UsageError: rank 0's node has no port for it.
    """
    if len(launched.plans) < 2:
        return list(launched.plans)
    if port is None:
        raise UsageError(f"{spec.workers[0].node.name} has no second free port, for the agents of the nodes")
    names = tuple(worker.node.name for worker in spec.workers)
    others: tuple[tuple[str, int], ...] = ()
    if spec.spares or spec.min_nodes is not None:
        others = link_addresses([worker.facts for worker in spec.workers[1:]], names[1:])
    link = Link(spec.master, port, token, names, lost_after, others)
    return [plan._replace(link=link) for plan in launched.plans]


def link_addresses(facts: Sequence[Facts], names: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Where the agents of the nodes after the first listen if the first is lost.

    Raises:
        UsageError: a node has no free port.
    """
    found = []
    for known, name in zip(facts, names, strict=True):
        if known.ip is None or known.link_port is None:
            raise UsageError(f"{name} has no free port for its agent, which may have to replace rank 0's")
        found.append((known.ip, known.link_port))
    return tuple(found)


def active_nodes(nodes: Sequence[Node], spares: int, min_nodes: int | None) -> int:
    """How many of the nodes start the run.

    Raises:
        UsageError: there are too few nodes for the spares, or fewer than ``min_nodes``.
    """
    active = len(nodes) - spares
    if active < 1:
        text = f"--spares {spares}: there are only {len(nodes)} nodes, and the run needs at least one more"
        raise UsageError(text, hint=f"--spares {max(0, len(nodes) - 1)}")
    if min_nodes is not None and min_nodes > active:
        starts = f"the run starts on {active} node{'' if active == 1 else 's'}"
        raise UsageError(f"--min-nodes {min_nodes}: {starts}", hint=f"--min-nodes {active}")
    return active


def _pack(session: Session, asked: Training) -> tuple[str, RunFiles, tuple[Node, ...]]:
    """The run's id, the files to send, and the nodes that the job chooses."""
    read_pattern(asked.pattern)
    typed_band(asked.expected or "")
    save_every(asked.save_every, asked.job, {}, NONE)
    nodes = choose_nodes(asked.job, session.nodes)
    try:
        files = pack_files(asked.job, asked.zero, any_key=takes_any_key(session.inventory, asked))
    except MisspelledKeyError as error:
        error.hint += ": " + session.again("--force", command="train")
        raise
    if files.resuming is not None:
        name, typed = Path(asked.job.target).name, asked.job.resume_arg is not None
        for text in resume_args.notices(files.resuming, name, output_known=files.output is not None, typed=typed):
            session.emit(Notice(text))
    env = {**session.inventory.train.env, **asked.job.env}
    active = nodes[: active_nodes(nodes, asked.spares, asked.min_nodes)]
    checked, files = ds_files.check_job(asked.job, files, world=ds_files.world_of(asked.job, active), env=env)
    for text in ds_files.refuse(checked, forced=asked.gate.force, again=session.again("--force", command="train")):
        session.warn(text)
    if asked.min_nodes is not None and asked.min_nodes < len(active):
        _check_fewer_nodes(session, asked, len(active), ds_files.fewer_nodes(asked.job, files, checked))
    return run_id(asked), files, nodes


def _check_fewer_nodes(session: Session, asked: Training, active: int, found: Sequence[Obstacle]) -> None:
    """Refuse ``--min-nodes`` for a run that cannot continue on fewer nodes; warn if that is not certain, or is forced.

    Raises:
        UsageError: its checkpoints need as many ranks as saved them.
    """
    for each in found:
        text = f"--min-nodes {asked.min_nodes}: {each.text}"
        if not each.certain or asked.gate.force:
            session.warn(text)
            continue
        drop = ("--min-nodes",)
        if asked.spares:
            instead = session.again(command="train", drop=drop)
        elif asked.gate.asked is None:
            instead = session.again(command="train", drop=drop, spares="1")
        else:
            instead = session.again(command="train", drop=drop, spares="1", nodes=str(active - 1))
        anyway = session.again("--force", command="train")
        raise UsageError(text, hint=f"with a spare node: {instead}; to start anyway: {anyway}")


def _resuming(session: Session, passed: GateResult, run: str, files: RunFiles, asked: Training) -> Training:
    """The training with its script's arguments to resume. The user is asked for them if it may restart."""
    ask, head = asked.ask_resume if asked.policy.restarts else None, passed.nodes[0]
    prefix = passed.answers[head.name].prefix(session.inventory)
    place = Place(head, run_folder(session.inventory, run), prefix)
    return replace(asked, job=learn_resume_arg(session, asked.job, files, place, ask))


def takes_any_key(inventory: Inventory, asked: Training) -> bool:
    """Whether a config's keys that look misspelled are accepted: with ``--force``, or if LLaMA-Factory accepts them."""
    extra = {**inventory.train.env, **asked.job.env}.get("ALLOW_EXTRA_ARGS", "0")
    return asked.gate.force or extra.lower() in ("1", "y", "true")


def _gate_options(session: Session, asked: Training, nodes: Sequence[Node]) -> GateOptions:
    return replace(asked.gate, visible=visible(asked.job, nodes, session.inventory.train.env))


def pack_files(job: Job, zero: str | None, *, any_key: bool = False) -> RunFiles:
    """The files of a job, with DeepSpeed's configuration next to its config if ``zero`` asks for one.

    ``any_key`` accepts a config's keys that look misspelled.

    Raises:
        UsageError: the files cannot be used; the job is no config, or names a DeepSpeed configuration itself.
    """
    if zero is None:
        return pack(job, any_key=any_key)
    if job.kind != "config":
        raise UsageError(
            "--zero goes with a LLaMA-Factory config: a script has its own option",
            hint=f"clusterctl ds-config --for own --stage {zero[0]} --gpu A100 --micro-batch 1 -o ds_config.json",
        )
    given = read(Path(job.target), job.args).data.get("deepspeed")
    if given is not None:
        raise UsageError(f"--zero {zero}: {job.target} has a DeepSpeed configuration: {given}", hint="omit --zero")
    name = f"ds_zero{zero}.json"
    # The Trainer fills in the rest. Offload moves everything that the stage can move.
    stage, offload = int(zero[0]), "cpu" if zero.endswith("-offload") else "none"
    request = ds_config.Request(stage=stage, offload_optimizer=offload, offload_param=offload if stage == 3 else "none")
    text = ds_config.text(ds_config.make(request))
    return pack(replace(job, args=(*job.args, f"deepspeed={name}")), generated={name: text.encode()}, any_key=any_key)


def visible(job: Job, nodes: Sequence[Node], env: Mapping[str, str]) -> dict[str, str]:
    """By node name, the CUDA_VISIBLE_DEVICES of a job; a node that is not named uses all its GPUs."""
    devices = {**env, **job.env}.get(VISIBLE)
    if devices is not None:
        return {node.name: devices for node in nodes}
    chosen = {name: ",".join(gpus) for name, gpus in job.include.items() if gpus}
    if job.per_node and not job.include and not job.exclude:
        return {node.name: ",".join(map(str, range(job.per_node))) for node in nodes}
    return chosen


def run_id(asked: Training) -> str:
    """A new run's id.

    Raises:
        UsageError: the name has characters that an id may not have.
    """
    if asked.name is not None and not _NAME.fullmatch(asked.name):
        raise UsageError(
            f"--name {shown(asked.name)}: a run's id takes a word of at most 41 letters, digits, dots, - and _",
            hint="--name " + (re.sub(r"[^A-Za-z0-9._-]+", "-", asked.name).strip("-._")[:40] or "run"),
        )
    return new_run_id(datetime.now(timezone.utc), asked.name or asked.job.target)


def _spec(session: Session, passed: GateResult, run: str, files: RunFiles, asked: Training) -> RunSpec:
    """Everything that the launcher needs to know.

    Raises:
        UsageError: fewer nodes than ``min_nodes`` can take part.
    """
    head = passed.nodes[0]
    facts = {name: answer.facts for name, answer in passed.answers.items()}
    env = session.inventory.train.env
    spares = max(0, asked.spares - len(passed.dropped))  # the first spares replace nodes that cannot take part
    active_nodes(passed.nodes, spares, asked.min_nodes)  # --exclude-bad may have left too few
    return RunSpec(
        id=run,
        workers=workers(asked.job, passed.nodes, facts, env),
        prefix=passed.answers[head.name].prefix(session.inventory),
        folder=run_folder(session.inventory, run),
        config=files.config_name,
        master=head.train_address,
        port=facts[head.name].port or 0,
        progress=files.progress,
        pattern=asked.pattern,
        env=env,
        grace=GRACE,
        launcher=asked.job.launcher,
        job=asked.job,
        settings=files.settings,
        output=files.output,
        hang_after=asked.policy.hang_after,
        hang_policy=asked.policy.hang_policy,
        restarts=asked.policy.restarts,
        copies=asked.policy.copies,
        none_ok=True,
        textfile=None if session.inventory.textfile is None else str(session.inventory.textfile),
        notify=(session.inventory.notify if asked.notify is None else asked.notify) or None,
        spares=spares,
        min_nodes=asked.min_nodes,
    )
