"""``clusterctl train`` and ``resume``, and what Ctrl-C does to a run that they follow."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import click

from provision import launchers
from provision.cli.cluster import Selection, on_nodes, refuse_alone, session_on
from provision.cli.options import COUNT, INDEX, SECONDS, Number, number, reporting
from provision.errors import UsageError
from provision.inventory.document import shown
from provision.launchers import from_words
from provision.launchers.kit.plans import split_resume_arg
from provision.masking import is_secret, mask_words
from provision.model import Inventory, Node, Notice
from provision.output import Reporter
from provision.run import Job
from provision.run.ignored import unsent_text
from provision.run.shells import as_cmd, as_powershell, as_sh
from provision.session import Session
from provision.slurm import Options, read_allocation
from provision.summaries.runs import train_output
from provision.tasks import resume as resuming
from provision.tasks import train as tasks
from provision.tasks.asked import (
    HANG_CHOICES,
    ON_CHOICES,
    SAVE_CHOICES,
    asked_training,
    read_on,
    refuse_with_slurm,
    size,
    without_excluded,
)
from provision.tasks.notify import read_notify
from provision.tasks.resume_arg import AskResume
from provision.tasks.start import Ask, Choice, Following, HungUp
from provision.tasks.train import ZERO_CHOICES, Training, find_config
from trainer.agent.contract.plan import COPIES
from trainer.bounds import Bound

_SHELLS = {"sh": as_sh, "powershell": as_powershell, "cmd": as_cmd}
_PATH = click.Path(path_type=Path)
_QUESTION = "[d]etach and let it run, [s]top it on every node, or [c]ontinue? "
_CHOICES: dict[str, Choice] = {"d": "detach", "s": "stop", "c": "continue"}

_Options = tuple[Callable[[Callable[..., None]], Callable[..., None]], ...]

_RESUME_ARG = click.option(
    "--resume-arg", metavar="TEXT", help="Arguments for a resumed run, e.g. '--from {checkpoint}'."
)

_NOTIFY = click.option(
    "--notify",
    metavar="CMD",
    help="Run this on a node at the end, a failure, a restart, a hang, a slowdown or a full disk.",
)

_EXPECTED = click.option(
    "--expected",
    metavar="RUN|LOW-HIGH|none",
    help="Report slowness against an earlier run, or seconds per step.  [default: the plan's estimate]",
)

_SAVE_EVERY = click.option(
    "--save-every",
    metavar="auto|SPAN",
    help="Save at the best interval, or e.g. every 10min. Own trainers, LLaMA-Factory.",
)

JOB_OPTIONS: _Options = (
    click.option(
        "--launcher",
        type=click.Choice(["auto", *launchers.names()]),
        default="auto",
        show_default=True,
        help="Program that starts the processes.",
    ),
    click.option("-m", "module", metavar="MODULE", help="Run a module, like python -m."),
    click.option(
        "--code", type=_PATH, metavar="DIR", help="Code to copy to the nodes.  [default: the script's directory]"
    ),
    click.option(
        "--include",
        "send",
        metavar="PATTERN",
        multiple=True,
        help="Also send these git-ignored files, as in a .gitignore. Repeatable.",
    ),
    number("--gpus-per-node", "per_node", type=COUNT, help="Processes per node.  [default: one per GPU]"),
    *(
        click.option(f"--{name}-config", type=_PATH, metavar="FILE", help=text)
        for name, text in launchers.config_options().items()
    ),
    click.option("--output", metavar="DIR", help="Checkpoint directory, as the script receives it."),
    _RESUME_ARG,
    click.option("--zero", type=click.Choice(ZERO_CHOICES), help="Write a DeepSpeed configuration of this ZeRO stage."),
    click.option(
        "--env",
        "variables",
        metavar="NAME[=VALUE]",
        multiple=True,
        help="Set a variable; without VALUE, copy it from here.",
    ),
    click.option(
        "--pattern",
        metavar="REGEX",
        help=r"Read the log's lines with this, e.g. 'step (?P<step>\d+).*loss (?P<loss>[\d.]+)'.",
    ),
    click.option("--name", metavar="NAME", help="Name in the run's id."),
)
_OF_JOB = (
    "launcher",
    "code",
    "send",
    "per_node",
    "output",
    "resume_arg",
    *(f"{n}_config" for n in launchers.config_options()),
)
_COPIES_BOUND = Number(int, Bound(low=0, high=COPIES))
_COPIES: _Options = (
    number("--copies", type=_COPIES_BOUND, help="Nodes that copy a node's checkpoint files.  [default: 1]"),
    click.option("--copies-space", metavar="SIZE", help="Space for copies on each node.  [default: all but a tenth]"),
    click.option("--copies-rate", metavar="SIZE", help="Bytes per second of copies.  [default: 4 % of the network]"),
)
_SLURM: _Options = (
    click.option(
        "--on",
        "starter",
        type=click.Choice(ON_CHOICES),
        help="Start the agents by ssh, or as a Slurm job.  [default: ssh; within a Slurm job, on its nodes]",
    ),
    click.option("--partition", metavar="NAME", help="With --on slurm: the partition."),
    click.option(
        "--time", "limit_time", metavar="TIME", help="With --on slurm: the job's time limit, e.g. 2-12:00:00."
    ),
    click.option("--account", metavar="NAME", help="With --on slurm: the account to charge."),
    click.option(
        "--sbatch-arg",
        "sbatch",
        metavar="OPTION",
        multiple=True,
        help="Another option of sbatch, e.g. --qos=high. Repeatable.",
    ),
)
POLICY_OPTIONS: _Options = (
    number(
        "--lost-after",
        type=SECONDS,
        metavar="SECONDS",
        help="Silence after which a node is lost.  [default: 60; 15 with --spares]",
    ),
    number(
        "--hang-after",
        type=SECONDS,
        metavar="SECONDS",
        help="Time without a step that counts as a hang.  [default: from the run's speed]",
    ),
    click.option(
        "--on-hang",
        type=click.Choice(HANG_CHOICES),
        default="stop",
        show_default=True,
        help="What to do about a hang.",
    ),
)
EXCLUDE_BAD = click.option("--exclude-bad", is_flag=True, help="Train without nodes that fail the checks.")
_HOW: _Options = (
    click.option("--detach", is_flag=True, help="Return once the run has started on every node."),
    number("--restarts", type=INDEX, default=0, help="Restart a failed run up to N times."),
    *_COPIES,
    click.option(
        "--save-to",
        type=click.Choice(SAVE_CHOICES),
        default="disk",
        show_default=True,
        help="Where the program saves first.",
    ),
    *POLICY_OPTIONS,
    number("--spares", type=INDEX, default=0, help="Keep N further nodes to replace lost ones."),
    number("--min-nodes", type=COUNT, help="Without spares left, continue on at least N nodes."),
    _SAVE_EVERY,
    _NOTIFY,
    _EXPECTED,
    EXCLUDE_BAD,
    click.option("--force", is_flag=True, help="Start even if a check predicts a failure."),
    click.option("--dry-run", is_flag=True, help="Print each node's commands; start nothing."),
    click.option(
        "--shell", type=click.Choice(list(_SHELLS)), default="sh", show_default=True, help="Syntax of --dry-run."
    ),
)


def with_options(options: _Options) -> Callable[..., Any]:
    """Adds options to a command, in their order."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.command("train")
