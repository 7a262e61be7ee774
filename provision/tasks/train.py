"""``clusterctl train`` and ``resume``: run a training on several nodes, each with its rank.

``train`` lists the stages in their order: pack the run's files, prepare the nodes and pass the gate
(``tasks/gate.py``), let a launcher plan every node, start the agents and follow them (``tasks/start.py``).

``resume`` continues a run that has ended from its newest complete checkpoint, on the same nodes. They have the run's
folder with its code and its plans. The plans are read back from there, so any machine with the inventory can resume a
run. Only the ports, the agents' token and the number of restarts are new.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError, NodesFailedError, PreflightError, UsageError
from provision.inventory import fold
from provision.inventory.document import shown
from provision.launchers import choose, fewer, launch, pack
from provision.masking import mask_words
from provision.model import Inventory, Node, Notice
from provision.render import quote
from provision.run import Job, Launch, RunFiles, RunSpec, new_run_id, plan_name, record, resume_args, world_size
from provision.run.config import MisspelledKeyError
from provision.run.config_text import read
from provision.run.ignored import unsent_text
from provision.run.record import TrainResult
from provision.run.spec import VISIBLE, choose_nodes, workers
from provision.tasks import ds_files
from provision.tasks.gate import GateOptions, GateResult, gate
from provision.tasks.resume_arg import AskResume, Place, choose_resume_arg, learn_resume_arg, with_resume_arg
from provision.tasks.runs import by_name, find, refuse_others, run_folder
from provision.tasks.start import Following, Start
from trainer import ds_config
from trainer.agent.contract.plan import Link, Plan, from_json
from trainer.agent.contract.untrusted import UntrustedError

if TYPE_CHECKING:
    from provision.run import Facts
    from provision.run.found import Run
    from provision.session import Session

DEFAULT_CONFIG = "train.yaml"
GRACE = 10.0
_DEADLINE = 30.0
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
    """

    restarts: int = 0
    lost_after: float = 60.0
    hang_after: float | None = None
    hang_policy: str = "stop"


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
        following: how the run is followed.
        ask_resume: asks for the arguments by which a script resumes; None: there is no terminal.
    """

    job: Job
    words: tuple[str, ...] = ()
    name: str | None = None
    policy: Policy = Policy()
    gate: GateOptions = field(default_factory=GateOptions)
    zero: str | None = None
    following: Following = field(default_factory=Following)
    ask_resume: AskResume | None = None


@dataclass(frozen=True)
class ResumeOptions:
    """How a run resumes.

    Attributes:
        force: continue although the gate refuses nodes.
        count: on the first nodes of the run; None: on all that the session has.
        restarts: how often it may restart automatically; None: as before.
        following: how it is followed.
        resume_arg: the program's arguments to resume, which the run keeps; None: as before.
        ask_resume: asks for them if they are not known; None: there is no terminal.
    """

    force: bool = False
    count: int | None = None
    restarts: int | None = None
    following: Following = field(default_factory=Following)
    resume_arg: str | None = None
    ask_resume: AskResume | None = None


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
    run, files, nodes = _pack(session, asked)
    for text in (*files.notices, *([unsent_text(files.unsent)] if files.unsent else ())):
        session.emit(Notice(text))
    with gate(session, nodes, run, files, _gate_options(session, asked, nodes)) as passed:
        asked = _resuming(session, passed, run, files, asked)
        spec = _spec(session, passed, run, files, asked)
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
        }
    return Start(session, passed.nodes, run, plans, about).follow(asked.following)


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
        return spec, launch(spec), files


def resume(session: Session, word: str | None, options: ResumeOptions) -> TrainResult:
    """Resume a run on the session's nodes among its own.

    Args:
        session: the command's session.
        word: the run; None: the newest.
        options: how it resumes.

    Raises:
        UsageError: no run matches, it is running, it has finished, or it cannot be resumed.
        PreflightError: it is another user's, or a node cannot take part.
        NodesFailedError: nodes of it do not answer.
        RunFailedError: it failed; every node was stopped.
        InterruptedByUser: it was stopped.
    """
    inventory = session.inventory
    run, found = find(session, word, on=inventory.nodes)
    refuse_others(session, run, found, others_too=False)
    chosen = remaining(session, run, found.unreachable, options.count)
    refuse_resume(session, run, found.unreachable, chosen=chosen)
    members = [by_name(inventory)[name] for name in chosen or run.nodes]
    plans = _plans(session, run, members)
    before = plans[0].nnodes
    refuse_plans(plans)
    kept = record.read(record.folder_of(inventory.path, run.id)) or {}
    text = options.resume_arg
    if text is None and options.ask_resume and kept.get("resume_arg", "") is None:
        text = options.ask_resume(f"the program of run {run.id}")
    if text is not None:
        plans = with_resume_arg(plans, text)
    limited = {plan.node: plan.env.get(VISIBLE) for plan in plans}
    visible = {name: str(gpus) for name, gpus in limited.items() if gpus is not None}
    strict = GateOptions(force=options.force, visible=visible)
    with gate(session, members, run.id, None, strict) as passed:
        head = passed.answers[members[0].name].facts
        if len(members) < before:
            moved = plans[0].node_rank != 0
            facts = {name: answer.facts.interface for name, answer in passed.answers.items()} if moved else {}
            plans = fewer(plans, members[0].train_address, facts)
            _warn_fewer(session, run, members, before, plans, found.unreachable)
        fresh = renewed(plans, head, token=secrets.token_hex(16), restarts=options.restarts)
    about = {
        "master": f"{members[0].train_address}:{head.port}",
        "prefix": plans[0].prefix,
        "folder": str(run_folder(inventory, run.id)),
        "launcher": kept.get("launcher"),
        "argv": kept.get("argv"),
        "unsent": kept.get("unsent", {}),
        "resume_arg": kept.get("resume_arg") if text is None else text,
    }
    return Start(session, members, run.id, fresh, about).follow(options.following)


def linked(launched: Launch, spec: RunSpec, port: int | None, token: str, lost_after: float) -> list[Plan]:
    """The plans with the agents' link: where rank 0's agent listens, and the token that identifies the agents.

    Raises:
        UsageError: rank 0's node has no port for it.
    """
    if len(launched.plans) < 2:
        return list(launched.plans)
    if port is None:
        raise UsageError(f"{spec.workers[0].node.name} has no second free port, for the agents of the nodes")
    link = Link(spec.master, port, token, tuple(worker.node.name for worker in spec.workers), lost_after)
    return [plan._replace(link=link) for plan in launched.plans]


def _pack(session: Session, asked: Training) -> tuple[str, RunFiles, tuple[Node, ...]]:
    """The run's id, the files to send, and the nodes that the job chooses."""
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
    checked, files = ds_files.check_job(asked.job, files, world=ds_files.world_of(asked.job, nodes), env=env)
    for text in ds_files.refuse(checked, forced=asked.gate.force, again=session.again("--force", command="train")):
        session.warn(text)
    return run_id(asked), files, nodes


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
    """Everything that the launcher needs to know."""
    head = passed.nodes[0]
    facts = {name: answer.facts for name, answer in passed.answers.items()}
    env = session.inventory.train.env
    return RunSpec(
        id=run,
        workers=workers(asked.job, passed.nodes, facts, env),
        prefix=passed.answers[head.name].prefix(session.inventory),
        folder=run_folder(session.inventory, run),
        config=files.config_name,
        master=head.train_address,
        port=facts[head.name].port or 0,
        progress=files.progress,
        env=env,
        grace=GRACE,
        launcher=asked.job.launcher,
        job=asked.job,
        settings=files.settings,
        output=files.output,
        hang_after=asked.policy.hang_after,
        hang_policy=asked.policy.hang_policy,
        restarts=asked.policy.restarts,
        none_ok=True,
    )


