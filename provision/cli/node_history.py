"""``clusterctl nodes``: what the recorded runs say about each node, and which nodes ``train`` skips."""

from __future__ import annotations

from dataclasses import asdict

import click

from provision.cli.cluster import Selection, load_inventory, on_nodes
from provision.cli.options import ListGroup, importing, reporting
from provision.output import Reporter


@click.group("nodes", cls=ListGroup)
def nodes_group() -> None:
    """List what past runs say about each node, and trust excluded nodes again.

    Without a command, lists them.
    """


@nodes_group.command("list")
@on_nodes
@reporting
def list_command(reporter: Reporter, selection: Selection) -> None:
    """List the nodes with their runs, failures, restarts and failed checks, the worst first.

    The numbers are those of this machine's records of runs. Connects to no node.
    """
    with importing():
        from provision.run import record  # noqa: PLC0415
        from provision.run.node_history import histories, read  # noqa: PLC0415
        from provision.summaries.node_history import nodes_output  # noqa: PLC0415

    inventory = load_inventory(selection.path, reporter)
    names = [node.name for node in selection.nodes(inventory)]
    reporter.result(*nodes_output(histories(names, record.kept(inventory.path), read(inventory.path))))


@nodes_group.command("trust")
@on_nodes
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...")
@reporting
def trust_command(reporter: Reporter, selection: Selection, nodes: tuple[str, ...]) -> None:
    """Let train use excluded nodes again."""
    with importing():
        from provision.inventory import select  # noqa: PLC0415
        from provision.run.node_history import trust  # noqa: PLC0415

    inventory = load_inventory(selection.path, reporter)
    chosen = [node.name for node in select(inventory, limit=",".join(nodes))]
    gone = trust(inventory.path, chosen)
    lines = [f"{name} is trusted again; it was excluded: {entry.why}" for name, entry in gone.items()]
    lines += [f"{name} was not excluded" for name in chosen if name not in gone]
    reporter.result({"trusted": {name: asdict(entry) for name, entry in gone.items()}}, "\n".join(lines))
