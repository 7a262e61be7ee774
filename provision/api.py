"""clusterctl from Python: ``pack``, ``deploy``, ``train``, ``rehearse``, ``runs``, ``metrics``, ``nodes`` and others.

Each function does the same as the command of that name and returns the result as frozen data. Nothing is printed:
``on_event`` receives the events that a command would show. Every error is a ``ClusterctlError`` with a ``hint``.
docs/api.md has an example.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from provision import hints, launchers
from provision.errors import (
    BundleError,
    ClusterctlError,
    InterruptedByUser,
    InventoryError,
    NodesFailedError,
    PreflightError,
    RunFailedError,
    UsageError,
)
from provision.inventory import load, local_inventory, select
from provision.model import CommandLine, Emit, Event, Inventory, Node, Notice, ignore
from provision.rehearsal.certificate import Certificate
from provision.rehearsal.faults import chosen as pick_faults
from provision.run import Job, node_history, record
from provision.run.found import Run
from provision.run.node_history import Excluded, NodeHistory
from provision.run.record import TrainResult
from provision.session import Session
from provision.slurm import Options as SlurmOptions
from provision.tasks import bundles as packing
from provision.tasks import deploy as deploying
from provision.tasks import logs as reading
from provision.tasks import rehearse as rehearsing
from provision.tasks import runs as finding
from provision.tasks import train as training
from provision.tasks.asked import asked_training, check_values, read_on, refuse_with_slurm, without_excluded
from provision.tasks.bundles import PackResult, bundle_of
from provision.tasks.deploy import DeployOptions, DeployResult
from provision.tasks.logs import Metrics
from provision.tasks.pattern import read_pattern
from provision.tasks.runs import Runs
from provision.tasks.start import Following

__all__ = [
    "BundleError",
    "Certificate",
    "ClusterctlError",
    "DeployResult",
    "Event",
    "Excluded",
    "InterruptedByUser",
    "InventoryError",
    "Metrics",
    "NodeHistory",
    "NodesFailedError",
    "PackResult",
    "PreflightError",
    "Run",
    "RunFailedError",
    "Runs",
    "SlurmOptions",
    "TrainResult",
    "UsageError",
    "deploy",
    "metrics",
    "nodes",
    "pack",
    "read_logs",
    "rehearse",
    "runs",
    "train",
    "trust",
]

AnyPath = str | os.PathLike[str]
INVENTORY = Path("inventory.yaml")


def pack(
    env: AnyPath | None = None,
    *,
    output: AnyPath | None = None,
    exclude: Sequence[str] = (),
    data: Sequence[AnyPath] = (),
    split: int = 0,
    with_ops: bool = False,
    on_event: Emit = ignore,
) -> PackResult:
    """Pack a conda environment into a bundle.

    Args:
        env: a path or the name of a conda environment; None: the active one.
        output: the bundle; None: NAME.ccb in the current folder. An existing bundle is replaced.
        exclude: patterns of files to skip, as in a .gitignore file.
        data: files and folders to pack as ``data/NAME`` in the environment.
        split: bytes of a part; 0: one file.
        with_ops: build the extensions that DeepSpeed would compile on the nodes.
        on_event: receives the progress.

    Raises:
        UsageError: there is no such environment, or the output cannot be written.
        BundleError: the environment cannot be packed.
    """
    return packing.pack_env(
        None if env is None else os.fspath(env),
        environ=os.environ,
        output=None if output is None else Path(output),
        exclude=exclude,
        data=[Path(each) for each in data],
        split=split,
        with_ops=with_ops,
        emit=on_event,
    )


def deploy(
    bundle: AnyPath,
    *,
    inventory: AnyPath = INVENTORY,
    limit: str | None = None,
    exclude: str | None = None,
    dry_run: bool = False,
    repair: bool = False,
    services: bool = True,
    on_event: Emit = ignore,
) -> DeployResult:
    """Bring a bundle or a conda-pack archive to the nodes, as the release behind the inventory's prefix.

    Args:
        bundle: its file.
        inventory: the inventory's file.
        limit: only these nodes, such as ``gpu[01-04]``.
        exclude: not these nodes.
        dry_run: change nothing; the result says what would be done.
        repair: send the damaged files of a release that exists.
        services: set up the inventory's services first.
        on_event: receives the progress.

    Raises:
        BundleError: the bundle is damaged, or cannot work at the prefix.
        PreflightError: nodes cannot take the release; nothing was changed.
        NodesFailedError: some nodes failed; the others are done.
    """
    cluster = load(Path(inventory))
    typed = _typed("deploy", cluster, (os.fspath(bundle),), limit=limit, exclude=exclude)
    with _session(cluster, typed, limit, exclude, on_event=on_event, dry_run=dry_run) as session:
        file = bundle_of(Path(bundle), emit=on_event)
        return deploying.deploy(session, file, DeployOptions(repair=repair, services=services))


def train(
    *command: str,
    inventory: AnyPath | None = None,
    nodes: int | None = None,
    limit: str | None = None,
    exclude: str | None = None,
    module: str | None = None,
    launcher: str = "auto",
    accelerate_config: AnyPath | None = None,
    gpus_per_node: int | None = None,
    code: AnyPath | None = None,
    include: Sequence[str] = (),
    output: str | None = None,
    resume_arg: str | None = None,
    zero: str | None = None,
    pattern: str | None = None,
    env: Mapping[str, str] | None = None,
    name: str | None = None,
    on: str | SlurmOptions | None = None,
    restarts: int = 0,
    copies: int | None = None,
    copies_space: str | None = None,
    copies_rate: str | None = None,
    save_to: str = "disk",
    save_every: str | None = None,
    lost_after: float | None = None,
    hang_after: float | None = None,
    on_hang: str = "stop",
    spares: int = 0,
    min_nodes: int | None = None,
    notify: str | None = None,
    expected: str | None = None,
    detach: bool = False,
    exclude_bad: bool = False,
    force: bool = False,
    on_event: Emit = ignore,
) -> TrainResult:
    """Train on the first nodes, and return when the run has finished, or has started with ``detach``.

    An interrupt (Ctrl-C, "interrupt kernel") stops the run on every node.

    Args:
        command: what ``clusterctl train`` takes: a configuration with ``KEY=VALUE`` words, a script with its arguments,
            or a launcher's whole command, such as ``"torchrun", "train.py"``; none: the inventory's ``train.config``.
        inventory: the inventory's file; None: inventory.yaml in this folder, or this machine alone if there is none.
        nodes: how many nodes; None: all.
        limit: only these nodes, such as ``gpu[01-04]``.
        exclude: not these nodes.
        module: run this module with ``command`` as its arguments.
        launcher: a launcher's name, or ``auto``.
        accelerate_config: the file that ``accelerate config`` wrote.
        gpus_per_node: processes to start on each node; None: one per GPU.
        code: the folder to send; None: the script's folder.
        include: patterns of git-ignored files to send too, as in a .gitignore file.
        output: the folder of the script's checkpoints, as the script names it.
        resume_arg: the script's option to resume, with ``{checkpoint}``.
        zero: the DeepSpeed configuration to make, such as ``2`` or ``3-offload``.
        pattern: a regular expression that reads the lines of the training, see docs/metrics.md.
        env: variables of every process, in addition to the inventory's.
        name: part of the run's id.
        on: ``ssh``, ``slurm`` or a ``SlurmOptions``, see docs/slurm.md; None: the nodes of the Slurm job in which this
            program runs, else ssh.
        restarts: how often a failed run is restarted from its newest checkpoint.
        copies: how many nodes copy a node's checkpoint files; None: 1.
        copies_space: the space for copies on each node, such as ``500G``; None: all but a tenth.
        copies_rate: bytes per second of copies, such as ``200M``; None: 4 % of the network.
        save_to: where the program saves first, ``disk`` or ``memory``.
        save_every: ``auto`` or a time span such as ``10min``, see docs/goodput.md; None: as the trainer does.
        lost_after: seconds of silence after which a node is lost; None: 60, or 15 with spares.
        hang_after: seconds without a step that count as a hang; None: from the run's speed.
        on_hang: what a hang does, ``stop`` or ``warn``.
        spares: how many further nodes replace lost ones, see docs/runs.md.
        min_nodes: with how many nodes the run may continue without spares; None: all.
        notify: a shell command that a node runs when something happens to the run, see docs/runs.md; None: the
            inventory's; empty: none.
        expected: what the run is judged by: an earlier run, ``LOW-HIGH`` seconds per step or ``none``; None: the plan's
            estimate.
        detach: return when the run has started on every node.
        exclude_bad: continue without nodes that cannot take part.
        force: continue although a check predicts a failure.
        on_event: receives the progress and the lines of rank 0's log.

    Raises:
        UsageError: an argument, the configuration or the script cannot be used.
        PreflightError: nodes cannot take part; nothing was started.
        NodesFailedError: nodes do not answer; nothing was started.
        RunFailedError: the run failed, and was stopped on every node.
        InterruptedByUser: it was stopped by an interrupt or by another command.
    """
    given = _given(locals())
    slurm_options = on if isinstance(on, SlurmOptions) else SlurmOptions()
    starter = "slurm" if isinstance(on, SlurmOptions) else on
    check_values(on=starter, restarts=restarts, copies=copies, save_to=save_to, spares=spares, min_nodes=min_nodes)
    cluster = _load_or_here(inventory, starts=True)
    start = read_on(cluster, starter, slurm_options)
    if start is not None:
        refuse_with_slurm(dry_run=False, exclude_bad=exclude_bad)
    exclude = without_excluded(cluster, limit, exclude, _warner(on_event))
    job = _job(cluster, given)
    count = None if spares or start is not None else nodes  # Slurm chooses among all of them
    chosen = select(cluster, limit=limit, exclude=exclude, count=count)
    cluster, first, asked = _asked(
        cluster,
        chosen,
        job,
        given,
        on_event,
        restarts=restarts,
        copies=copies,
        copies_space=copies_space,
        copies_rate=copies_rate,
        save_to=save_to,
        save_every=save_every,
        spares=spares,
        min_nodes=min_nodes,
        notify=notify,
        expected=expected,
        following=Following(detach),
    )
    typed = _typed("train", cluster, asked.words, nodes=nodes, limit=limit, exclude=exclude)
    with _on(cluster, chosen if start is not None else first, typed, on_event=on_event) as session:
        return training.train(session, replace(asked, on=start))


def rehearse(
    *command: str,
    yes: bool = False,
    inventory: AnyPath | None = None,
    nodes: int | None = None,
    limit: str | None = None,
    exclude: str | None = None,
    module: str | None = None,
    launcher: str = "auto",
    accelerate_config: AnyPath | None = None,
    gpus_per_node: int | None = None,
    code: AnyPath | None = None,
    include: Sequence[str] = (),
    output: str | None = None,
    resume_arg: str | None = None,
    zero: str | None = None,
    pattern: str | None = None,
    env: Mapping[str, str] | None = None,
    name: str | None = None,
    lost_after: float | None = None,
    hang_after: float | None = None,
    on_hang: str = "stop",
    exclude_bad: bool = False,
    minutes: float = 15.0,
    faults: Sequence[str] | None = None,
    force: bool = False,
    on_event: Emit = ignore,
) -> Certificate:
    """Inject faults into a short run of a job, and return what it survived; see docs/rehearsal.md.

    ``certificate.having("not survived")`` has the faults that the job did not survive. They raise no error.

    Args:
        command: the job, as for ``train``.
        yes: must be true: the rehearsal kills processes of its run and cuts a node's network.
        inventory: the inventory's file; None: inventory.yaml in this folder, or this machine alone if there is none.
        nodes: how many nodes; None: all.
        limit: only these nodes, such as ``gpu[01-04]``.
        exclude: not these nodes.
        module: run this module with ``command`` as its arguments.
        launcher: a launcher's name, or ``auto``.
        accelerate_config: the file that ``accelerate config`` wrote.
        gpus_per_node: processes to start on each node; None: one per GPU.
        code: the folder to send; None: the script's folder.
        include: patterns of git-ignored files to send too, as in a .gitignore file.
        output: the folder of the script's checkpoints, as the script names it.
        resume_arg: the script's option to resume, with ``{checkpoint}``.
        zero: the DeepSpeed configuration to make, such as ``2`` or ``3-offload``.
        pattern: a regular expression that reads the lines of the training, see docs/metrics.md.
        env: variables of every process, in addition to the inventory's.
        name: part of the run's id.
        lost_after: seconds of silence after which a node is lost; None: 60.
        hang_after: seconds without a step that count as a hang; None: from the run's speed.
        on_hang: what a hang does, ``stop`` or ``warn``.
        exclude_bad: continue without nodes that cannot take part.
        minutes: inject no fault after this time.
        faults: only these faults; None: all.
        force: rehearse although a check fails or others use the nodes.
        on_event: receives the progress.

    Raises:
        UsageError: an argument or the job cannot be used, or ``yes`` is missing.
        PreflightError: others use the nodes, or nodes cannot take part; nothing was started.
        RunFailedError: the job failed, or reported no step, before any fault.
        InterruptedByUser: an interrupt; everything was undone and removed.
    """
    given = _given(locals())
    check_values(minutes=minutes)
    picked = pick_faults(None if faults is None else ",".join(faults))
    cluster = _load_or_here(inventory, starts=True)
    job = _job(cluster, given)
    chosen = select(cluster, limit=limit, exclude=exclude, count=nodes)
    cluster, first, asked = _asked(cluster, chosen, job, given, on_event, following=Following(detach=True))
    typed = _typed("rehearse", cluster, asked.words, nodes=nodes, limit=limit, exclude=exclude)
    if not yes:
        raise UsageError(
            "a rehearsal kills processes of its run and cuts a node's network",
            hint="to rehearse: rehearse(…, yes=True)",
        )
    with _on(cluster, first, typed, on_event=on_event) as session:
        return rehearsing.rehearse(session, rehearsing.Rehearsal(asked, picked, 60.0 * minutes, force))


def nodes(
    *, inventory: AnyPath = INVENTORY, limit: str | None = None, exclude: str | None = None
) -> tuple[NodeHistory, ...]:
    """What this machine's records of runs say about each node, the worst first. Connects to no node.

    Args:
        inventory: the inventory's file.
        limit: only these nodes, such as ``gpu[01-04]``.
        exclude: not these nodes.

    Raises:
        UsageError: the list of excluded nodes cannot be used.
    """
    cluster = load(Path(inventory))
    names = [node.name for node in select(cluster, limit=limit, exclude=exclude)]
    return node_history.histories(names, record.kept(cluster.path), node_history.read(cluster.path))


def trust(*names: str, inventory: AnyPath = INVENTORY) -> dict[str, Excluded]:
    """Let ``train`` use excluded nodes again. Returns those that were excluded, with the reasons.

    Args:
        names: the nodes, such as ``gpu03`` or ``gpu[01-04]``.
        inventory: the inventory's file.

    Raises:
        UsageError: a name is unknown, none was given, or the list of excluded nodes cannot be used.
    """
    if not names:
        raise UsageError("no node is named", hint='trust("NODE"); the excluded ones: nodes()')
    cluster = load(Path(inventory))
    return node_history.trust(cluster.path, [node.name for node in select(cluster, limit=",".join(names))])


def runs(
    *,
    inventory: AnyPath | None = None,
    limit: str | None = None,
    exclude: str | None = None,
    on_event: Emit = ignore,
) -> Runs:
    """The runs that the nodes know, by id, the oldest first; and the nodes that did not answer.

    Args:
        inventory: the inventory's file; None: inventory.yaml in this folder, or this machine alone if there is none.
        limit: ask only these nodes.
        exclude: do not ask these nodes.
        on_event: receives the progress.

    Raises:
        NodesFailedError: no node answered.
    """
    cluster = _load_or_here(inventory)
    typed = _typed("status", cluster, (), limit=limit, exclude=exclude)
    with _session(cluster, typed, limit, exclude, on_event=on_event) as session:
        return finding.find_all(session)


def metrics(
    run: str | None = None,
    *,
    rank: int | None = None,
    logging_steps: int | None = None,
    pattern: str | None = None,
    inventory: AnyPath | None = None,
    on_event: Emit = ignore,
) -> Metrics:
    """The numbers of a run: ``.series`` has a row for each step, with loss, lr, grad_norm, ms and tokens_per_second.

    Args:
        run: its id or a part of it; None: the newest.
        rank: the rank whose numbers are returned; None: the lowest rank that prints a loss.
        logging_steps: the Trainer's, where its lines name no steps.
        pattern: a regular expression that reads the lines, see docs/metrics.md; None: the run's own, if it has one.
        inventory: the inventory's file; None: inventory.yaml in this folder, or this machine alone if there is none.
        on_event: receives the progress.

    Raises:
        UsageError: no run matches, several do, or it has printed no numbers.
        NodesFailedError: no node answered, and this machine has no log of the run.
    """
    cluster = _load_or_here(inventory)
    words = () if run is None else (run,)
    how = reading.How(rank, logging_steps, read_pattern(pattern))
    with _session(cluster, _typed("metrics", cluster, words), on_event=on_event) as session:
        return reading.read_run(session, run, how)


def read_logs(
    *logs: AnyPath,
    rank: int | None = None,
    logging_steps: int | None = None,
    pattern: str | None = None,
    on_event: Emit = ignore,
) -> Metrics:
    """The numbers in logs of any trainer: files or folders, parts of one training, the oldest first.

    Args:
        logs: the files.
        rank: see ``metrics``.
        logging_steps: see ``metrics``.
        pattern: see ``metrics``.
        on_event: receives the progress.

    Raises:
        UsageError: a log does not exist, cannot be read, or has no numbers.
    """
    opened = [reading.open_log(Path(each)) for each in logs]
    return reading.read_logs(opened, reading.How(rank, logging_steps, read_pattern(pattern)), emit=on_event)


def _load_or_here(path: AnyPath | None, *, starts: bool = False) -> Inventory:
    """The inventory; without a file, this machine alone."""
    if path is None and not INVENTORY.exists():
        return local_inventory(starts=starts)
    return load(Path(path or INVENTORY))


_OF_JOB = ("module", "launcher", "accelerate_config", "gpus_per_node", "code", "include", "output", "resume_arg")
_OF_ASKED = ("module", "zero", "pattern", "name", "lost_after", "hang_after", "on_hang", "exclude_bad", "force")


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that ``train`` and ``rehearse`` share, of a call of one of them.

    Raises:
        UsageError: one of them cannot be used.
    """
    names = ("command", "env", "nodes", *_OF_JOB, *_OF_ASKED)
    given = {name: arguments[name] for name in names}
    if given["launcher"] not in ("auto", *launchers.names()):
        text = f"launcher {given['launcher']!r}: there is no such launcher"
        raise UsageError(text, hint=", ".join(launchers.names()))
    checked = ("nodes", "gpus_per_node", "zero", "lost_after", "hang_after", "on_hang")
    check_values(**{name: given[name] for name in checked})
    return given


