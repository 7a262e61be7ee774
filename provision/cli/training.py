"""The commands about a training run."""

from __future__ import annotations

from pathlib import Path

import click

from provision import summaries
from provision.cli.cluster import load_inventory, on_nodes, prompts_of
from provision.cli.options import reporting
from provision.inventory import select
from provision.output import Reporter
from provision.tasks.train import find_config, train


@click.command("train")
@on_nodes
@click.option("--nodes", "-n", "count", type=click.IntRange(min=1), help="Train on the first N nodes.")
@click.argument("config", required=False, type=click.Path(path_type=Path))
@reporting
def train_command(
    reporter: Reporter,
    inventory_path: Path,
    limit: str | None,
    exclude: str | None,
    count: int | None,
    config: Path | None,
) -> None:
    """Train with LLaMA-Factory over several nodes.

    CONFIG is a LLaMA-Factory YAML; by default the inventory's train.config, else train.yaml in this folder.
    Relative paths in it travel with the run, absolute ones are paths on the nodes.
    """
    inventory = load_inventory(inventory_path, reporter)
    nodes = select(inventory, limit=limit, exclude=exclude, count=count)
    result = train(inventory, nodes, find_config(config, inventory), prompts=prompts_of(reporter), emit=reporter)
    reporter.result(*summaries.trained(result))


COMMANDS = (train_command,)
