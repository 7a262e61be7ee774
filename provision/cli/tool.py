"""``clusterctl pack-tool``."""

from __future__ import annotations

from pathlib import Path

import click

from provision import summaries
from provision.cli.options import reporting
from provision.output import Reporter
from provision.tasks.tool import pack_tool


@click.command("pack-tool")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Path of the file.  [default: ./clusterctl.run]")
@reporting
def pack_tool_command(reporter: Reporter, output: Path | None) -> None:
    """Pack clusterctl itself into one file.

    The file runs on Linux machines that have no network, no pip and no Python.
    """
    reporter.result(*summaries.tooled(pack_tool(output=output, emit=reporter)))


COMMANDS = (pack_tool_command,)
