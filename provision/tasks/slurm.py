"""``train --on slurm``, and ``train`` within an allocation: Slurm chooses the moment and starts the agents.

Slurm's programs run on the first node, as the user that the inventory logs in as, because the job must belong to the
owner of the run's folder. The job's script waits until the gate has passed and every node has its plan. Then it starts
one agent on each node as a step of the job. From then on nothing needs this command: Slurm requeues the job onto the
same nodes, and the script starts the agents again from the newest checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from provision import slurm
from provision.errors import ClusterctlError, InterruptedByUser, NodesError, PreflightError, UsageError
from provision.inventory import fold
from provision.model import Node, Notice
from provision.render import quote, render
from provision.run import plan_name, record, world_size
from provision.run.record import TrainResult, output_of
from provision.slurm import Allocation, Chosen, Options
from provision.tasks.runs import run_folder
from provision.tasks.start import Following, Start, answer_of
from trainer.agent.contract.plan import Plan

if TYPE_CHECKING:
    from provision.model import Result
    from provision.session import Session

ANSWER = 30  # seconds for a program of Slurm
_DEADLINE = ANSWER + 15.0
OUTAGE = 300.0  # seconds without any answer of Slurm's controller until the command gives up
_LOOKS = (1.0, 10.0)  # seconds between two looks at the queue: the first, and the longest
_SETTLING = 20.0  # seconds in which Slurm ends a job, or puts it back into its queue
_AGENTS = 60  # seconds for a step to start its agents
_GATE = 1800  # seconds that the job waits for its plans, while this command checks the nodes
_SRUN = ("--ntasks-per-node=1", "--cpu-bind=none", "--mem=0", "--input=none", "--kill-on-bad-exit=0", "--wait=0")


@dataclass(frozen=True)
class On:
    """Where a run starts by Slurm: in a new job with ``options``, or in the ``allocation`` of this command."""

    options: Options = field(default_factory=Options)
    allocation: Allocation | None = None


@dataclass(kw_only=True)
class Reserved:
    """Nodes that a run may use, and the way to start its agents there. ``job`` is empty without Slurm."""

    session: Session
    nodes: tuple[Node, ...]
    chosen: Chosen | None = None
    on: On | None = None
    job: str = ""
    handed: bool = False

    def start(
        self,
        nodes: Sequence[Node],
        run: str,
        plans: Sequence[Plan],
        about: Mapping[str, Any],
        interfaces: Mapping[str, str | None],
        following: Following,
    ) -> TrainResult:
        """Start the agents and follow them; see ``Start.follow``."""
        if self.on is None:
            return Start(self.session, nodes, run, plans, about, interfaces).follow(following)
        about = {**about, "slurm": self.job}
        try:
            return _SlurmStart(self.session, nodes, run, plans, about, interfaces, reserved=self).follow(following)
        except (InterruptedByUser, NodesError):
            result = self._requeued(nodes, run, plans, str(about["folder"])) if self.handed else None
            if result is None:
                raise
            return result

    def _requeued(self, nodes: Sequence[Node], run: str, plans: Sequence[Plan], folder: str) -> TrainResult | None:
        """The result of a run whose job Slurm has put back into its queue; None for any other."""
        try:
            job = _settled(self.session, self.nodes, self.job)
        except ClusterctlError:
            return None
        if job is None:
            return None
        if job.state not in slurm.WAITING:
            self.session.warn(
                f"Slurm job {self.job} has not ended yet ({job.state.lower()}). If a node of it is down, Slurm "
                f"requeues it, and the run resumes. To prevent that: scancel {self.job}"
            )
            return None
        kept = record.folder_of(self.session.inventory.path, run)
        record.change(kept, state="running", attached=False)
        self.session.warn(
            f"Slurm requeued job {self.job} ({job.reason or job.state}). Run {run} resumes in it from its newest "
            f"checkpoint. To follow it then: clusterctl logs -f {run}; to end it: clusterctl stop {run}"
        )
        return TrainResult(
            run=run,
            state="detached",
            folder=kept,
            nodes=tuple(node.name for node in nodes),
            world_size=world_size(plans),
            seconds=0.0,
            steps=None,
            first_loss=None,
            last_loss=None,
            output=output_of(plans[0], folder),
        )


@contextmanager
def reserve(
    session: Session, run: str, nodes: Sequence[Node], on: On | None, chosen: Chosen | None
) -> Iterator[Reserved]:
    """Yield the nodes of a run. With Slurm, they are those of a job; it is cancelled if its agents do not start.

    Raises:
        UsageError: Slurm refuses an option.
        PreflightError: Slurm refuses the job, or it ended before it started.
        InterruptedByUser: Ctrl-C; the job was cancelled.
    """
    if on is None or chosen is None:
        yield Reserved(session=session, nodes=tuple(nodes))
        return
    reserved = Reserved(session=session, nodes=chosen.nodes, chosen=chosen, on=on)
    if on.allocation is not None:
        reserved.job = on.allocation.job
        yield reserved
        return
    reserved.job = _submit(session, run, on.options, chosen)
    try:
        _wait(session, chosen, reserved.job)
        yield reserved
    except BaseException:
        if not reserved.handed:
            _cancel(session, chosen.nodes[0], reserved.job)
        raise


def choose(
    session: Session,
    nodes: Sequence[Node],
    on: On,
    count: int | None,
    per_node: int | None = None,
    *,
    spares: int = 0,
    min_nodes: int | None = None,
) -> Chosen:
    """Choose ``count`` of the nodes for a job: those of the allocation, or those that Slurm can give.

    ``spares`` of them are spares. ``min_nodes``: the number of nodes on which the run continues after a loss.

    Raises:
        UsageError: there are too few.
        PreflightError: Slurm does not answer.
    """
    if on.allocation is not None:
        chosen, other = slurm.inside(nodes, on.allocation, count, spares)
        text = f"the nodes are those of Slurm job {on.allocation.job}: {fold(node.name for node in chosen.nodes)}"
        session.emit(Notice(text + (f"; not in the inventory, or not chosen: {fold(other)}" if other else "")))
        return chosen.surviving(spares, min_nodes)
    script = f"timeout {ANSWER} sinfo -h -N -o {quote(slurm.NODES_FORMAT)}"
    answer = _ask(session, nodes[0], script, "sinfo")
    found = slurm.choose(nodes, slurm.read_nodes(answer), on.options, count, per_node, spares)
    return found.surviving(spares, min_nodes)


def started_with(session: Session, run: str, node: Node) -> tuple[Options | None, str] | None:
    """How Slurm started a run: the options of its job, None within an allocation, and the job's id.

    None for a run that Slurm did not start.
    """
    folder = quote(f"{run_folder(session.inventory, run)}/slurm")
    script = f"head -c 64 -- {folder}/job 2>/dev/null; echo; head -c 65536 -- {folder}/options 2>/dev/null; true"
    job, _, text = session.output(node, script, deadline=_DEADLINE).lstrip().partition("\n")
    return (slurm.read_options(text.strip()), job.strip()) if slurm.read_submitted(job) else None


def refuse_queued(session: Session, run: str, node: Node, job: str) -> None:
    """Refuse to resume a run whose job Slurm will start again.

    Raises:
        UsageError: its job is in the queue.
    """
    queued = _ask_job(session, [node], job)
    if queued is not None and queued.state in slurm.WAITING:
        raise UsageError(
            f"run {run} is in Slurm's queue as job {job} ({queued.reason or queued.state}) and resumes there",
            hint=f"to resume it otherwise: clusterctl stop {run}; then: "
            + session.again(command="resume", words=(run,)),
        )


@dataclass(kw_only=True)
class _SlurmStart(Start):
    """A start whose agents are processes of a Slurm job."""

    reserved: Reserved

    def start_agents(self, there: PurePosixPath) -> Mapping[str, int]:
        """Give every node its plan, let the job's step start the agents, and wait for them."""
        session, reserved = self.session, self.reserved
        assert reserved.chosen is not None
        assert reserved.on is not None
        names = reserved.chosen.names
        ranks = {node.name: rank for rank, node in enumerate(self.nodes)}
        options = "" if reserved.on.allocation else json.dumps(reserved.on.options.to_object())

        def hand(node: Node) -> int:
            plan, name = self.plans[ranks[node.name]], plan_name(ranks[node.name])
            script = render(
                "slurm/hand.sh.j2",
                plan=plan.to_json(),
                name=name,
                run=str(there),
                release=plan.prefix,
                node=names[node.name],
                job=reserved.job,
                options=options,
                logs=plan.logs,
            )
            text = session.output(node, script, deadline=_DEADLINE).strip()
            if not (text.isdecimal() and len(text) < 16):
                raise ClusterctlError(f"its answer is not the size of a file: {text[-200:]!r}")
            return int(text)

        handed = session.each(hand, on=self.nodes, limit=len(self.nodes), changes=True)
        self.refuse_failed(handed)
        if reserved.on.allocation is None:
            go = f"echo {quote(reserved.job)} >{quote(f'{there}/slurm/go')}"
            self.refuse_failed(session.each(lambda node: session.output(node, go, deadline=_DEADLINE), on=self.nodes))
        else:
            used = [names[node.name] for node in self.nodes]
            script = render(
                "slurm/launch.sh.j2",
                run=str(there),
                job=reserved.job,
                step=step(str(there), reserved.chosen, used) + 'wait "$cc_srun"\n',
            )
            self.refuse_failed(
                session.each(lambda node: _ask(session, node, script, "srun"), on=[self.nodes[0]], changes=True)
            )

        def wait(node: Node) -> int:
            arguments = ["-IS", f"{there}/agent", "await", "--after", handed.ok[node.name], "--patience", _AGENTS]
            arguments.append(f"{there}/{plan_name(ranks[node.name])}")
            script = render("run/agent_python.sh.j2", run=str(there), arguments=arguments)
            result = session.run(node, script, deadline=_AGENTS + _DEADLINE)
            answer = answer_of(result.out)
            if result.rc or answer.get("error"):
                why = answer.get("error") or result.err.strip() or f"the agent ended with status {result.rc}"
                raise ClusterctlError(f"{why}; Slurm's messages are in {there}/slurm/log on {self.nodes[0].name}")
            return handed.ok[node.name]

        started = session.each(wait, on=self.nodes, limit=len(self.nodes), changes=True)
        self.refuse_failed(started)
        reserved.handed = True
        return started.ok