def remaining(session: Session, run: Run, unreachable: Mapping[str, str], count: int | None) -> tuple[str, ...] | None:
    """The nodes of a run on which it continues, in the order of their ranks; None: the user chose none, so all.

    Raises:
        UsageError: none of the run's nodes was chosen, or it has fewer than ``count``.
    """
    if count is None and len(session.nodes) == len(session.inventory.nodes):
        return None
    allowed = {node.name for node in session.nodes}
    among = [name for name in run.nodes if name in allowed]
    ran = f"run {run.id} ran on {fold(run.nodes)}"
    if not among:
        raise UsageError(f"{ran}, and none of these nodes was chosen", hint=f"choose among {fold(run.nodes)}")
    if count is None:
        return tuple(among)
    if count > len(among):
        silent = sorted(allowed & unreachable.keys())
        more = f"; {fold(silent)} did not answer" if silent else ""
        raise UsageError(
            f"--nodes {count}: {ran}{more}; it resumes on these nodes or fewer",
            hint=session.again(command="resume", nodes=str(len(among)), words=(run.id,)),
        )
    return tuple(among[:count])


def _warn_fewer(
    session: Session,
    run: Run,
    members: Sequence[Node],
    before: int,
    plans: Sequence[Plan],
    unreachable: Mapping[str, str],
) -> None:
    """Warn about what changes, and where processes of the run may be left."""
    size, was = world_size(plans), int(run.head.number("world_size") or 0)
    ranks = ", ".join(f"{node.name} is node {rank}" for rank, node in enumerate(members[:8]))
    text = f"run {run.id} resumes on {len(members)} of {before} nodes: {ranks}; world size {size}"
    text += f" instead of {was}" if was and was != size else ""
    session.warn(f"{text}. A global batch that is counted per rank becomes smaller")
    if unreachable:
        session.warn(f"{fold(unreachable)}: no answer, so processes of the run may be left there")


