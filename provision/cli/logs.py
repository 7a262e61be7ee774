"""``clusterctl logs``, ``metrics``, ``collect`` and ``diagnose``: what a run has written, and what it means.

``collect`` and ``diagnose`` import their tasks when they are called: these take much longer to import.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from provision.cli.cluster import Selection, on_nodes
from provision.cli.options import COUNT, INDEX, Number, importing, number, reporting
from provision.errors import NodesFailedError, UsageError
from provision.inventory import fold
from provision.model import Notice
from provision.output import Reporter
from provision.output_text import Line, clean, fold_equal
from provision.run.follow import Entry
from provision.summaries.metrics import events_output, loss_curve, metrics_lines, metrics_output
from provision.summaries.runs import collect_output, logs_data, sync_command, wandb_output
from provision.tasks.logs import How, Log, Logs, Metrics, Wanted, logs, open_log, read_logs, read_run
from provision.tasks.pattern import read_pattern
from provision.tasks.samples import prometheus
from trainer.bounds import Bound
from trainer.reader import as_csv

if TYPE_CHECKING:
    from provision.tasks.collect import Collected

LINES = 1000  # default of logs --lines
ROWS = 20  # the table's default number of rows
_LINES = Number(int, Bound(low=0, high=1_000_000_000), {"all": -1})
_STEPS = Number(int, Bound(low=1, high=1_000_000_000), {"all": -1})
_RUN = re.compile(r"[\w-]+")  # a run's id, or a part of it


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
@number("--lines", "-n", "count", type=_LINES, default=LINES, show_default=True, help="Number of last lines, or 'all'.")
@click.argument("run", required=False)
@reporting
def logs_command(
    reporter: Reporter,
    selection: Selection,
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
    shower = _Shower(reporter, follow=follow)
    wanted = Wanted(node, rank, None if count < 0 else count)
    try:
        with selection.session_or_here(reporter) as session:
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


@click.command("metrics")
@on_nodes
@number("--last", type=_STEPS, metavar="N", help=f"Show the last N steps, or 'all'.  [default: {ROWS} in a table]")
@click.option("--csv", "as_csv_too", is_flag=True, help="Print CSV, by default with all steps.")
@click.option("--prometheus", "as_prometheus", is_flag=True, help="Print the run's newest samples as Prometheus text.")
@click.option("--tensorboard", "events", metavar="DIR", type=click.Path(path_type=Path, file_okay=False),
              help="Write the run as a TensorBoard event file below DIR.")  # fmt: skip
@number("--rank", type=INDEX, help="Numbers of this rank.  [default: the lowest with a loss]")
@number("--logging-steps", type=COUNT, metavar="N", help="Steps between the Trainer's lines, if they name no step.")
@click.option("--pattern", metavar="REGEX", help="Read only lines that match, with groups such as (?P<loss>[\\d.]+).")
@click.argument("logs", nargs=-1, metavar="[RUN|FILE...]")
@reporting
def metrics_command(
    reporter: Reporter,
    selection: Selection,
    last: int | None,
    rank: int | None,
    logging_steps: int | None,
    pattern: str | None,
    events: Path | None,
    logs: tuple[str, ...],
    *,
    as_csv_too: bool,
    as_prometheus: bool,
) -> None:
    """Show a run's loss, learning rate, speed and evaluations.

    RUN is a run's id or part of it. The default is the newest run. FILE is a log of LLaMA-Factory, the transformers
    Trainer, DeepSpeed, nanoGPT, Megatron-LM, clusterctl's trainer or another program, or a directory with such a log.
    Several files are parts of one run, oldest first. - reads stdin. --pattern reads the lines of programs that
    clusterctl does not understand.
    """
    as_json = bool(click.get_current_context().params.get("as_json"))
    if as_csv_too and as_json:
        raise UsageError("--csv and --json cannot be used together")
    chosen = as_csv_too or (last, rank, logging_steps, pattern) != (None,) * 4 or len(logs) > 1
    if events is not None:
        if chosen or as_prometheus:
            raise UsageError(
                "--tensorboard writes all numbers of one run: it accepts no other format, steps or files",
                hint="clusterctl metrics --tensorboard DIR RUN",
            )
        _write_events(reporter, selection, events, logs[0] if logs else None)
        return
    if as_prometheus:
        if chosen or as_json:
            raise UsageError(
                "--prometheus prints the newest samples of one run: it accepts no other format, steps or files",
                hint="clusterctl metrics --prometheus RUN",
            )
        with selection.session_or_here(reporter) as session:
            text = prometheus(session, logs[0] if logs else None)
        reporter.show(Line(line, hang=None) for line in text.splitlines())
        return
    how = How(rank, logging_steps, read_pattern(pattern))
    if logs and (len(logs) > 1 or _is_file(logs[0])):
        opened = [Log("stdin", sys.stdin.buffer, None) if name == "-" else open_log(Path(name)) for name in logs]
        found = read_logs(opened, how, emit=reporter)
    else:
        with selection.session_or_here(reporter) as session:
            found = read_run(session, logs[0] if logs else None, how)
    _show_metrics(reporter, found, last, as_csv_too=as_csv_too, as_json=as_json)


def _write_events(reporter: Reporter, selection: Selection, folder: Path, word: str | None) -> None:
    with importing():
        from provision.tasks.report import gather, report_folder  # noqa: PLC0415
        from provision.tasks.runs import find  # noqa: PLC0415
        from provision.tasks.tensorboard import write_events  # noqa: PLC0415

    retry = "clusterctl metrics"
    if word is not None and _is_file(word):
        found = report_folder(Path(word)).run
    else:
        with selection.session_or_here(reporter) as session:
            found, retry = gather(session, find(session, word)), session.again()
    written = write_events(found, folder)
    reporter.result(*events_output(written))
    if found.missing:
        raise NodesFailedError(
            f"the file lacks {fold(found.missing)}", reasons=found.missing, hint=f"to write it again: {retry}"
        )


def _is_file(name: str) -> bool:
    """Whether an argument is a file: it exists, or cannot be a run's id."""
    return name == "-" or Path(name).exists() or not _RUN.fullmatch(name)


