"""The command that collects packages of an operating system."""

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
    "--output", "-o", type=click.Path(path_type=Path), help="The file.  [default: ./os-packages-RELEASE-ARCH.osb]"
)
@click.option("--arch", "architecture", type=click.Choice(["amd64", "arm64"]), default="amd64", show_default=True)
@click.option("--mirror", metavar="URL", help="The archive.  [default: what this machine's apt uses, or everybody's]")
@click.option("--security-mirror", metavar="URL", help="The archive of security updates, or none to do without.")
@click.option(
    "--keyring",
    type=click.Path(path_type=Path),
    help="The keys that prove the archive.  [default: the distribution's]",
)
@click.argument("packages", nargs=-1, metavar="[PACKAGE...]")
@reporting
def pack_os_command(reporter: Reporter, packages: tuple[str, ...], **options: Any) -> None:
    """Pack packages of an operating system, with all that they need, into one file for nodes without a network.

    PACKAGES are by default what clusterctl's services rest on: chrony, nfs-common, nfs-kernel-server,
    infiniband-diags and opensm.
    """
    release: str = options.pop("release")
    reporter.result(*summaries.os_packed(pack_os(release, packages, environ=os.environ, emit=reporter, **options)))


COMMANDS = (pack_os_command,)
