"""``clusterctl pack-os``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from provision import summaries
from provision.cli.options import reporting
from provision.output import Reporter
from provision.tasks.pack_os import pack_os


@click.command("pack-os")
@click.option("--release", metavar="NAME", required=True, help="debian12, debian13, ubuntu22.04 or ubuntu24.04.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="Path of the file.  [default: ./os-packages-RELEASE-ARCH.osb]",
)
@click.option("--arch", "architecture", type=click.Choice(["amd64", "arm64"]), default="amd64", show_default=True,
              help="Architecture of the nodes.")  # fmt: skip
@click.option("--mirror", metavar="URL", help="Package archive.  [default: this machine's, else the public one]")
@click.option("--security-mirror", metavar="URL", help="Archive of security updates, or 'none'.")
@click.option(
    "--keyring",
    type=click.Path(path_type=Path),
    help="Keys that sign the archive.  [default: the distribution's]",
)
@click.argument("packages", nargs=-1, metavar="[PACKAGE...]")
@reporting
def pack_os_command(reporter: Reporter, packages: tuple[str, ...], **options: Any) -> None:
    """Pack operating system packages into one file.

    The file holds the packages and all their dependencies. `services apply` installs it on nodes without a network.
    PACKAGE defaults to what clusterctl's services need: chrony, nfs-common, nfs-kernel-server, infiniband-diags and
    opensm.
    """
    release: str = options.pop("release")
    reporter.result(*summaries.os_packed(pack_os(release, packages, environ=os.environ, emit=reporter, **options)))


COMMANDS = (pack_os_command,)
