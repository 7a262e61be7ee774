"""``clusterctl rehearse``: faults that are injected into a short run of a job, before a long one."""

from __future__ import annotations

import sys
from typing import Any

import click

from provision.cli.cluster import Selection, on_nodes, session_on
from provision.cli.options import COUNT, Number, importing, number, reporting
from provision.cli.train import EXCLUDE_BAD, JOB_OPTIONS, POLICY_OPTIONS, detach_on_hangup, read_training, with_options
from provision.errors import InterruptedByUser, RunFailedError, UsageError
from provision.hints import again
from provision.model import Event, LogLine, Progress
from provision.output import Reporter
from trainer.bounds import Bound

MINUTES = Number(float, Bound(low=1, high=240))


@click.command("rehearse")
@on_nodes
@number("--nodes", "-n", "count", type=COUNT, help="Rehearse on the first N nodes.")
@with_options(JOB_OPTIONS)
@with_options(POLICY_OPTIONS)
@with_options((EXCLUDE_BAD,))
@number("--minutes", type=MINUTES, default=15.0, show_default=True, help="Inject no fault after this time.")
@click.option("--faults", metavar="NAME,...", help="Only these faults.  [default: all]")
@click.option("--yes", is_flag=True, help="Do not ask before faults are injected.")
@click.option("--force", is_flag=True, help="Rehearse although a check fails or others use the nodes.")
@click.option("--dry-run", is_flag=True, help="Print each fault's script; start nothing.")
@click.argument("words", nargs=-1, metavar="[CONFIG | SCRIPT] [-- ARGS...]")
@reporting
def rehearse_command(
    reporter: Reporter,
    selection: Selection,
    count: int | None,
    minutes: float,
    faults: str | None,
    *,
    yes: bool,
    force: bool,
    dry_run: bool,
    **options: Any,
) -> None:
    """Inject faults into a short run of a job, and certify what it survives.

    The job starts as with clusterctl train, but saves to an output folder of the rehearsal. Then its ranks, launcher
    and agent are killed or stopped, a node is slowed down and cut off, a disk is filled, and a checkpoint is torn. The
    certificate has the seconds of each recovery and the repeated steps. Everything else is removed at the end.
    """
    with importing():
        from provision.rehearsal.certificate import HTML, to_object  # noqa: PLC0415
        from provision.rehearsal.faults import chosen, planned  # noqa: PLC0415
        from provision.run.record import folder_of  # noqa: PLC0415
        from provision.summaries.rehearsal import certificate_rows, dry_run_output, plan_lines  # noqa: PLC0415
        from provision.tasks.rehearse import Rehearsal, rehearse  # noqa: PLC0415

    picked = chosen(faults)
    inventory = selection.load_or_here(reporter, nodes=count, starts=True)
    nodes = selection.nodes(inventory, count)
    given: dict[str, Any] = {"restarts": 0, "notify": None, "expected": None, "detach": True}
    inventory, nodes, asked = read_training(reporter, inventory, nodes, count=count, force=force, **given, **options)
    names = [node.name for node in nodes]
    plan = planned(picked, names, 60.0 * minutes, asked.policy.lost_after)
    if dry_run:
        reporter.result(*dry_run_output(plan, names, str(inventory.root), 60.0 * minutes))
        return
    if not yes:
        _ask(reporter, plan_lines(plan, names, 60.0 * minutes))

    def emit(event: Event) -> None:
        job = isinstance(event, LogLine) or (isinstance(event, Progress) and event.stage == "train")
        if not job:  # its output and its steps are not the rehearsal's
            reporter(event)

    with detach_on_hangup(), session_on(reporter, inventory, nodes, emit=emit) as session:
        certificate = rehearse(session, Rehearsal(asked, picked, 60.0 * minutes, force))
    path = folder_of(inventory.path, certificate.run) / HTML
    reporter.result({**to_object(certificate), "certificate": str(path)})
    reporter.show(certificate_rows(certificate, path))
    bad = certificate.having("not survived")
    if bad:
        raise RunFailedError(
            f"the job did not survive: {', '.join(each.fault.name for each in bad)}",
            reasons={},
            hint=bad[0].fault.fix,
        )


def _ask(reporter: Reporter, lines: list[str]) -> None:
    """Ask before anything is killed.

    Raises:
        UsageError: there is no terminal.
        InterruptedByUser: the user refused.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            "a rehearsal kills processes of its run and cuts a node's network: without a terminal, it needs --yes",
            hint=again(reporter.typed, reporter.typed.command, "--yes"),
        )
    with reporter.paused():
        for line in lines:
            click.echo(line, err=True)
        if not click.confirm("Start?", default=False, err=True):
            raise InterruptedByUser("nothing was started")
