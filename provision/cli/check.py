"""``clusterctl check``."""

from __future__ import annotations

from pathlib import Path

import click

from provision.cli.cluster import Selection, on_nodes
from provision.cli.options import DEADLINE as NODE_DEADLINE
from provision.cli.options import Number, number, reporting
from provision.env.bundle.reader import open_bundle
from provision.errors import NodesError, NodesFailedError, PreflightError
from provision.inventory import fold
from provision.output import Reporter
from provision.session import Session
from provision.summaries.check import check_output, finding_rows
from provision.tasks.bundles import bundle_of
from provision.tasks.check import DEADLINE, CheckOptions, CheckResult, check
from trainer.bounds import Bound


@click.command("check")
@on_nodes
@number(
    "--level",
    type=Number(int, Bound(low=0, high=1)),
    default=0,
    show_default=True,
    help="0: each node alone; 1: also ports, clocks and shares between nodes.",
)
@click.option("--only", metavar="ID", multiple=True, help="Only this check, or all checks of a group, such as gpu.")
@click.option(
    "--root/--no-root",
    default=None,
    help="Ask for the sudo password, or run without root.  [default: root if no password is needed]",
)
@number(
    "--deadline",
    metavar="SECONDS",
    type=NODE_DEADLINE,
    default=DEADLINE,
    show_default=True,
    help="Time limit of each node.",
)
@click.option("--verbose", "-v", is_flag=True, help="Also list checks that are OK or do not apply (n/a).")
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@reporting
def check_command(
    reporter: Reporter,
    selection: Selection,
    level: int,
    only: tuple[str, ...],
    root: bool | None,
    deadline: float,
    bundle: Path | None,
    *,
    verbose: bool,
) -> None:
    """Find problems that make training hang, fail or run slowly.

    Changes nothing on the nodes. With BUNDLE, also checks whether the bundle can run on them: driver, GPUs, glibc and
    disk space.
    """
    session = selection.session_or_here(reporter, asks_sudo=bool(root))
    manifest = open_bundle(bundle_of(bundle, emit=reporter)).manifest if bundle else None
    options = CheckOptions(level, only, manifest, root, deadline)
    with session:
        result = check(session, options)
    reporter.show(finding_rows(result, verbose=verbose))
    reporter.result(*check_output(result))
    if error := refusal(session, result):
        raise error


def refusal(session: Session, result: CheckResult) -> NodesError | None:
    """The error to raise for these findings, which are shown already; None if there is none."""
    failed = list(dict.fromkeys(finding.node for finding in result.having("FAIL")))
    around = fold([*failed, *result.unreachable])
    silent = f"no answer from {len(result.unreachable)} of {len(result.unreachable) + len(result.nodes)} nodes"
    if failed:
        text = f"{fold(failed)}: not ready for a training"
        good = set(result.nodes) - set(failed)
        others = f"; to continue without: {session.again(exclude=around)}" if good else ""
        return PreflightError(
            f"{text}; {silent}" if result.unreachable else text,
            reasons=result.unreachable,
            hint=f"fix it, then: {session.again()}{others}",
        )
    if result.unreachable:
        hint = session.without(result.unreachable, len(result.nodes) + len(result.unreachable))
        return NodesFailedError(silent, reasons=result.unreachable, hint=hint)
    return None