@on_nodes
@number("--nodes", "-n", "count", type=COUNT, help="Train on the first N nodes.")
@with_options(JOB_OPTIONS)
@with_options(_SLURM)
@with_options(_HOW)
@click.argument("words", nargs=-1, metavar="[CONFIG | SCRIPT] [-- ARGS...]")
@reporting
def train_command(
    reporter: Reporter,
    selection: Selection,
    count: int | None,
    shell: str,
    *,
    dry_run: bool,
    starter: str | None,
    partition: str | None,
    limit_time: str | None,
    account: str | None,
    sbatch: tuple[str, ...],
    **options: Any,
) -> None:
    """Start a training run.

    CONFIG is a LLaMA-Factory YAML file. It defaults to train.config of the inventory, then to train.yaml in this
    directory. SCRIPT is a Python script whose arguments follow `--`. A complete torchrun, deepspeed or accelerate
    launch command can also follow `--`. Files with relative paths are copied to the nodes. Absolute paths are paths on
    the nodes.
    """
    inventory = selection.load_or_here(reporter, nodes=count, starts=True)
    on = read_on(inventory, starter, Options(partition, limit_time, account, sbatch))
    skipped = without_excluded(inventory, selection.limit, selection.exclude, reporter.warn)
    selection = replace(selection, exclude=skipped)
    wanted = None if options["spares"] or on is not None else count  # Slurm chooses among all of them
    nodes = selection.nodes(inventory, wanted)
    if on is not None:
        refuse_with_slurm(dry_run=dry_run, exclude_bad=options["exclude_bad"])
    inventory, first, asked = read_training(reporter, inventory, nodes, count=count, **options)
    nodes = nodes if on is not None else first
    asked = replace(asked, on=on)
    if dry_run:
        with session_on(reporter, inventory, nodes, dry_run=True) as session:
            _show(reporter, session, asked, shell)
        return
    with detach_on_hangup(), session_on(reporter, inventory, nodes) as session:
        result = tasks.train(session, asked)
    reporter.result(*train_output(result))


