"""``clusterctl pack-env``, ``inspect``, ``diff``, ``pack-os`` and ``pack-tool``.

Each command imports its task and its output when it is called: together they take much longer to import.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from provision.cli.options import importing, reporting
from provision.errors import UsageError
from provision.output import Reporter


@click.command("pack-env")
@click.argument("env", required=False)
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Path of the bundle.  [default: ./NAME.ccb]")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Skip matching files (.gitignore syntax).")
@click.option(
    "--with-data",
    "data",
    multiple=True,
    metavar="PATH",
    type=click.Path(path_type=Path, exists=True),
    help="Add a file or directory as data/NAME.",
)
@click.option("--split", metavar="SIZE", help="Split the bundle into parts of this size, such as 4G.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["bundle", "conda-pack"]),
    default="bundle",
    show_default=True,
    help="Write a bundle, or an archive as conda-pack does.",
)
@click.option("--with-ops", is_flag=True, help="Compile DeepSpeed's ops here, so that nodes need no compiler.")
@click.option("--cpu-baseline", metavar="NAME", help="CPU level of the compiled ops.  [default: x86-64-v3]")
@click.option("--with-tool", is_flag=True, help="Also write clusterctl.run, this program as one file.")
@reporting
def pack_env_command(
    reporter: Reporter,
    env: str | None,
    output: Path | None,
    exclude: tuple[str, ...],
    data: tuple[Path, ...],
    split: str | None,
    form: str,
    cpu_baseline: str | None,
    *,
    with_ops: bool,
    with_tool: bool,
) -> None:
    """Pack a conda environment into one file.

    ENV is the path or name of a conda environment. The default is the active one.
    """
    with importing():
        from provision.summaries import bundles as summaries  # noqa: PLC0415
        from provision.tasks import bundles as tasks  # noqa: PLC0415

    if cpu_baseline and not with_ops:
        raise UsageError("--cpu-baseline goes with --with-ops")
    options: dict[str, Any] = {
        "environ": os.environ,
        "output": output,
        "emit": reporter,
        "exclude": exclude,
        "data": data,
    }
    if form == "conda-pack":
        if split or with_ops:
            raise UsageError(
                "--split and --with-ops go with bundles", hint="clusterctl pack-env BUNDLE --format conda-pack"
            )
        summary = summaries.archive_output(tasks.pack_archive(env, **options))
    else:
        options |= {"with_ops": with_ops, "cpu_baseline": cpu_baseline}
        options["split"] = tasks.parse_size(split) if split else 0
        summary = summaries.pack_output(tasks.pack_env(env, **options))
    if with_tool:
        folder = output.parent if output else Path()
        tool = summaries.tool_output(tasks.pack_tool(output=folder / "clusterctl.run", emit=reporter))
        summary = ({**summary[0], "tool": tool[0]}, f"{summary[1]}\n{tool[1]}")
    reporter.result(*summary)


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
    with importing():
        from provision.summaries.bundles import inspection_output  # noqa: PLC0415
        from provision.tasks import bundles as tasks  # noqa: PLC0415

    found = tasks.inspect(bundle, verify=verify, emit=reporter)
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
    with importing():
        from provision.summaries.bundles import difference_output  # noqa: PLC0415
        from provision.tasks import bundles as tasks  # noqa: PLC0415

    reporter.result(*difference_output(tasks.diff(old, new), files=files))


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
    with importing():
        from provision.summaries.bundles import os_pack_output  # noqa: PLC0415
        from provision.tasks import bundles as tasks  # noqa: PLC0415

    release: str = options.pop("release")
    reporter.result(*os_pack_output(tasks.pack_os(release, packages, environ=os.environ, emit=reporter, **options)))


@click.command("pack-tool")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Path of the file.  [default: ./clusterctl.run]")
@reporting
def pack_tool_command(reporter: Reporter, output: Path | None) -> None:
    """Pack clusterctl itself into one file.

    The file runs on Linux machines that have no network, no pip and no Python.
    """
    with importing():
        from provision.summaries.bundles import tool_output  # noqa: PLC0415
        from provision.tasks import bundles as tasks  # noqa: PLC0415

    reporter.result(*tool_output(tasks.pack_tool(output=output, emit=reporter)))
