"""``clusterctl metrics``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from provision.cli.cluster import load_or_here, on_nodes, session_on
from provision.cli.options import COUNT, INDEX, Number, number, reporting
from provision.errors import UsageError
from provision.inventory import select
from provision.output import Reporter
from provision.output_text import Line
from provision.summaries.metrics import loss_curve, metrics_lines, metrics_output
from provision.tasks.logs import Log, Metrics, open_log, read_logs, read_run
from trainer.bounds import Bound
from trainer.reader import as_csv

ROWS = 20  # the table's default number of rows
_RUN = re.compile(r"[\w-]+")  # a run's id, or a part of it


_COUNT = Number(int, Bound(low=1, high=1_000_000_000), {"all": -1})


@click.command("metrics")
@on_nodes
@number("--last", type=_COUNT, metavar="N", help=f"Show the last N steps, or 'all'.  [default: {ROWS} in a table]")
@click.option("--csv", "as_csv_too", is_flag=True, help="Print CSV, by default with all steps.")
@number("--rank", type=INDEX, help="Numbers of this rank.  [default: the lowest with a loss]")
@number("--logging-steps", type=COUNT, metavar="N", help="Steps between the Trainer's lines, if they name no step.")
@click.argument("logs", nargs=-1, metavar="[RUN|FILE...]")
@reporting
def metrics_command(
    reporter: Reporter,
    inventory_path: Path,
    limit: str | None,
    exclude: str | None,
    last: int | None,
    rank: int | None,
    logging_steps: int | None,
    logs: tuple[str, ...],
    *,
    as_csv_too: bool,
) -> None:
    """Show a run's loss, learning rate, speed and evaluations.

    RUN is a run's id or part of it. The default is the newest run. FILE is a log of LLaMA-Factory, the transformers
    Trainer, DeepSpeed, nanoGPT, Megatron-LM or clusterctl's trainer, or a directory with such a log. Several files are
    parts of one run, oldest first. - reads stdin.
    """
    as_json = bool(click.get_current_context().params.get("as_json"))
    if as_csv_too and as_json:
        raise UsageError("--csv and --json cannot be used together")
    if logs and (len(logs) > 1 or _is_file(logs[0])):
        opened = [Log("stdin", sys.stdin.buffer, None) if name == "-" else open_log(Path(name)) for name in logs]
        found = read_logs(opened, rank=rank, every=logging_steps, emit=reporter)
    else:
        inventory = load_or_here(inventory_path, reporter)
        nodes = select(inventory, limit=limit, exclude=exclude)
        word = logs[0] if logs else None
        with session_on(reporter, inventory, nodes) as session:
            found = read_run(session, word, rank=rank, every=logging_steps)
    _show(reporter, found, last, as_csv_too=as_csv_too, as_json=as_json)


def _is_file(name: str) -> bool:
    """Whether an argument is a file: it exists, or cannot be a run's id."""
    return name == "-" or Path(name).exists() or not _RUN.fullmatch(name)


def _show(reporter: Reporter, found: Metrics, last: int | None, *, as_csv_too: bool, as_json: bool) -> None:
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


COMMANDS = (metrics_command,)
