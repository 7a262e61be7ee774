"""``clusterctl logs``, ``stop``, ``resume`` and ``collect``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from provision.cli.cluster import load_or_here, on_nodes, session_on
from provision.cli.options import COUNT, INDEX, Number, number, reporting
from provision.cli.terminal import asking, asking_which, letting_go
from provision.errors import NodesFailedError
from provision.inventory import fold, select
from provision.model import Notice
from provision.output import Reporter
from provision.output_text import Line, clean, fold_equal
from provision.run.follow import Entry
from provision.summaries.runs import collect_output, logs_data, stop_output, train_output
from provision.tasks.collect import collect
from provision.tasks.logs import Logs, Wanted, logs
from provision.tasks.runs import stop
from provision.tasks.start import Following
from provision.tasks.train import ResumeOptions, resume
from trainer.bounds import Bound

LINES = 1000  # default of logs --lines
_COUNT = Number(int, Bound(low=0, high=1_000_000_000), {"all": -1})


class _Shower:
    """Shows log lines: as text, as one JSON object, or with ``--follow --json`` as one object per line."""

    def __init__(self, reporter: Reporter, *, follow: bool) -> None:
        self.unreachable: dict[str, str] = {}
        self._reporter = reporter
        self._as_json = bool(click.get_current_context().params.get("as_json"))
        self._streams = follow and self._as_json
        self._follow = follow

    def past(self, found: Logs) -> None:
        """Show the lines that exist already."""
        if found.cut and not self._as_json:
            count = len(found.lines)
            self._reporter(Notice(f"showing the last {count} lines; for all lines: clusterctl logs -n all {found.run}"))
        if self._as_json and not self._streams:
            self._reporter.result(logs_data(found))
        else:
            for entry in found.lines:
                self.line(entry)
        self.unreachable = dict(found.unreachable)
        if self._follow:
            for why, names in fold_equal(found.unreachable).items():
                self._reporter.warn(f"no logs from {names}: {why}")

    def line(self, entry: Entry) -> None:
        """Show one line."""
        if self._streams:
            click.echo(json.dumps({"time": entry.time, "node": entry.node, "rank": entry.rank, "line": entry.text}))
        else:
            self._reporter.show([Line(clean(entry.shown), hang=None)])


@click.command("logs")
@on_nodes
@click.option("--follow", "-f", is_flag=True, help="Follow new output until the run ends.")
@click.option("--node", metavar="NODE", help="Only lines of this node.")
@number("--rank", type=INDEX, help="Only lines of this rank.")
@number("--lines", "-n", "count", type=_COUNT, default=LINES, show_default=True, help="Number of last lines, or 'all'.")
@click.argument("run", required=False)
@reporting
def logs_command(
    reporter: Reporter,
    inventory_path: Path,
    limit: str | None,
    exclude: str | None,
    node: str | None,
    rank: int | None,
    count: int,
    run: str | None,
    *,
    follow: bool,
) -> None:
    """Show a run's output from all its nodes.

    Lines are in order of time. RUN is a run's id or part of it. The default is the newest run. With --follow and
    --json, every line is one JSON object.
    """
    inventory = load_or_here(inventory_path, reporter)
    nodes = select(inventory, limit=limit, exclude=exclude)
    shower = _Shower(reporter, follow=follow)
    wanted = Wanted(node, rank, None if count < 0 else count)
    try:
        with session_on(reporter, inventory, nodes) as session:
            state = logs(session, run, wanted, show=shower.past, each=shower.line if follow else None)
    except KeyboardInterrupt:
        if not follow:
            raise
        reporter(Notice("stopped following; the run continues"))
    else:
        if follow:
            reporter(Notice(f"the run is over: {state}"))
        elif shower.unreachable:
            raise NodesFailedError(
                f"no logs from {fold(shower.unreachable)}",
                reasons=shower.unreachable,
                hint="lines saved earlier are in runs/ next to the inventory; to retry: " + session.again(),
            )


@click.command("stop")
@on_nodes
@click.option("--save", is_flag=True, help="Save a checkpoint first.")
@click.option("--yes", is_flag=True, help="Do not ask. As root, also stop runs of other users.")
@click.argument("run", required=False)
@reporting
def stop_command(
    reporter: Reporter,
    inventory_path: Path,
    limit: str | None,
    exclude: str | None,
    run: str | None,
    *,
    save: bool,
    yes: bool,
) -> None:
    """Stop a run on all its nodes.

    Verifies that no process, port or GPU memory of the run is left. RUN is a run's id or part of it. The default is
    the only running run, after a confirmation.
    """
    inventory = load_or_here(inventory_path, reporter)
    nodes = select(inventory, limit=limit, exclude=exclude)
    ask = None if yes else asking_which(reporter)
    with session_on(reporter, inventory, nodes) as session:
        result = stop(session, run, save=save, others_too=yes, ask=ask)
    reporter.result(*stop_output(result))
    result.raise_failed()


@click.command("resume")
@on_nodes
@number("--nodes", "-n", "count", type=COUNT, help="Resume on the first N of its nodes.")
@click.option("--detach", is_flag=True, help="Return once the run has started on every node.")
@number("--restarts", type=INDEX, help="Restart a failed run up to N times.")
@click.option("--force", is_flag=True, help="Start even if a check predicts a failure.")
@click.argument("run", required=False)
@reporting
def resume_command(
    reporter: Reporter,
    inventory_path: Path,
    limit: str | None,
    exclude: str | None,
    count: int | None,
    restarts: int | None,
    run: str | None,
    *,
    detach: bool,
    force: bool,
) -> None:
    """Resume a run from its newest complete checkpoint.

    RUN is a run's id or part of it. The default is the newest run. Code and configuration are those of the run. So are
    the nodes, unless --nodes, --limit or --exclude select some of them. The nodes keep the order of their ranks.
    """
    inventory = load_or_here(inventory_path, reporter, starts=True)
    nodes = select(inventory, limit=limit, exclude=exclude)
    options = ResumeOptions(force, count, restarts, Following(detach, asking(reporter)))
    with letting_go(), session_on(reporter, inventory, nodes) as session:
        result = resume(session, run, options)
    reporter.result(*train_output(result))


@click.command("collect")
@on_nodes
@click.option("--to", "folder", default="collected", show_default=True, metavar="DIR",
              type=click.Path(path_type=Path), help="Directory to copy to.")  # fmt: skip
@click.option("--only", type=click.Choice(["logs", "checkpoints"]), help="Copy only logs or only checkpoints.")
@click.option("--fp32", is_flag=True, help="Also merge a DeepSpeed checkpoint into fp32 weights.")
@click.argument("run", required=False)
@reporting
def collect_command(
    reporter: Reporter,
    inventory_path: Path,
    limit: str | None,
    exclude: str | None,
    folder: Path,
    only: str | None,
    run: str | None,
    *,
    fp32: bool,
) -> None:
    """Copy a run's logs and newest checkpoint to this machine.

    Files that are already here are not sent again. RUN is a run's id or part of it. The default is the newest run.
    """
    inventory = load_or_here(inventory_path, reporter)
    nodes = select(inventory, limit=limit, exclude=exclude)
    with session_on(reporter, inventory, nodes) as session:
        result = collect(session, run, folder, only=only, fp32=fp32)
    reporter.result(*collect_output(result))
    if result.failed:
        raise NodesFailedError(
            f"run {result.run} was not copied completely from {len(result.failed)} of its nodes",
            reasons=result.failed,
            hint=f"when {fold(result.failed)} can be reached again: {session.again(words=(result.run,))}",
        )


COMMANDS = (logs_command, stop_command, resume_command, collect_command)
