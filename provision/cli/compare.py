"""``clusterctl compare``: what differs between a good and a bad run, and which difference is the cause."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import click

from provision.cli.cluster import Selection, on_nodes, session_on
from provision.cli.options import COUNT, SECONDS, importing, number, reporting
from provision.errors import UsageError
from provision.masking import HIDDEN
from provision.model import Inventory, ignore
from provision.output import Reporter

if TYPE_CHECKING:
    from provision.run.bisect import Mixture
    from provision.session import Session
    from provision.tasks.bisect import Bisected, Limits
    from provision.tasks.compare import Compared
    from provision.tasks.train import Training

_TIME = 300.0  # seconds of a round


@click.command("compare")
@on_nodes
@click.option("--bisect", is_flag=True, help="Run short jobs until the cause is known.")
@click.option("--metric", metavar="NAME[@STEP]", help="With --bisect: judge by tokens_per_second, loss@100, …")
@number("--steps", type=COUNT, help="With --bisect: stop each job after N steps.")
@number("--seconds", type=SECONDS, metavar="SECONDS", help="With --bisect: longest time of a job.  [default: 300]")
@click.argument("good", metavar="GOOD")
@click.argument("bad", metavar="BAD")
@click.argument("job", nargs=-1, metavar="[-- JOB...]")
@reporting
def compare_command(
    reporter: Reporter,
    selection: Selection,
    good: str,
    bad: str,
    job: tuple[str, ...],
    metric: str | None,
    steps: int | None,
    seconds: float | None,
    *,
    bisect: bool,
) -> None:
    """Show what differs between a good run and a bad one, the most likely cause first.

    GOOD and BAD are ids of runs or parts of them, or runs' folders. With --bisect, short jobs with mixtures of both
    runs' settings find the cause. JOB is a script or configuration with arguments, as for `train`: its arguments are
    the same in every job. The default is GOOD's. The same command resumes an interrupted bisection.
    """
    with importing():
        from provision.run.difference import compare  # noqa: PLC0415
        from provision.summaries.compare import bisect_output, compare_output  # noqa: PLC0415
        from provision.tasks.compare import find_run  # noqa: PLC0415

    given = {"--metric": metric, "--steps": steps, "--seconds": seconds, "a JOB": job or None}
    if not bisect and (only := [name for name, value in given.items() if value is not None]):
        raise UsageError(f"{only[0]} goes with --bisect", hint=f"clusterctl compare {good} {bad} --bisect -- JOB")
    inventory = selection.load_or_here(reporter)
    with ExitStack() as stack:
        opened: list[Session] = []

        def connect() -> Session:
            if not opened:
                opened.append(stack.enter_context(session_on(reporter, inventory, selection.nodes(inventory))))
            return opened[0]

        runs = [find_run(inventory.path, word, connect) for word in (good, bad)]
    shown = compare_output(runs[0], runs[1], compare([each.described for each in runs]))
    if not bisect:
        reporter.result(*shown)
        return
    found, commands = _bisect(reporter, inventory, runs[0], runs[1], job, _limits(metric, steps, seconds))
    reporter.result(*bisect_output(shown, found, commands))


def _limits(metric: str | None, steps: int | None, seconds: float | None) -> Limits:
    from provision.tasks.bisect import Limits  # noqa: PLC0415 - only for --bisect

    return Limits(_TIME if seconds is None else seconds, steps, metric)


def _bisect(
    reporter: Reporter, inventory: Inventory, good: Compared, bad: Compared, job: tuple[str, ...], limits: Limits
) -> tuple[Bisected, Mapping[str, str]]:
    """Search the cause. Also returns the commands that verify it."""
    with importing():
        from provision.run import record as records  # noqa: PLC0415
        from provision.run.bisect import command, outputs, space  # noqa: PLC0415
        from provision.tasks.bisect import Bisection  # noqa: PLC0415

    for each in (good, bad):
        if not isinstance(each.record.get("argv"), list):
            raise UsageError(f"this machine has no record of how {each.run} was started: nothing can be bisected")
    settings = space(good.record, bad.record, job)
    if not settings.settings:
        raise UsageError(
            f"no setting that train can set differs between {good.run} and {bad.run}",
            hint="look at the other differences: clusterctl compare GOOD BAD",
        )
    if written := outputs(settings.mixture(())):
        reporter.warn(f"every round writes to the absolute {', '.join(written)} of {good.run}: give JOB another one")
    folder = records.folder_of(inventory.path, bad.run)
    found = Bisection(settings, limits, _preparing(reporter, inventory), reporter, folder).result()
    commands = {}
    if cause := found.conclusion.cause:
        env, alone = inventory.train.env, inventory.alone
        commands = {
            name: command(settings, chosen, env, alone=alone) for name, chosen in (("bad", cause), ("good", ()))
        }
    return found, commands


def _preparing(
    reporter: Reporter, inventory: Inventory
) -> Callable[[Mixture], AbstractContextManager[tuple[Session, Training]]]:
    """Opens the session of a mixture, with the training that ``clusterctl train`` would start."""
    from provision.cli.train import read_training, train_command  # noqa: PLC0415 - only for --bisect

    @contextmanager
    def prepare(mixture: Mixture) -> Iterator[tuple[Session, Training]]:
        words = [word for name, values in mixture.options.items() for word in _option(name, values)]
        context = train_command.make_context("train", [*words, "--name", "bisect", "--", *mixture.words], obj=reporter)
        options = {name: value for name, value in context.params.items() if name not in _OTHER}
        nodes = {node.name: node for node in inventory.nodes}
        if missing := [name for name in mixture.nodes if name not in nodes]:
            raise UsageError(
                f"{inventory.path.name} has no node {', '.join(missing[:8])}", hint="add it, or see compare"
            )
        mixed = replace(
            inventory,
            prefix=PurePosixPath(mixture.prefix) if mixture.prefix else inventory.prefix,
            base=inventory.root,
            train=replace(inventory.train, env=_variables(mixture, inventory)),
        )
        chosen = tuple(nodes[name] for name in mixture.nodes) or inventory.nodes
        mixed, chosen, asked = read_training(reporter, mixed, chosen, **options)
        with session_on(reporter, mixed, chosen, emit=ignore) as session:
            yield session, replace(asked, notify="", ask_resume=None)

    return prepare


_OTHER = {  # of train's parameters; a job of a bisection needs no job of Slurm
    *("inventory_path", "limit", "exclude", "as_json", "quiet", "dry_run", "shell"),
    *("starter", "partition", "limit_time", "account", "sbatch"),
}


def _option(name: str, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for value in values for word in (name, value)) if values else (name,)


def _variables(mixture: Mixture, inventory: Inventory) -> dict[str, str]:
    """The variables of a mixture; a record has no secrets, so these are the inventory's, or this environment's."""
    known = {**os.environ, **inventory.train.env}
    return {
        name: known[name] if value == HIDDEN else value
        for name, value in mixture.variables.items()
        if value != HIDDEN or name in known
    }
