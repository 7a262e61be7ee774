"""The commands that measure what nodes can do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from provision.cli.cluster import load_or_here, on_nodes, session_on
from provision.cli.numbers import COUNT, number
from provision.cli.options import reporting
from provision.errors import UsageError
from provision.inventory import select
from provision.netbench import OPS, SIZES, parse_ops, parse_sizes
from provision.output import Reporter
from provision.summaries.bench import measured, measured_rows
from provision.tasks.bench import Backend, BenchOptions, bench, write_tuning

if TYPE_CHECKING:
    from provision.model import Inventory
    from provision.netbench.tuning import Tuning


@click.group("bench")
def bench_group() -> None:
    """Measure what the nodes can do."""


@bench_group.command("nccl")
@on_nodes
@number("--nodes", "-n", "count", type=COUNT, help="The first N nodes.")
@click.option("--sizes", metavar="SIZES", default=SIZES, show_default=True, help="FROM:TO, or a list of sizes.")
@click.option(
    "--ops", metavar="LIST", help="Some of all_reduce,all_gather,reduce_scatter,broadcast,sendrecv.  [default: all]"
)
@click.option(
    "--backend",
    type=click.Choice(["auto", "nccl", "gloo"]),
    default="auto",
    show_default=True,
    help="auto: nccl where every node has GPUs.",
)
@click.option("--pairs", is_flag=True, help="Compare all pairs of nodes, and name the slow node or link.")
@click.option("--tune", is_flag=True, help="Look for NCCL's fastest socket settings.")
@click.option("--write", is_flag=True, help="With --tune: write them into the inventory without asking.")
@reporting
def nccl_command(
    reporter: Reporter,
    inventory_path: Path,
    limit: str | None,
    exclude: str | None,
    count: int | None,
    sizes: str,
    ops: str | None,
    backend: Backend,
    *,
    pairs: bool,
    tune: bool,
    write: bool,
) -> None:
    """Measure the bandwidth between nodes, as NCCL's own tests define it; with torch alone, and gloo without GPUs.

    --pairs and --tune measure nothing else unless --ops names operations as well.
    """
    if write and not tune:
        raise UsageError("--write goes with --tune")
    inventory = load_or_here(inventory_path, reporter, nodes=count, starts=True)
    nodes = select(inventory, limit=limit, exclude=exclude, count=count)
    chosen = parse_ops(ops) if ops is not None else () if pairs or tune else OPS
    options = BenchOptions(chosen, parse_sizes(sizes), backend, pairs, tune)
    with session_on(reporter, inventory, nodes) as session:
        result = bench(session, options)
    data, text = measured(result)
    reporter.show(measured_rows(result))
    if result.tuning is None:
        reporter.result(data, text)
    else:
        written = _keep(reporter, inventory, result.tuning, write=write)
        reporter.result({**data, "written": written}, text)
    result.raise_wrong()


def _keep(reporter: Reporter, inventory: Inventory, tuning: Tuning, *, write: bool) -> bool:
    """Write the settings into the inventory, when they are worth it and somebody wants it."""
    if not tuning.worth_it:
        return False
    file = inventory.path.name
    if not write and sys.stdin.isatty():
        with reporter.paused():
            write = click.confirm(f"Write {tuning.best} into train.env of {file}?", default=False, err=True)
    if not write:
        reporter.warn(f"{file} is as it was: --tune --write writes {tuning.best} into its train.env")
        return False
    return write_tuning(inventory, tuning)


COMMANDS = (bench_group,)