def read_training(
    reporter: Reporter,
    inventory: Inventory,
    nodes: Sequence[Node],
    *,
    count: int | None,
    words: tuple[str, ...],
    module: str | None,
    variables: tuple[str, ...],
    notify: str | None,
    detach: bool,
    **options: Any,
) -> tuple[Inventory, tuple[Node, ...], Training]:
    """The training that the options and arguments of ``train`` mean, its nodes, and the inventory with its variables.

    Raises:
        UsageError: an option or the job cannot be used.
    """
    if not words and module is None:
        words = (str(find_config(inventory)),)
    of_job = {name: options.pop(name) for name in _OF_JOB if name in options}
    job: Job = from_words(words, module=module, **of_job)
    if inventory.alone:
        refuse_alone(count if count is not None else job.nodes)
    return asked_training(
        inventory,
        nodes,
        job,
        words,
        count=count,
        module=module,
        env=read_variables(variables, reporter),
        warn=reporter.warn,
        notify=notify,
        following=Following(detach, None if detach else ask_detach_or_stop(reporter)),
        ask_resume=ask_resume_arg(reporter),
        **options,
    )


def _show(reporter: Reporter, session: Session, asked: Training, shell: str) -> None:
    """Print each node's commands, the notices, and all files that stay behind."""
    spec, launched, files = tasks.dry_run(session, asked)
    for text in (*files.notices, *([unsent_text(files.unsent, complete=True)] if files.unsent else ())):
        reporter(Notice(text))
    for notice in launched.notices:
        reporter(notice)
    if asked.pattern is not None:
        reporter(Notice(f"only this pattern reads steps and losses: {asked.pattern}"))
    scripts = {plan.node: _SHELLS[shell](plan) for plan in launched.plans}
    about = {"world_size": sum(each.processes for each in spec.active), "pattern": asked.pattern}
    data = {"run": None, "nodes": list(scripts), **about}
    plans = {plan.node: {"argv": mask_words(plan.argv), "cwd": plan.cwd, "port": plan.port} for plan in launched.plans}
    unsent = [{"path": each.path, "bytes": each.size} for each in files.unsent]
    reporter.result(
        {**data, "plans": plans, "scripts": scripts, "unsent": unsent}, "\n".join(scripts.values()).rstrip("\n")
    )


