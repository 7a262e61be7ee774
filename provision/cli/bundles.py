"""``clusterctl inspect`` and ``clusterctl diff``."""

from __future__ import annotations

from pathlib import Path

import click

from provision.cli.options import reporting
from provision.output import Reporter
from provision.tasks.inspect import diff, difference_output, inspect, inspection_output


@click.command("inspect")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--packages", is_flag=True, help="List every package.")
@click.option("--files", is_flag=True, help="List every file.")
@click.option("--prefix", is_flag=True, help="List every file that contains the prefix, and in which form.")
@click.option("--verify", is_flag=True, help="Read the whole bundle and verify its checksums.")
@reporting
def inspect_command(
    reporter: Reporter, bundle: Path, *, packages: bool, files: bool, prefix: bool, verify: bool
) -> None:
    """Show a bundle's versions, requirements, packages and sizes."""
    found = inspect(bundle, verify=verify, emit=reporter)
    reporter.result(*inspection_output(found, packages=packages, files=files, prefix=prefix))


@click.command("diff")
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option("--files", is_flag=True, help="List every path that differs.")
@reporting
def diff_command(reporter: Reporter, old: Path, new: Path, *, files: bool) -> None:
    """Show how two bundles differ.

    Also shows how much a deploy of NEW sends to a node that has OLD.
    """
    reporter.result(*difference_output(diff(old, new), files=files))


COMMANDS = (inspect_command, diff_command)
