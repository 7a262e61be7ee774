"""``clusterctl services``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from provision import services
from provision.cli.cluster import (
    Selection,
    load_inventory,
    no_answer,
    on_nodes,
    remember_failed,
    retrying,
    session_on,
    writing_scripts,
)
from provision.cli.options import DEADLINE, number, reporting
from provision.errors import NodesFailedError, UsageError
from provision.hints import again
from provision.output import Reporter
from provision.summaries.nodes import services_output
from provision.tasks import services as tasks


def _complete(_ctx: click.Context, _argument: click.Parameter, start: str) -> list[str]:
    return [name for name in services.names() if name.startswith(start)]


_names = click.argument("names", nargs=-1, metavar="[SERVICE]...", shell_complete=_complete)
_deadline = number(
    "--deadline",
    metavar="SECONDS",
    type=DEADLINE,
    default=tasks.DEADLINE,
    show_default=True,
    help="Time limit of each stage on a node.",
)


def _dry_run(what: str) -> Callable[..., Callable[..., None]]:
    return click.option("--dry-run", is_flag=True, help=f"Show what would be {what}; write nothing on any node.")


class _Services(click.Group):
    """Its help lists the services."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Services"):
            formatter.write_dl([(name, services.get(name).ABOUT) for name in services.ordered()])
        super().format_epilog(ctx, formatter)


@click.group("services", cls=_Services)
def services_group() -> None:
    """Set up, check and undo services on the nodes.

    SERVICE defaults to all services in the inventory.
    """


@services_group.command("apply")
@on_nodes
@retrying
@_dry_run("changed")
@writing_scripts
@_deadline
@_names
@reporting
def services_apply(
    reporter: Reporter,
    selection: Selection,
    names: tuple[str, ...],
    deadline: float,
    scripts: Path | None,
    *,
    retry_failed: bool,
    dry_run: bool,
) -> None:
    """Configure the services that the inventory lists.

    Applying them again changes nothing.
    """
    if scripts and not dry_run:
        raise UsageError("--scripts goes with --dry-run", hint=again(reporter.typed, "services apply", "--dry-run"))
    inventory = load_inventory(selection.path, reporter)
    command = "services apply"
    nodes = selection.nodes_for(reporter, inventory, command, retry_failed=retry_failed)
    if not nodes:
        return
    with (
        remember_failed(inventory, command, nodes, dry_run=dry_run),
        session_on(reporter, inventory, nodes, dry_run=dry_run) as session,
    ):
        result = tasks.apply(session, names, scripts_to=scripts, deadline=deadline)
    reporter.result(*services_output(result, "apply"))


@services_group.command("status")
@on_nodes
@_deadline
@_names
@reporting
def services_status(
    reporter: Reporter,
    selection: Selection,
    names: tuple[str, ...],
    deadline: float,
) -> None:
    """Show where nodes differ from the inventory."""
    with selection.session(reporter, dry_run=True) as session:
        result = tasks.apply(session, names, deadline=deadline)
    reporter.result(*services_output(result, "status"))


@services_group.command("verify")
@on_nodes
@_deadline
@_names
@reporting
def services_verify(
    reporter: Reporter,
    selection: Selection,
    names: tuple[str, ...],
    deadline: float,
) -> None:
    """Check that the services work on the nodes.

    Tests running services: whether clocks follow the head, shares are mounted and fresh, and so on.
    """
    with selection.session(reporter) as session:
        result = tasks.verify(session, names, deadline=deadline)
    reporter.result(*services_output(result, "verify"))
    wrong = [name for name, steps in result.steps.items() if any(step.state == "failed" for step in steps)]
    if result.unreached:
        raise no_answer(session, result.unreached)
    if wrong:
        raise NodesFailedError(
            f"services do not work on {len(wrong)} of {len(session.nodes)} nodes",
            reasons={},  # the result shows them
            hint="to repair them: clusterctl services apply",
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
    selection: Selection,
    names: tuple[str, ...],
    deadline: float,
    *,
    retry_failed: bool,
    dry_run: bool,
) -> None:
    """Restore the original configuration.

    Files are restored byte for byte. SERVICE defaults to all services.
    """
    inventory = load_inventory(selection.path, reporter)
    command = "services undo"
    nodes = selection.nodes_for(reporter, inventory, command, retry_failed=retry_failed)
    if not nodes:
        return
    with (
        remember_failed(inventory, command, nodes, dry_run=dry_run),
        session_on(reporter, inventory, nodes, dry_run=dry_run) as session,
    ):
        result = tasks.undo(session, names, deadline=deadline)
    reporter.result(*services_output(result, "undo"))
