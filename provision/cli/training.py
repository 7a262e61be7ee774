"""``clusterctl train``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from provision import launchers
from provision.cli.cluster import load_or_here, on_nodes, refuse_alone, session_on
from provision.cli.options import COUNT, INDEX, SECONDS, number, reporting
from provision.cli.terminal import asking, letting_go
from provision.errors import UsageError
from provision.inventory import select
from provision.inventory.document import shown
from provision.launchers import from_words
from provision.masking import is_secret, mask_words
from provision.model import Notice
from provision.output import Reporter
from provision.run import Job
from provision.run.shells import as_cmd, as_powershell, as_sh
from provision.run.spec import count_nodes
from provision.session import Session
from provision.summaries.runs import train_output
from provision.tasks import train as tasks
from provision.tasks.gate import GateOptions
from provision.tasks.start import Following
from provision.tasks.train import ZERO_CHOICES, Policy, Training, find_config

_SHELLS = {"sh": as_sh, "powershell": as_powershell, "cmd": as_cmd}
_PATH = click.Path(path_type=Path)

_Options = tuple[Callable[[Callable[..., None]], Callable[..., None]], ...]

_WHAT: _Options = (
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
    number("--gpus-per-node", "per_node", type=COUNT, help="Processes per node.  [default: one per GPU]"),
    *(
        click.option(f"--{name}-config", type=_PATH, metavar="FILE", help=text)
        for name, text in launchers.config_options().items()
    ),
    click.option("--output", metavar="DIR", help="Checkpoint directory, as the script receives it."),
    click.option("--resume-arg", metavar="TEXT", help="Arguments for a resumed run, e.g. '--from {checkpoint}'."),
    click.option("--zero", type=click.Choice(ZERO_CHOICES), help="Write a DeepSpeed configuration of this ZeRO stage."),
    click.option(
        "--env",
        "variables",
        metavar="NAME[=VALUE]",
        multiple=True,
        help="Set a variable; without VALUE, copy it from here.",
    ),
    click.option("--name", metavar="NAME", help="Name in the run's id."),
)
_HOW: _Options = (
    click.option("--detach", is_flag=True, help="Return once the run has started on every node."),
    number("--restarts", type=INDEX, default=0, help="Restart a failed run up to N times."),
    number(
        "--lost-after",
        type=SECONDS,
        default=60.0,
        metavar="SECONDS",
        show_default=True,
        help="Silence after which a node is lost.",
    ),
    number(
        "--hang-after",
        type=SECONDS,
        metavar="SECONDS",
        help="Time without a step that counts as a hang.  [default: from the run's speed]",
    ),
    click.option(
        "--on-hang",
        type=click.Choice(["stop", "warn"]),
        default="stop",
        show_default=True,
        help="What to do about a hang.",
    ),
    click.option("--exclude-bad", is_flag=True, help="Train without nodes that fail the checks."),
    click.option("--force", is_flag=True, help="Start even if a check predicts a failure."),
    click.option("--dry-run", is_flag=True, help="Print each node's commands; start nothing."),
    click.option(
        "--shell", type=click.Choice(list(_SHELLS)), default="sh", show_default=True, help="Syntax of --dry-run."
    ),
)


def _with(options: _Options) -> Callable[..., Any]:
    def add(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.command("train")
@on_nodes
@number("--nodes", "-n", "count", type=COUNT, help="Train on the first N nodes.")
@_with(_WHAT)
@_with(_HOW)
@click.argument("words", nargs=-1, metavar="[CONFIG | SCRIPT] [-- ARGS...]")
@reporting
def train_command(
    reporter: Reporter,
    inventory_path: Path,
    limit: str | None,
    exclude: str | None,
    count: int | None,
    words: tuple[str, ...],
    module: str | None,
    variables: tuple[str, ...],
    name: str | None,
    zero: str | None,
    restarts: int,
    lost_after: float,
    hang_after: float | None,
    on_hang: str,
    shell: str,
    *,
    detach: bool,
    exclude_bad: bool,
    force: bool,
    dry_run: bool,
    **job_options: Any,
) -> None:
    """Start a training run.

    CONFIG is a LLaMA-Factory YAML file. It defaults to train.config of the inventory, then to train.yaml in this
    directory. SCRIPT is a Python script whose arguments follow `--`. A complete torchrun, deepspeed or accelerate
    launch command can also follow `--`. Files with relative paths are copied to the nodes. Absolute paths are paths on
    the nodes.
    """
    inventory = load_or_here(inventory_path, reporter, nodes=count, starts=True)
    nodes = select(inventory, limit=limit, exclude=exclude, count=count)
    if not words and module is None:
        words = (str(find_config(inventory)),)
    job: Job = from_words(words, module=module, **job_options)
    if inventory.alone:
        refuse_alone(count if count is not None else job.nodes)
    wanted, job = count_nodes(job, count, nodes)
    nodes = nodes[:wanted]
    env = read_variables(variables, reporter)
    if twice := [each for each in env if job.env.get(each, env[each]) != env[each]]:
        reporter(Notice(f"--env {', '.join(twice)}: overridden by the value in the command after --", "warning"))
    inventory = replace(inventory, train=replace(inventory.train, env={**inventory.train.env, **env}))
    asked = Training(
        job=job,
        words=(*(("-m", module) if module else ()), *words),
        name=name,
        zero=zero,
        policy=Policy(restarts, lost_after, hang_after, on_hang),
        gate=GateOptions(exclude_bad=exclude_bad, force=force, asked=wanted),
        following=Following(detach, None if detach else asking(reporter)),
    )
    if dry_run:
        with session_on(reporter, inventory, nodes, dry_run=True) as session:
            _show(reporter, session, asked, shell)
        return
    with letting_go(), session_on(reporter, inventory, nodes) as session:
        result = tasks.train(session, asked)
    reporter.result(*train_output(result))


def _show(reporter: Reporter, session: Session, asked: Training, shell: str) -> None:
    """Print each node's commands, and the launcher's notices."""
    spec, launched = tasks.dry_run(session, asked)
    for notice in launched.notices:
        reporter(notice)
    scripts = {plan.node: _SHELLS[shell](plan) for plan in launched.plans}
    data = {"run": None, "nodes": list(scripts), "world_size": sum(each.processes for each in spec.workers)}
    plans = {plan.node: {"argv": mask_words(plan.argv), "cwd": plan.cwd, "port": plan.port} for plan in launched.plans}
    reporter.result({**data, "plans": plans, "scripts": scripts}, "\n".join(scripts.values()).rstrip("\n"))


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


COMMANDS = (train_command,)
