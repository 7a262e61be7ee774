"""The command that says why a run failed, or what is wrong with one that goes on."""

from __future__ import annotations

from pathlib import Path

import click

from provision.cli.cluster import load_or_here, on_nodes, session_on
from provision.cli.options import reporting
from provision.errors import UsageError
from provision.inventory import select
from provision.output import Reporter
from provision.summaries.diagnosis import diagnosed
from provision.tasks.diagnose import diagnose, diagnose_files


@click.command("diagnose")
@on_nodes
@click.option(
    "--log",
    "logs",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Judge log files, of any launcher, instead of a run; what follows are further files.",
)
@click.argument("run", nargs=-1)
@reporting
def diagnose_command(
    reporter: Reporter,
    inventory_path: Path,
    limit: str | None,
    exclude: str | None,
    logs: tuple[Path, ...],
    run: tuple[str, ...],
) -> None:
    """Say which rank of a run failed first and why, or what is wrong with one that goes on; with the fix.

    RUN is a run's id or a part of it; by default the newest.
    """
    if logs:
        reporter.result(*diagnosed(diagnose_files([*logs, *map(Path, run)])))
        return
    if len(run) > 1:
        raise UsageError(f"{len(run)} runs are named", hint=f"clusterctl diagnose {run[0]}")
    inventory = load_or_here(inventory_path, reporter)
    nodes = select(inventory, limit=limit, exclude=exclude)
    word = run[0] if run else None
    with session_on(reporter, inventory, nodes) as session:
        reporter.result(*diagnosed(diagnose(session, word)))


COMMANDS = (diagnose_command,)
