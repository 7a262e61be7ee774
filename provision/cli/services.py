"""The command about node services."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from provision import services, summaries
from provision.cli.cluster import load_inventory, on_nodes, retrying, session_on, to_work_on
from provision.cli.numbers import DEADLINE, number
from provision.cli.options import reporting
from provision.errors import NodesFailedError, UsageError
from provision.hints import again
from provision.inventory import select
from provision.output import Reporter
from provision.tasks import services as tasks
from provision.tasks.failed import remember_failed


def _complete(_ctx: click.Context, _argument: click.Parameter, start: str) -> list[str]:
    return [name for name in services.names() if name.startswith(start)]


_names = click.argument("names", nargs=-1, metavar="[SERVICE]...", shell_complete=_complete)
_deadline = number(
    "--deadline",
    metavar="SECONDS",
    type=DEADLINE,
    default=tasks.DEADLINE,
    show_default=True,
    help="What each node has for a stage.",
)


def _dry_run(what: str) -> Callable[..., Callable[..., None]]:
    return click.option("--dry-run", is_flag=True, help=f"Say what would be {what}; write nothing on any node.")


class _Services(click.Group):
    """Its help lists the services."""

    def format_epilog(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Services"):
            formatter.write_dl([(name, services.get(name).ABOUT) for name in services.ordered()])


@click.group("services", cls=_Services)
def services_group() -> None:
    """Set up, verify and undo node services.

    SERVICE is by default every one that the inventory asks for.
    """


@services_group.command("apply")
@on_nodes
@retrying
@_dry_run("changed")
@click.option(
    "--scripts", "-O", type=click.Path(path_type=Path, file_okay=False), help="With --dry-run: write the scripts here."
)
@_deadline
@_names
@reporting
def services_apply(
    reporter: Reporter,
    inventory_path: Path,
    limit: str | None,
    exclude: str | None,
    names: tuple[str, ...],
    deadline: float,
    scripts: Path | None,
    *,
    retry_failed: bool,
    dry_run: bool,
) -> None:
    """Bring the nodes to what the inventory asks for. Running it again changes nothing."""
    if scripts and not dry_run:
        raise UsageError("--scripts goes with --dry-run", hint=again(reporter.typed, "services apply", "--dry-run"))
    inventory = load_inventory(inventory_path, reporter)
    command = "services apply"
    nodes = to_work_on(reporter, inventory, command, limit=limit, exclude=exclude, retry_failed=retry_failed)
    if not nodes:
        return
    with (
        remember_failed(inventory, command, nodes, dry_run=dry_run),
        session_on(reporter, inventory, nodes, dry_run=dry_run) as session,
    ):
        result = tasks.apply(session, names, scripts_to=scripts, deadline=deadline)
    reporter.result(*summaries.serviced(result, "apply"))


@services_group.command("status")
@on_nodes
@_deadline
@_names
@reporting
def services_status(
    reporter: Reporter,
    inventory_path: Path,
    limit: str | None,
    exclude: str | None,
    names: tuple[str, ...],
    deadline: float,
) -> None:
    """Say where the nodes differ from what the inventory asks for."""
    inventory = load_inventory(inventory_path, reporter)
    nodes = select(inventory, limit=limit, exclude=exclude)
    with session_on(reporter, inventory, nodes, dry_run=True) as session:
        result = tasks.apply(session, names, deadline=deadline)
    reporter.result(*summaries.serviced(result, "status"))


@services_group.command("verify")
@on_nodes
@_deadline
@_names
@reporting
def services_verify(
    reporter: Reporter,
    inventory_path: Path,
    limit: str | None,
    exclude: str | None,
    names: tuple[str, ...],
    deadline: float,
) -> None:
    """Ask the running services whether they do their work: who follows which clock, whether a share is fresh."""
    inventory = load_inventory(inventory_path, reporter)
    nodes = select(inventory, limit=limit, exclude=exclude)
    with session_on(reporter, inventory, nodes) as session:
        result = tasks.verify(session, names, deadline=deadline)
    reporter.result(*summaries.serviced(result, "verify"))
    wrong = [name for name, steps in result.steps.items() if any(step.state == "failed" for step in steps)]
    if result.unreached:
        raise NodesFailedError(
            f"{len(result.unreached)} of {len(nodes)} nodes could not be asked",
            reasons=result.unreached,
            hint=session.without(result.unreached, len(nodes)),
        )
    if wrong:
        raise NodesFailedError(
            f"services do not do their work on {len(wrong)} of {len(nodes)} nodes",
            reasons={},  # the result has said it
            hint="to bring them back: clusterctl services apply",
        )


@services_group.command("undo")
@on_nodes
@retrying
@_dry_run("undone")
@_deadline
@_names
@reporting
def services_undo(
    reporter: Reporter,
    inventory_path: Path,
    limit: str | None,
    exclude: str | None,
    names: tuple[str, ...],
    deadline: float,
    *,
    retry_failed: bool,
    dry_run: bool,
) -> None:
    """Bring back what was there before, byte for byte. SERVICE is by default every service there is."""
    inventory = load_inventory(inventory_path, reporter)
    command = "services undo"
    nodes = to_work_on(reporter, inventory, command, limit=limit, exclude=exclude, retry_failed=retry_failed)
    if not nodes:
        return
    with (
        remember_failed(inventory, command, nodes, dry_run=dry_run),
        session_on(reporter, inventory, nodes, dry_run=dry_run) as session,
    ):
        result = tasks.undo(session, names, deadline=deadline)
    reporter.result(*summaries.serviced(result, "undo"))


COMMANDS = (services_group,)
