"""``clusterctl pack-env``. Rarely needed modules are imported late: they double the start-up time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from provision import summaries
from provision.cli.options import reporting
from provision.errors import UsageError
from provision.output import Reporter
from provision.tasks.pack import pack_env, parse_size


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
        from provision.tasks.interchange import archive_output, pack_archive  # noqa: PLC0415

        summary = archive_output(pack_archive(env, **options))
    else:
        options |= {"with_ops": with_ops, "cpu_baseline": cpu_baseline}
        options["split"] = parse_size(split) if split else 0
        summary = summaries.packed(pack_env(env, **options))
    if with_tool:
        from provision.tasks.tool import pack_tool  # noqa: PLC0415

        folder = output.parent if output else Path()
        tool = summaries.tooled(pack_tool(output=folder / "clusterctl.run", emit=reporter))
        summary = ({**summary[0], "tool": tool[0]}, f"{summary[1]}\n{tool[1]}")
    reporter.result(*summary)


COMMANDS = (pack_env_command,)