def step(run: str, chosen: Chosen, names: Sequence[str] = ()) -> str:
    """The lines of sh that start one agent on each node of a job, in the background; ``cc_srun`` is their pid.

    ``names``: the nodes of an allocation, which is the user's.
    """
    options = [*_SRUN, *(["--no-kill"] if chosen.survives else [])]
    options += [f"--gpus-per-node={chosen.gpus}"] if chosen.gpus and not names else []
    options += [f"--nodelist={','.join(names)}", "--overlap"] if names else []
    survives = chosen.survives and not names
    agent = render("slurm/agent.sh.j2", ends_job=survives)
    count = len(names or chosen.nodes)
    return render("slurm/step.sh.j2", count=count, survives=survives, options=options, agent=agent, run=run)


def job_script(run: str, chosen: Chosen) -> str:
    """The batch script of a run; ``run`` is its folder on the nodes."""
    return render(
        "slurm/job.sh.j2",
        run=run,
        patience=_GATE,
        survives=chosen.survives,
        request=["--nodes", ",".join(chosen.names.values()), "--least", str(chosen.least)],
        step=step(run, chosen),
    )


def _submit(session: Session, run: str, options: Options, chosen: Chosen) -> str:
    """Submit the job. Returns its id."""
    script = job_script(str(run_folder(session.inventory, run)), chosen)
    submit = render("slurm/submit.sh.j2", seconds=ANSWER, options=slurm.arguments(options, run, chosen))
    try:
        out = _ask(session, chosen.nodes[0], submit, "sbatch", stdin=script.encode())
    except (UnansweredError, KeyboardInterrupt, InterruptedByUser):
        _cancel_named(session, chosen.nodes[0], run)
        raise
    job = slurm.read_submitted(out)
    if job is None:
        _cancel_named(session, chosen.nodes[0], run)
        raise PreflightError(
            "Slurm's answer to sbatch has no job id; nothing was started",
            reasons={chosen.nodes[0].name: out.strip()[-200:] or "it is empty"},
            hint=f"see whether the job {run} exists: squeue --me",
        )
    return job