def read_variables(given: tuple[str, ...], reporter: Reporter) -> dict[str, str]:
    """The variables of ``--env``: ``NAME``, copied from this command's environment, or ``NAME=VALUE``.

    Raises:
        UsageError: an invalid name, or a name that is not set here.
    """
    found = {}
    for each in given:
        name, has, value = each.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise UsageError(f"--env {shown(name)}: not a valid variable name", hint="--env NAME, or --env NAME=VALUE")
        if not has and name not in os.environ:
            raise UsageError(
                f"--env {name}: {name} is not set in this command's environment",
                hint=f"export {name}=VALUE, then use --env {name}; or --env {name}=VALUE if it is not a secret",
            )
        if has and value and is_secret(name):
            text = f"--env {name}=VALUE: every user of this machine can read the value in the list of processes (ps)"
            reporter(Notice(f"{text}; export {name}, then use --env {name}", "warning"))
        found[name] = value if has else os.environ[name]
    return found


@click.command("resume")
@on_nodes
@number("--nodes", "-n", "count", type=COUNT, help="Resume on the first N of its nodes.")
@click.option("--detach", is_flag=True, help="Return once the run has started on every node.")
@number("--restarts", type=INDEX, help="Restart a failed run up to N times.")
@with_options(_COPIES)
@click.option("--save-to", type=click.Choice(SAVE_CHOICES), help="Where the program saves first.  [default: as before]")
@click.option("--force", is_flag=True, help="Start even if a check predicts a failure.")
@_RESUME_ARG
@_NOTIFY
@click.argument("run", required=False)
@reporting
def resume_command(
    reporter: Reporter,
    selection: Selection,
    count: int | None,
    restarts: int | None,
    copies: int | None,
    copies_space: str | None,
    copies_rate: str | None,
    save_to: str | None,
    resume_arg: str | None,
    notify: str | None,
    run: str | None,
    *,
    detach: bool,
    force: bool,
) -> None:
    """Resume a run from its newest complete checkpoint.

    RUN is a run's id or part of it. The default is the newest run. Code and configuration are those of the run. So are
    the nodes, unless --nodes, --limit or --exclude select some of them. The nodes keep the order of their ranks.
    """
    following = Following(detach, ask_detach_or_stop(reporter))
    ask = ask_resume_arg(reporter)
    memory = None if save_to is None else save_to == "memory"
    changed = resuming.CopiesOptions(copies, size(copies_space), size(copies_rate) or None, memory)
    options = resuming.ResumeOptions(
        force,
        count,
        restarts,
        following,
        resume_arg,
        ask,
        read_notify(notify),
        copies=changed,
        allocation=read_allocation(os.environ),
    )
    with detach_on_hangup(), selection.session_or_here(reporter, starts=True) as session:
        result = resuming.resume(session, run, options)
    reporter.result(*train_output(result))


def ask_resume_arg(reporter: Reporter) -> AskResume | None:
    """A prompt for the arguments by which a program resumes; None without a terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None

    def ask(name: str) -> str:
        with reporter.paused():
            while True:
                click.echo(
                    f"{name}: arguments to resume, such as --resume {{checkpoint}} (empty: none): ", nl=False, err=True
                )
                text = sys.stdin.readline().strip()
                try:
                    split_resume_arg(text)
                except UsageError as error:
                    click.echo(f"{error}; {error.hint}", err=True)
                else:
                    return text

    return ask


def ask_detach_or_stop(reporter: Reporter) -> Ask | None:
    """A prompt for what Ctrl-C does; None without a terminal. Another Ctrl-C stops the run."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None

    def ask() -> Choice:
        with reporter.paused():
            try:
                while True:
                    click.echo(f"\n{_QUESTION}", nl=False, err=True)
                    line = sys.stdin.readline()
                    if not line:  # the terminal was closed
                        return "detach"
                    if choice := _CHOICES.get(line.strip().lower()[:1]):
                        return choice
            except HungUp:
                raise
            except KeyboardInterrupt:
                click.echo("\nstopping the run; press Ctrl-C again to leave it as it is", err=True)
                return "stop"

    return ask


@contextmanager
def detach_on_hangup() -> Iterator[None]:
    """Within this, SIGTERM and SIGHUP detach from the followed run instead of stopping it."""

    def hang_up(_number: int, _frame: FrameType | None) -> None:
        raise HungUp

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # nohup
                signal.signal(number, hang_up)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
