"""This machine as a cluster of one node, for commands without an inventory file."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from provision.errors import UsageError
from provision.model import LOCAL, CheckOptions, Inventory, Node

if TYPE_CHECKING:
    from collections.abc import Mapping


def local_inventory(
    prefix: Path | None = None, *, environ: Mapping[str, str] = os.environ, starts: bool = True
) -> Inventory:
    """An inventory of this machine alone. It needs no ssh and no deployed release.

    Its environment is ``prefix``, else the active conda environment, else the active venv, else clusterctl's own. Runs
    are in ``$XDG_DATA_HOME/clusterctl/runs`` (``~/.local/share/clusterctl/runs``), whatever the current directory.
    Checks that compare nodes, or need a deployed release, are off.

    Args:
        prefix: of the environment.
        environ: the variables of this process.
        starts: whether the command starts programs of the environment, which must then exist.

    Raises:
        UsageError: there is no environment.
    """
    chosen = prefix or _active(environ)
    if starts and not (chosen / "bin/python").exists():
        raise UsageError(f"{chosen} is not an environment: {chosen / 'bin/python'} does not exist", hint=_HINT)
    return Inventory(
        path=Path(
            "this machine"
        ).absolute(),  # not a file: the name is for messages, the folder for the records of runs
        alone=True,
        prefix=PurePosixPath(chosen.absolute()),
        nodes=(Node(_name(), LOCAL),),
        base=PurePosixPath(data_folder(environ)),
        checks=CheckOptions(off=("env.same", "net.dns", "net.hostname")),
    )


def data_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of ``runs`` when there is no inventory (XDG Base Directory Specification)."""
    data = environ.get("XDG_DATA_HOME", "")
    return (Path(data) if data.startswith("/") else Path.home() / ".local/share") / "clusterctl"


_HINT = "activate the environment: conda activate NAME; or use an inventory: --inventory FILE"


def _active(environ: Mapping[str, str]) -> Path:
    for name in ("CONDA_PREFIX", "VIRTUAL_ENV"):
        if environ.get(name):
            return Path(environ[name])
    return Path(sys.prefix)


def _name() -> str:
    """The host name, without the characters that a node's name cannot have."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", platform.node()).lstrip(".-")[:253] or LOCAL