def _wait(session: Session, chosen: Chosen, job: str) -> None:
    """Wait until a job has its nodes.

    Raises:
        PreflightError: it ended, it can never start, or Slurm does not answer.
        InterruptedByUser: Ctrl-C.
    """
    nodes = chosen.nodes
    pause, most = _LOOKS
    answered = time.monotonic()
    try:
        with session.stage("slurm", f"Waiting for Slurm job {job} on {fold(node.name for node in nodes)}") as shown:
            while True:
                try:
                    found = _ask_job(session, nodes, job)
                    answered = time.monotonic()
                except PreflightError:
                    if time.monotonic() - answered > OUTAGE:
                        raise
                    shown.progress(0, "Slurm's controller does not answer")
                else:
                    if found is not None and found.state == slurm.RUNNING:
                        refuse_other_nodes(chosen, found)
                        shown.states = dict.fromkeys((node.name for node in nodes), f"job {job}")
                        return
                    _refuse_ended(nodes, job, found)
                    assert found is not None
                    shown.progress(0, " ".join(filter(None, (found.state.lower(), found.reason))))
                time.sleep(pause)  # Slurm has no event for this
                pause = min(most, pause * 1.5)
    except KeyboardInterrupt:
        raise InterruptedByUser(
            f"interrupted while Slurm job {job} was waiting; it was cancelled", hint="run the same command again"
        ) from None