def _show_metrics(reporter: Reporter, found: Metrics, last: int | None, *, as_csv_too: bool, as_json: bool) -> None:
    everything = last in {None, -1} if as_csv_too or as_json else last == -1
    count = None if everything else last or ROWS
    series = found.series
    if as_csv_too:
        rows = series if count is None else series.last(count)
        reporter.show(Line(row, hang=None) for row in as_csv(rows, counted=series.counted))
        return
    data, text = metrics_output(found, count)
    if not as_json:
        reporter.show(metrics_lines(found, count))
        if sys.stdout.isatty() and "utf" in (sys.stdout.encoding or "").lower():
            reporter.show(loss_curve(found))
    reporter.result(data, text)


@click.command("collect")
@on_nodes
@click.option("--to", "folder", default="collected", show_default=True, metavar="DIR",
              type=click.Path(path_type=Path), help="Directory to copy to.")  # fmt: skip
@click.option("--only", type=click.Choice(["logs", "checkpoints"]), help="Copy only logs or only checkpoints.")
@click.option("--fp32", is_flag=True, help="Also merge a DeepSpeed checkpoint into fp32 weights.")
@click.option("--wandb", is_flag=True, help="Copy only its offline W&B runs, and print the command that uploads them.")
@click.argument("run", required=False)
@reporting
def collect_command(
    reporter: Reporter,
    selection: Selection,
    folder: Path,
    only: str | None,
    run: str | None,
    *,
    fp32: bool,
    wandb: bool,
) -> None:
    """Copy a run's logs and newest checkpoint to this machine.

    Files that are already here are not sent again. RUN is a run's id or part of it. The default is the newest run.
    """
    with importing():
        from provision.tasks.collect import collect  # noqa: PLC0415
        from provision.tasks.written import WandbRuns, collect_wandb  # noqa: PLC0415

    if wandb and (fp32 or only):
        raise UsageError("--wandb copies only W&B runs", hint="omit --only and --fp32, or run both commands")
    with selection.session_or_here(reporter) as session:
        result: Collected | WandbRuns = (
            collect_wandb(session, run, folder) if wandb else collect(session, run, folder, only=only, fp32=fp32)
        )
    if isinstance(result, WandbRuns):
        reporter.result(*wandb_output(result))
        reporter.show([Line(sync_command(result), hang=None)])  # never wrapped: it is pasted
    else:
        reporter.result(*collect_output(result))
    if result.failed:
        raise NodesFailedError(
            f"run {result.run} was not copied completely from {len(result.failed)} of its nodes",
            reasons=result.failed,
            hint=f"when {fold(result.failed)} can be reached again: {session.again(words=(result.run,))}",
        )


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
@click.option(
    "--code",
    "codes",
    multiple=True,
    metavar="CODE",
    help="Decode a diagnosis that was read over the phone. Needs no run.",
)
@click.argument("run", nargs=-1)
@reporting
def diagnose_command(
    reporter: Reporter,
    selection: Selection,
    logs: tuple[Path, ...],
    codes: tuple[str, ...],
    run: tuple[str, ...],
) -> None:
    """Show which rank failed first, why, and how to fix it.

    For a run that is still running, shows what is wrong with it. RUN is a run's id or part of it. The default is the
    newest run.
    """
    with importing():
        from provision.diagnosis.case_code import decode  # noqa: PLC0415
        from provision.summaries.diagnosis import case_output, diagnosis_output  # noqa: PLC0415
        from provision.tasks.diagnose import diagnose, diagnose_files  # noqa: PLC0415

    if codes:
        if logs:
            raise UsageError("--code and --log exclude each other", hint="--code CODE")
        reporter.result(*case_output(decode([*codes, *run])))
        return
    if logs:
        reporter.result(*diagnosis_output(diagnose_files([*logs, *map(Path, run)])))
        return
    if len(run) > 1:
        raise UsageError(f"one run at a time, not {len(run)}", hint=f"clusterctl diagnose {run[0]}")
    with selection.session_or_here(reporter) as session:
        reporter.result(*diagnosis_output(diagnose(session, run[0] if run else None)))
