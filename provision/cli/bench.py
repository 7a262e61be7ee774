"""``clusterctl bench``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from provision.cli.cluster import Selection, on_nodes, session_on
from provision.cli.options import COUNT, number, reporting
from provision.errors import UsageError
from provision.netbench import OPS, SIZES, parse_ops, parse_sizes
from provision.output import Reporter
from provision.summaries.bench import bench_output, bench_rows
from provision.tasks.bench import Backend, BenchOptions, bench, write_tuning

if TYPE_CHECKING:
    from provision.model import Inventory
    from provision.netbench import Tuning


@click.group("bench")
def bench_group() -> None:
    """Measure the network between nodes."""


@bench_group.command("nccl")
@on_nodes
@number("--nodes", "-n", "count", type=COUNT, help="Use the first N nodes.")
@click.option("--sizes", metavar="SIZES", default=SIZES, show_default=True, help="FROM:TO, or a list such as 8M,64M.")
@click.option(
    "--ops", metavar="LIST", help="all_reduce, all_gather, reduce_scatter, broadcast, sendrecv.  [default: all]"
)
@click.option(
    "--backend",
    type=click.Choice(["auto", "nccl", "gloo"]),
    default="auto",
    show_default=True,
    help="auto: nccl if every node has GPUs.",
)
@click.option("--pairs", is_flag=True, help="Measure every pair of nodes and find slow nodes or links.")
@click.option("--tune", is_flag=True, help="Find the fastest socket settings of NCCL.")
@click.option("--write", is_flag=True, help="With --tune: write the settings to the inventory.")
@reporting
def nccl_command(
    reporter: Reporter,
    selection: Selection,
    count: int | None,
    sizes: str,
    ops: str | None,
    backend: Backend,
    *,
    pairs: bool,
    tune: bool,
    write: bool,
) -> None:
    """Measure the bandwidth of NCCL or gloo between nodes.

    Uses the definitions of nccl-tests and needs only torch. With --pairs or --tune, collectives are measured only if
    --ops names them.
    """
    if write and not tune:
        raise UsageError("--write goes with --tune")
    inventory = selection.load_or_here(reporter, nodes=count, starts=True)
    nodes = selection.nodes(inventory, count)
    chosen = parse_ops(ops) if ops is not None else () if pairs or tune else OPS
    options = BenchOptions(chosen, parse_sizes(sizes), backend, pairs, tune)
    with session_on(reporter, inventory, nodes) as session:
        result = bench(session, options)
    data, text = bench_output(result)
    reporter.show(bench_rows(result))
    if result.tuning is None:
        reporter.result(data, text)
    else:
        written = _keep(reporter, inventory, result.tuning, write=write)
        reporter.result({**data, "written": written}, text)
    result.raise_wrong()


def _keep(reporter: Reporter, inventory: Inventory, tuning: Tuning, *, write: bool) -> bool:
    """Write the settings to the inventory if they are worth it and the user agrees. Returns whether they were."""
    if not tuning.worth_it:
        return False
    file = inventory.path.name
    if not write and sys.stdin.isatty():
        with reporter.paused():
            write = click.confirm(f"Write {tuning.best} to train.env of {file}?", default=False, err=True)
    if not write:
        reporter.warn(f"{file} was not changed; --tune --write sets {tuning.best} in its train.env")
        return False
    return write_tuning(inventory, tuning)