def refuse_other_nodes(chosen: Chosen, job: slurm.Job) -> None:
    """Refuse a job that runs on other nodes than it was submitted for: an option of ``--sbatch-arg`` changed them.

    Raises:
        PreflightError: nodes are missing, or others were added.
    """
    wanted = set(chosen.names.values())
    missing, added = sorted(wanted.difference(job.nodes)), sorted(set(job.nodes) - wanted)
    if not job.nodes or not (missing or added):  # names that cannot be read are no reason
        return
    parts = [f"it is without {fold(missing)}"] * bool(missing) + [f"it also has {fold(added)}"] * bool(added)
    raise PreflightError(
        f"Slurm job {job.id} runs on other nodes than the run; it was cancelled, and nothing was started",
        reasons={chosen.nodes[0].name: "; ".join(parts)},
        hint="choose nodes with --nodes, --limit and --exclude, not with --sbatch-arg",
    )


def _refuse_ended(nodes: Sequence[Node], job: str, found: slurm.Job | None) -> None:
    """Refuse a job that will not start.

    Raises:
        PreflightError: it ended, or it can never start.
    """
    if found is None or found.state not in slurm.WAITING:
        why = "it is no longer in the queue" if found is None else f"{found.state} {found.reason}".strip()
    elif found.reason in slurm.NEVER:
        why = f"it can never start: {found.reason}"
    else:
        return
    raise PreflightError(
        f"Slurm job {job} did not start; nothing was started",
        reasons={nodes[0].name: why},
        hint=f"on {nodes[0].name}: scontrol show job {job}; other limits: --partition, --time, --account",
    )


def _settled(session: Session, nodes: Sequence[Node], job: str) -> slurm.Job | None:
    """A job whose agents have ended, as soon as Slurm has decided between its end and its queue."""
    until = time.monotonic() + _SETTLING
    while True:
        found = _ask_job(session, nodes, job)
        if found is None or found.state in slurm.WAITING or time.monotonic() > until:
            return found
        time.sleep(_LOOKS[0])  # Slurm has no event for this


