"""``clusterctl runs``: lists the history of runs, and removes old ones."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from provision.cli.cluster import Selection, no_answer, on_nodes
from provision.cli.options import COUNT, INDEX, ListGroup, importing, number, reporting
from provision.env.text import number as count
from provision.errors import InterruptedByUser, NodesFailedError, UsageError
from provision.hints import again
from provision.inventory import fold
from provision.output import Reporter
from provision.output_text import size
from provision.run.history import STATES, Past, Wanted

if TYPE_CHECKING:
    from provision.tasks.history import Plan

LAST = 20  # runs in the table
_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SPAN = re.compile(r"([0-9]{1,6})(s|min|h|d|w)")


class _Span(click.ParamType[float]):
    """A time span, such as ``36h`` or ``30d``, in seconds."""

    name = "span"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds."""
        found = _SPAN.fullmatch(str(value))
        if not found:
            self.fail(f"{str(value)[:40]!r} is not a time span such as 90min, 36h, 7d or 4w", param, ctx)
        return int(found[1]) * _UNITS[found[2]]


def _choosing(command: Callable[..., None]) -> Callable[..., None]:
    """The options that choose runs in both commands."""
    for option in (
        click.option("--node", metavar="NODE", default="", help="Only runs on this node."),
        click.option("--name", metavar="PATTERN", default="",
                     help="Only runs with this in their ids, or that match it: sft, '*-sft-*'."),
        click.option("--state", "states", multiple=True, type=click.Choice(STATES), metavar="STATE",
                     help="Only runs in this state, such as failed. Repeatable."),
    ):  # fmt: skip
        command = option(command)
    return command


@click.group("runs", cls=ListGroup)
def runs_group() -> None:
    """List past runs, and remove old ones.

    Without a command, lists them.
    """


@runs_group.command("list")
@on_nodes
@_choosing
@click.option("--since", type=_Span(), metavar="SPAN", help="Only runs started in this time, e.g. 36h or 7d.")
@number("--last", type=COUNT, default=LAST, show_default=True, metavar="N", help="Show the newest N.")
@reporting
def list_command(
    reporter: Reporter,
    selection: Selection,
    states: tuple[str, ...],
    name: str,
    node: str,
    since: float | None,
    last: int,
) -> None:
    """List runs, the newest first, with their last step and loss and their size on the nodes.

    The runs are those that the nodes have, and those that only this machine's records know.
    """
    with importing():
        from provision.summaries.history import history_output  # noqa: PLC0415
        from provision.tasks.history import chosen, list_history  # noqa: PLC0415

    with selection.session_or_here(reporter) as session:
        _refuse_unknown(node, [each.name for each in session.inventory.nodes])
        found = list_history(session)
    reporter.result(*history_output(found, chosen(found, Wanted(states, name, node, since)), last))
    if found.unreachable:
        raise no_answer(session, found.unreachable, shown=True)


@runs_group.command("prune")
@on_nodes
@_choosing
@number("--keep", type=INDEX, metavar="N", help="Keep the newest N of the runs that match.")
@click.option("--older-than", "before", type=_Span(), metavar="SPAN", help="Only runs started before, e.g. 30d.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed; remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask. Runs with checkpoints that were not collected stay.")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@reporting
def prune_command(
    reporter: Reporter,
    selection: Selection,
    states: tuple[str, ...],
    name: str,
    node: str,
    keep: int | None,
    before: float | None,
    runs: tuple[str, ...],
    *,
    dry_run: bool,
    yes: bool,
) -> None:
    """Remove old runs from the nodes, and this machine's records of them.

    Removes the runs that meet all options, or exactly each RUN, a run's id or part of it. A run that is running or
    may be running stays. A run whose checkpoints were not collected stays, unless you name it or confirm it.
    """
    with importing():
        from provision.summaries.history import prune_output  # noqa: PLC0415
        from provision.tasks.history import prune  # noqa: PLC0415

    wanted = Wanted(states, name, node, before=before)
    if runs and (wanted != Wanted() or keep is not None):
        raise UsageError("RUN and options that choose runs cannot be used together", hint="omit the options or RUN")
    if not runs and wanted == Wanted() and keep is None:
        raise UsageError(
            "which runs should be removed?",
            hint="clusterctl runs prune --older-than 30d --dry-run; or clusterctl runs prune --keep 10 --dry-run",
        )
    if not (yes or dry_run or _can_ask()):
        raise UsageError(
            "without a terminal, nothing is removed unless you add --yes",
            hint=again(reporter.typed, reporter.typed.command, "--yes"),
        )
    with selection.session(reporter, dry_run=dry_run) as session:
        _refuse_unknown(node, [each.name for each in session.inventory.nodes])
        confirm = _take_safe if yes or dry_run else _ask(reporter)
        result = prune(session, wanted, confirm, keep=keep or 0, words=runs)
    reporter.result(*prune_output(result))
    if result.failed:
        raise NodesFailedError(
            f"not everything was removed on {fold(result.failed)}", reasons=result.failed, hint=session.again()
        )


def _refuse_unknown(node: str, known: Sequence[str]) -> None:
    if node and node not in known:
        raise UsageError(f"--node {node}: the inventory has no such node", hint=f"it has {fold(known)}")


def _can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _take_safe(plan: Plan, _more: Sequence[Past]) -> Sequence[Past]:
    return plan.runs


def _ask(reporter: Reporter) -> Callable[[Plan, Sequence[Past]], Sequence[Past]]:
    """Two questions: about runs that can be removed without a loss, then about those with uncollected checkpoints."""
    from provision.summaries.history import plan_lines  # noqa: PLC0415

    def ask(plan: Plan, more: Sequence[Past]) -> Sequence[Past]:
        going: list[Past] = []
        with reporter.paused():
            for line in plan_lines(plan, more):
                click.echo(line, err=True)
            for runs, what in ((plan.runs, ""), (more, " whose checkpoints are only on the nodes")):
                total = size(sum(past.size for past in runs))
                if runs and click.confirm(
                    f"Remove {count(len(runs), 'run')}{what} ({total})?", default=False, err=True
                ):
                    going += runs
        if not going and (plan.runs or more):
            raise InterruptedByUser("nothing was removed")
        return going

    return ask
