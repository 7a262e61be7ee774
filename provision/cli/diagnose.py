"""``clusterctl diagnose``."""

from __future__ import annotations

from pathlib import Path

import click

from provision.cli.cluster import load_or_here, on_nodes, session_on
from provision.cli.options import reporting
from provision.errors import UsageError
from provision.inventory import select
from provision.output import Reporter
from provision.summaries.diagnosis import diagnosis_output
from provision.tasks.diagnose import diagnose, diagnose_files


@click.command("diagnose")
@on_nodes
@click.option(
    "--log",
    "logs",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Read log files of any launcher instead of a run. More files may follow.",
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
    """Show which rank failed first, why, and how to fix it.

    For a run that is still running, shows what is wrong with it. RUN is a run's id or part of it. The default is the
    newest run.
    """
    if logs:
        reporter.result(*diagnosis_output(diagnose_files([*logs, *map(Path, run)])))
        return
    if len(run) > 1:
        raise UsageError(f"one run at a time, not {len(run)}", hint=f"clusterctl diagnose {run[0]}")
    inventory = load_or_here(inventory_path, reporter)
    nodes = select(inventory, limit=limit, exclude=exclude)
    word = run[0] if run else None
    with session_on(reporter, inventory, nodes) as session:
        reporter.result(*diagnosis_output(diagnose(session, word)))


COMMANDS = (diagnose_command,)
