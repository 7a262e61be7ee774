"""The command that starts a training run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from provision import launchers, summaries
from provision.cli.cluster import load_or_here, on_nodes, refuse_alone, session_on
from provision.cli.interrupts import asking, letting_go
from provision.cli.numbers import COUNT, INDEX, SECONDS, number
from provision.cli.options import reporting
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
        help="What starts it.",
    ),
    click.option("-m", "module", metavar="MODULE", help="Run a module, as python -m does."),
    click.option("--code", type=_PATH, metavar="DIR", help="The folder that travels; the script's own by default."),
    number("--gpus-per-node", "per_node", type=COUNT, help="Processes to start on each node."),
    *(
        click.option(f"--{name}-config", type=_PATH, metavar="FILE", help=text)
        for name, text in launchers.config_options().items()
    ),
    click.option("--output", metavar="DIR", help="Where the script keeps its checkpoints, as the script is told it."),
    click.option("--resume-arg", metavar="TEXT", help="Tells the script to go on from '{checkpoint}'."),
    click.option("--zero", type=click.Choice(ZERO_CHOICES), help="Make DeepSpeed's configuration, of this stage."),
    click.option(
        "--env", "variables", metavar="NAME[=VALUE]", multiple=True, help="A variable, by default with its value here."
    ),
    click.option("--name", metavar="WORD", help="A word for the run's id."),
)
_HOW: _Options = (
    click.option("--detach", is_flag=True, help="Leave it alone once it runs on every node."),
    number("--restarts", type=INDEX, default=0, help="Begin a failed run again, so often."),
    number("--lost-after", type=SECONDS, default=60.0, metavar="S", help="Silence that means a lost node; 60."),
    number("--hang-after", type=SECONDS, metavar="S", help="Standstill that means a hang; by its own pace."),
    click.option("--on-hang", type=click.Choice(["stop", "warn"]), default="stop", help="What a hang does; stop."),
    click.option("--exclude-bad", is_flag=True, help="Go on without the nodes that cannot take part."),
    click.option("--force", is_flag=True, help="Go on although something looks as if it would stop the run."),
    click.option("--dry-run", is_flag=True, help="Print what would run on each node, and start nothing."),
    click.option("--shell", type=click.Choice(list(_SHELLS)), default="sh", help="What --dry-run prints for; sh."),
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
    """Train over several nodes.

    CONFIG is a LLaMA-Factory YAML; by default the inventory's train.config, else train.yaml in this folder. SCRIPT is
    a Python script; its arguments stand behind `--`. Behind `--` may also stand a whole command as people type it
    (torchrun, deepspeed, accelerate launch). Relative paths travel with the run, absolute ones are paths on the nodes.
    """
    inventory = load_or_here(inventory_path, reporter, nodes=count, starts=True)
    nodes = select(inventory, limit=limit, exclude=exclude, count=count)
    if not words and module is None:
        words = (str(find_config(None, inventory)),)
    job: Job = from_words(words, module=module, **job_options)
    if inventory.alone:
        refuse_alone(count if count is not None else job.nodes)
    wanted, job = count_nodes(job, count, nodes)
    nodes = nodes[:wanted]
    env = _variables(variables, reporter)
    if twice := [each for each in env if job.env.get(each, env[each]) != env[each]]:
        reporter(Notice(f"--env {', '.join(twice)}: replaced by the value before the typed command", "warning"))
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
    reporter.result(*summaries.trained(result))


def _show(reporter: Reporter, session: Session, asked: Training, shell: str) -> None:
    """What would run on each node, and what there is to know about it."""
    spec, launched = tasks.dry_run(session, asked)
    for notice in launched.notices:
        reporter(notice)
    scripts = {plan.node: _SHELLS[shell](plan) for plan in launched.plans}
    data = {"run": None, "nodes": list(scripts), "world_size": sum(each.processes for each in spec.workers)}
    plans = {plan.node: {"argv": mask_words(plan.argv), "cwd": plan.cwd, "port": plan.port} for plan in launched.plans}
    reporter.result({**data, "plans": plans, "scripts": scripts}, "\n".join(scripts.values()).rstrip("\n"))


def _variables(given: tuple[str, ...], reporter: Reporter) -> dict[str, str]:
    """The variables of ``--env``: ``NAME`` with its value in this command's environment, or ``NAME=VALUE``.

    Raises:
        UsageError: what cannot be a variable's name, or a name without a value here.
    """
    found = {}
    for each in given:
        name, has, value = each.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise UsageError(f"--env {shown(name)}: not the name of a variable", hint="--env NAME, or --env NAME=VALUE")
        if not has and name not in os.environ:
            raise UsageError(
                f"--env {name}: {name} is not set in this command's environment",
                hint=f"export {name}=VALUE and give --env {name} again; or --env {name}=VALUE if it is no secret",
            )
        if has and value and is_secret(name):
            text = f"--env {name}=VALUE: every user of this machine can read the value in the list of processes (ps)"
            reporter(Notice(f"{text}; export {name}, and give --env {name}", "warning"))
        found[name] = value if has else os.environ[name]
    return found


COMMANDS = (train_command,)