def _ask_job(session: Session, nodes: Sequence[Node], job: str) -> slurm.Job | None:
    """A job in the queue, by the first of the nodes that answers; None if it has ended."""
    script = f"timeout {ANSWER} squeue -h -j {quote(job)} -o {quote(slurm.JOB_FORMAT)} 2>&1"
    reasons: dict[str, str] = {}
    for node in nodes[:3]:
        try:
            result = session.run(node, script, deadline=_DEADLINE)
        except ClusterctlError as error:
            reasons[node.name] = str(error)
            continue
        if result.rc == 0 or "Invalid job id" in result.out:
            return slurm.read_job(result.out, job)
        reasons[node.name] = _why("squeue", result)
    raise PreflightError(f"whether Slurm job {job} is in the queue is not known", reasons=reasons, hint=_hint(reasons))


def _cancel(session: Session, node: Node, job: str) -> None:
    """Cancel a job that has not started a run."""
    try:
        session.output(node, f"timeout {ANSWER} scancel {quote(job)}", deadline=_DEADLINE)
    except ClusterctlError as error:
        session.warn(f"{node.name}: job {job} could not be cancelled: {error}. Run there: scancel {job}")


def _cancel_named(session: Session, node: Node, run: str) -> None:
    """Cancel the job of a run whose id is not known: Slurm may have accepted it before its answer was lost."""
    try:
        session.output(node, f"timeout {ANSWER} scancel --name={quote(run)}", deadline=_DEADLINE)
    except ClusterctlError as error:
        session.warn(
            f"{node.name}: whether Slurm has a job of run {run} is not known: {error}. "
            f"See there: squeue --me -n {run}; to cancel it: scancel --name={run}"
        )


class UnansweredError(PreflightError):
    """A program of Slurm gave no answer, so what it did is not known."""


def _ask(session: Session, node: Node, script: str, program: str, stdin: bytes | None = None) -> str:
    """The output of a program of Slurm.

    Raises:
        UsageError: it refuses the partition, the account or the time.
        PreflightError: it is missing, or it fails.
    """
    try:
        result = session.run(node, script, stdin=stdin, deadline=_DEADLINE)
    except ClusterctlError as error:
        raise UnansweredError(
            f"{program} cannot run on {node.name}; nothing was started",
            reasons={node.name: str(error)},
            hint=f"clusterctl check --limit {node.name}",
        ) from None
    if result.rc == 0:
        return result.out
    why = _why(program, result)
    wrong = ("nvalid partition", "nvalid account", "nvalid time limit", "nvalid generic resource", "nvalid qos")
    if any(text in why for text in wrong):
        raise UsageError(
            f"{node.name}: {why}; nothing was started",
            hint="what exists there: sinfo -s; sacctmgr show assoc user=$USER",
        )
    kind = UnansweredError if result.rc == 124 else PreflightError
    raise kind("Slurm refused the run; nothing was started", reasons={node.name: why}, hint=_hint({node.name: why}))


def _why(program: str, result: Result) -> str:
    """Why a program of Slurm failed."""
    text = " ".join(line.strip() for line in (result.err.strip() or result.out.strip()).splitlines())[:500]
    if result.rc == 124:
        return f"{program} had no answer within {ANSWER} s: Slurm's controller is down or cannot be reached"
    if result.rc == 127 or "not found" in text:
        return f"{program} is not installed there"
    return text or f"{program} ended with status {result.rc}"


def _hint(reasons: Mapping[str, str]) -> str:
    """What to do about a program of Slurm that failed."""
    text = " ".join(reasons.values())
    if "not installed" in text:
        return "install Slurm's client on the first node, or start without Slurm: omit --on slurm"
    if "ermission" in text or "Access" in text or "User's group" in text:
        return "ask Slurm's administrator, or log in as another user: ssh.user in the inventory"
    return "see whether Slurm works on that node: scontrol ping; sinfo"
