"""The commands about runs that have begun: their logs, their end, going on with them, and what they leave."""

from __future__ import annotations

import json
from pathlib import Path

import click

from provision import summaries
from provision.cli.cluster import load_or_here, on_nodes, session_on
from provision.cli.interrupts import asking, asking_which, letting_go
from provision.cli.numbers import COUNT, INDEX, Number, number
from provision.cli.options import reporting
from provision.errors import NodesFailedError
from provision.inventory import fold, select
from provision.model import Notice
from provision.output import Reporter
from provision.output_text import Line, clean, fold_equal
from provision.run.follow import Entry
from provision.tasks.collect import collect
from provision.tasks.logs import Logs, Wanted, logs
from provision.tasks.resume import ResumeOptions, resume
from provision.tasks.start import Following
from provision.tasks.stop import stop
from trainer.bounds import Bound

LINES = 1000  # of logs, unless another number is asked for


_COUNT = Number(int, Bound(low=0, high=1_000_000_000), {"all": -1})


class _Shower:
    """Shows lines of logs: as text, as one JSON object, or where they are followed as one object a line."""

    def __init__(self, reporter: Reporter, *, follow: bool) -> None:
        self.unreachable: dict[str, str] = {}
        self._reporter = reporter
        self._as_json = bool(click.get_current_context().params.get("as_json"))
        self._streams = follow and self._as_json
        self._follow = follow

    def past(self, found: Logs) -> None:
        """What there is."""
        if found.cut and not self._as_json:
            count = len(found.lines)
            self._reporter(Notice(f"the last {count} lines; all of them: clusterctl logs -n all {found.run}"))
        if self._as_json and not self._streams:
            self._reporter.result(summaries.logs_data(found))
        else:
            for entry in found.lines:
                self.line(entry)
        self.unreachable = dict(found.unreachable)
        if self._follow:
            for why, names in fold_equal(found.unreachable).items():
                self._reporter.warn(f"without the logs of {names}: {why}")

    def line(self, entry: Entry) -> None:
        """One line."""
        if self._streams:
            click.echo(json.dumps({"time": entry.time, "node": entry.node, "rank": entry.rank, "line": entry.text}))
        else:
            self._reporter.show([Line(clean(entry.shown), hang=None)])


@click.command("logs")
@on_nodes
@click.option("--follow", "-f", is_flag=True, help="Go on with what comes, until the run has ended.")
@click.option("--node", metavar="NODE", help="Only this node's lines.")
@number("--rank", type=INDEX, help="Only this rank's lines.")
@number("--lines", "-n", "count", type=_COUNT, default=LINES, help=f"The last so many; {LINES}, or all.")
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
    """Show what a run has printed on all its nodes, in the order of time.

    RUN is a run's id or a part of it; by default it is the newest run. With --follow and --json, every line is a JSON
    object of its own.
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
        reporter(Notice("the run goes on"))
    else:
        if follow:
            reporter(Notice(f"the run is over: {state}"))
        elif shower.unreachable:
            raise NodesFailedError(
                f"without the logs of {fold(shower.unreachable)}",
                reasons=shower.unreachable,
                hint="what was collected while the run was followed is in runs/ beside the inventory; to look again: "
                + session.again(),
            )


@click.command("stop")
@on_nodes
@click.option("--save", is_flag=True, help="Let it save a checkpoint first, and say at which step.")
@click.option("--yes", is_flag=True, help="Ask nothing. As root: also a run of another user.")
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
    """Stop a run on all its nodes, and prove that nothing of it is left.

    RUN is a run's id or a part of it; by default it is the only one that is running. Without RUN, a terminal is asked
    first.
    """
    inventory = load_or_here(inventory_path, reporter)
    nodes = select(inventory, limit=limit, exclude=exclude)
    ask = None if yes else asking_which(reporter)
    with session_on(reporter, inventory, nodes) as session:
        result = stop(session, run, save=save, others_too=yes, ask=ask)
    reporter.result(*summaries.stopped_shown(result))
    result.raise_failed()


@click.command("resume")
@on_nodes
@number("--nodes", "-n", "count", type=COUNT, help="Resume on the first N of its nodes.")
@click.option("--detach", is_flag=True, help="Leave it alone once it has begun.")
@number("--restarts", type=INDEX, help="How often it may begin again by itself.")
@click.option("--force", is_flag=True, help="Go on although something looks as if it would stop the run.")
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
    """Go on with a run that has ended, from its newest complete checkpoint.

    RUN is a run's id or a part of it; by default it is the newest run. Code and configuration stay what they were, and
    so do the nodes unless --nodes, --limit or --exclude choose some of them: these keep the order of their ranks.
    """
    inventory = load_or_here(inventory_path, reporter, starts=True)
    nodes = select(inventory, limit=limit, exclude=exclude)
    options = ResumeOptions(force, count, restarts, Following(detach, asking(reporter)))
    with letting_go(), session_on(reporter, inventory, nodes) as session:
        result = resume(session, run, options)
    reporter.result(*summaries.trained(result))


@click.command("collect")
@on_nodes
@click.option("--to", "folder", default="collected", show_default=True, type=click.Path(path_type=Path))
@click.option("--only", type=click.Choice(["logs", "checkpoints"]), help="Only these.")
@click.option("--fp32", is_flag=True, help="Also make one set of fp32 weights of a DeepSpeed checkpoint.")
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
    """Bring a run's logs and its newest complete checkpoint from all nodes to one place here.

    RUN is a run's id or a part of it; by default it is the newest run. What is here already is not sent again.
    """
    inventory = load_or_here(inventory_path, reporter)
    nodes = select(inventory, limit=limit, exclude=exclude)
    with session_on(reporter, inventory, nodes) as session:
        result = collect(session, run, folder, only=only, fp32=fp32)
    reporter.result(*summaries.collected(result))
    if result.failed:
        raise NodesFailedError(
            f"not everything of run {result.run} came from {len(result.failed)} of its nodes",
            reasons=result.failed,
            hint=f"when {fold(result.failed)} is back: {session.again(words=(result.run,))}",
        )


COMMANDS = (logs_command, stop_command, resume_command, collect_command)