def refuse_resume(
    session: Session, run: Run, unreachable: Mapping[str, str], *, chosen: Sequence[str] | None = None
) -> None:
    """Refuse a run that cannot be resumed; ``chosen`` are the nodes that it continues on, None for all.

    Raises:
        UsageError: it is running, or it has finished.
        NodesFailedError: nodes of it do not answer.
    """
    if run.live:
        live = fold(part.node for part in run.parts if part.live)
        raise UsageError(
            f"run {run.id} is running on {live}",
            hint=f"clusterctl logs -f {run.id}; to restart it from its checkpoint, first: clusterctl stop {run.id}",
        )
    silent = {
        part.node: "no answer"
        for part in run.parts
        if part.alive is None and part.node in unreachable and (chosen is None or part.node in chosen)
    }
    if silent or (run.missing and chosen is None):
        reasons = {**{name: why for name, why in unreachable.items() if name not in run.nodes}, **silent}
        raise NodesFailedError(
            f"run {run.id} cannot resume without all of its nodes; nothing was started",
            reasons=reasons,
            hint=f"when they are back: {session.again(command='resume', words=(run.id,))}; on the other nodes: "
            + session.again(command="resume", words=(run.id,), exclude=fold(reasons)),
            nothing_done=True,
        )
    if run.state == "finished":
        raise UsageError(
            f"run {run.id} has finished: there is nothing to resume",
            hint=f"clusterctl collect {run.id}",
        )


def refuse_plans(plans: Sequence[Plan]) -> None:
    """Refuse a run without instructions to resume in its plans.

    Raises:
        UsageError: the run's checkpoints are not known.
    """
    if plans[0].resume is None:
        raise UsageError(
            f"run {plans[0].run} cannot be resumed: where its program saves checkpoints is not known",
            hint="start the next one with: clusterctl train --output DIR --resume-arg '--resume={checkpoint}' SCRIPT",
        )


def renewed(plans: Sequence[Plan], head: Facts, *, token: str, restarts: int | None = None) -> list[Plan]:
    """The plans with fresh ports and another token for the agents' link, to continue from the newest checkpoint.

    Args:
        plans: the old plans, in the order of their ranks.
        head: rank 0's node now.
        token: hex digits that only the agents of this run know.
        restarts: how often it may restart automatically; None: as before.
    """
    fresh = []
    for plan in plans:
        port = head.port or plan.port
        link = plan.link and plan.link._replace(port=head.link_port or plan.link.port, token=token)
        env = {**plan.env, **({"MASTER_PORT": str(port)} if "MASTER_PORT" in plan.env else {})}
        new = plan._replace(resuming=True, none_ok=False, port=port, link=link, env=env)
        fresh.append(new if restarts is None else new._replace(restarts=restarts))
    return fresh


def _plans(session: Session, run: Run, members: Sequence[Node]) -> list[Plan]:
    """The plan of each node's agent, in the order of the ranks."""
    folder = str(run_folder(session.inventory, run.id))
    ranks = {part.node: part.rank for part in run.parts}

    def ask(node: Node) -> Plan:
        name = plan_name(ranks[node.name])
        result = session.run(node, f"head -c 16777216 -- {quote(folder)}/{name}", deadline=_DEADLINE)
        try:
            return from_json(result.out)
        except UntrustedError as error:
            raise ClusterctlError(result.err.strip() or f"{folder}/{name} {error}") from None

    outcome = session.each(ask, on=members)
    if outcome.failed:
        raise PreflightError(
            f"run {run.id} cannot be read on {len(outcome.failed)} of {len(members)} nodes; nothing was started",
            reasons=outcome.reasons,
            hint=outcome.hint(f"clusterctl status {run.id}"),
        )
    return list(outcome.ok.values())