def _job(cluster: Inventory, given: dict[str, Any]) -> Job:
    """The job of a call; ``given["command"]`` has its words then."""
    given["command"] = given["command"] or (() if given["module"] else (str(training.find_config(cluster)),))
    paths: dict[str, Any] = {
        name: None if given[name] is None else Path(given[name]) for name in ("accelerate_config", "code")
    }
    return launchers.from_words(
        given["command"],
        module=given["module"],
        **{name: given[name] for name in ("launcher", "output", "resume_arg")},
        **paths,
        per_node=given["gpus_per_node"],
        send=tuple(given["include"]),
    )


def _asked(
    cluster: Inventory, chosen: Sequence[Node], job: Job, given: Mapping[str, Any], emit: Emit, **options: Any
) -> tuple[Inventory, tuple[Node, ...], training.Training]:
    """The training of a call, its nodes, and the inventory with its variables."""
    return asked_training(
        cluster,
        chosen,
        job,
        tuple(given["command"]),
        count=given["nodes"],
        env=given["env"] or {},
        warn=_warner(emit),
        **{name: given[name] for name in _OF_ASKED},
        **options,
    )


def _warner(emit: Emit) -> Callable[[str], None]:
    return lambda text: emit(Notice(text, "warning"))


def _typed(command: str, inventory: Inventory, words: Sequence[str], **options: object) -> CommandLine:
    """The command line that does the same, for hints that can be pasted."""
    given = {f"--{name}": (str(value),) for name, value in options.items() if value is not None}
    if not inventory.alone:
        given["--inventory"] = (str(inventory.path),)
    return CommandLine(command, given, tuple(words))


def _session(
    inventory: Inventory,
    typed: CommandLine,
    limit: str | None = None,
    exclude: str | None = None,
    *,
    on_event: Emit,
    dry_run: bool = False,
) -> AbstractContextManager[Session]:
    """The session of the selected nodes; see ``_on``."""
    return _on(inventory, select(inventory, limit=limit, exclude=exclude), typed, on_event=on_event, dry_run=dry_run)


@contextmanager
def _on(
    inventory: Inventory, nodes: Sequence[Node], typed: CommandLine, *, on_event: Emit, dry_run: bool = False
) -> Iterator[Session]:
    """A session that asks nothing. It completes the commands in an error's hints, so that they work when pasted."""
    try:
        with Session(inventory, nodes, typed=typed, emit=on_event, dry_run=dry_run) as session:
            yield session
    except ClusterctlError as error:
        error.complete(partial(hints.complete, typed))
        raise
