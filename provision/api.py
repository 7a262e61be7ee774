"""clusterctl from Python: ``pack``, ``deploy``, ``train``, ``runs``, ``metrics`` and ``read_logs``.

Each function does the same as the command of that name and returns the result as frozen data. Nothing is printed:
``on_event`` receives the events that a command would show. Every error is a ``ClusterctlError`` with a ``hint``.
docs/api.md has an example.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

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
from provision.model import CommandLine, Emit, Event, Inventory, Notice, ignore
from provision.run import node_history
from provision.run.found import Run
from provision.run.record import TrainResult
from provision.run.spec import count_nodes
from provision.session import Session
from provision.tasks import bundles as packing
from provision.tasks import deploy as deploying
from provision.tasks import logs as reading
from provision.tasks import runs as finding
from provision.tasks import train as training
from provision.tasks.bundles import PackResult, bundle_of
from provision.tasks.deploy import DeployOptions, DeployResult
from provision.tasks.gate import GateOptions
from provision.tasks.logs import Metrics
from provision.tasks.notify import read_notify
from provision.tasks.pattern import read_pattern
from provision.tasks.runs import Runs
from provision.tasks.start import Following

__all__ = [
    "BundleError",
    "ClusterctlError",
    "DeployResult",
    "Event",
    "InterruptedByUser",
    "InventoryError",
    "Metrics",
    "NodesFailedError",
    "PackResult",
    "PreflightError",
    "Run",
    "RunFailedError",
    "Runs",
    "TrainResult",
    "UsageError",
    "deploy",
    "metrics",
    "pack",
    "read_logs",
    "runs",
    "train",
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
    gpus_per_node: int | None = None,
    code: AnyPath | None = None,
    output: str | None = None,
    resume_arg: str | None = None,
    zero: str | None = None,
    pattern: str | None = None,
    env: Mapping[str, str] | None = None,
    name: str | None = None,
    restarts: int = 0,
    notify: str | None = None,
    expected: str | None = None,
    save_every: str | None = None,
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
        gpus_per_node: processes to start on each node; None: one per GPU.
        code: the folder to send; None: the script's folder.
        output: the folder of the script's checkpoints, as the script names it.
        resume_arg: the script's option to resume, with ``{checkpoint}``.
        zero: the DeepSpeed configuration to make, such as ``2`` or ``3-offload``.
        pattern: a regular expression that reads the lines of the training, see docs/metrics.md.
        env: variables of every process, in addition to the inventory's.
        name: part of the run's id.
        restarts: how often a failed run is restarted from its newest checkpoint.
        notify: a shell command that a node runs when something happens to the run, see docs/runs.md; None: the
            inventory's; empty: none.
        expected: what the run is judged by: an earlier run, ``LOW-HIGH`` seconds per step or ``none``; None: the plan's
            estimate.
        save_every: ``auto`` or a time span such as ``10min``, see docs/goodput.md; None: as the trainer does.
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
    if launcher not in ("auto", *launchers.names()):
        raise UsageError(f"launcher {launcher!r}: there is no such launcher", hint=", ".join(launchers.names()))
    if zero is not None and zero not in training.ZERO_CHOICES:
        raise UsageError(f"zero {zero!r}: there is no such stage", hint=", ".join(training.ZERO_CHOICES))
    cluster = _load_or_here(inventory, starts=True)
    words = command or (() if module else (str(training.find_config(cluster)),))
    job = launchers.from_words(
        words,
        module=module,
        launcher=launcher,
        per_node=gpus_per_node,
        code=None if code is None else Path(code),
        output=output,
        resume_arg=resume_arg,
    )
    gone: dict[str, str] = {}
    if not cluster.alone:
        names = [node.name for node in select(cluster, limit=limit, exclude=exclude)]
        gone = node_history.skipped(cluster.path, names)
    for text in gone.values():
        on_event(Notice(text, "warning"))
    exclude = ",".join(filter(None, (exclude, *gone))) or None
    wanted, job = count_nodes(job, nodes, select(cluster, limit=limit, exclude=exclude))
    cluster = replace(cluster, train=replace(cluster.train, env={**cluster.train.env, **(env or {})}))
    asked = training.Training(
        job=job,
        words=(*(("-m", module) if module else ()), *words),
        name=name,
        zero=zero,
        pattern=pattern,
        policy=training.Policy(restarts=restarts),
        gate=GateOptions(exclude_bad=exclude_bad, force=force, asked=wanted),
        following=Following(detach),
        notify=read_notify(notify, "notify"),
        expected=expected,
        save_every=save_every,
    )
    typed = _typed("train", cluster, words, nodes=wanted, limit=limit, exclude=exclude)
    with _session(cluster, typed, limit, exclude, count=wanted, on_event=on_event) as session:
        return training.train(session, asked)


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


def _typed(command: str, inventory: Inventory, words: Sequence[str], **options: object) -> CommandLine:
    """The command line that does the same, for hints that can be pasted."""
    given = {f"--{name}": (str(value),) for name, value in options.items() if value is not None}
    if not inventory.alone:
        given["--inventory"] = (str(inventory.path),)
    return CommandLine(command, given, tuple(words))


@contextmanager
def _session(
    inventory: Inventory,
    typed: CommandLine,
    limit: str | None = None,
    exclude: str | None = None,
    *,
    count: int | None = None,
    on_event: Emit,
    dry_run: bool = False,
) -> Iterator[Session]:
    """A session that asks nothing. It completes the commands in an error's hints, so that they work when pasted."""
    nodes = select(inventory, limit=limit, exclude=exclude, count=count)
    try:
        with Session(inventory, nodes, typed=typed, emit=on_event, dry_run=dry_run) as session:
            yield session
    except ClusterctlError as error:
        error.complete(partial(hints.complete, typed))
        raise
