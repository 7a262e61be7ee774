"""This machine as a cluster of one node, for where there is no inventory file."""

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
    """An inventory of this machine alone, which needs neither ssh nor a deployed release.

    Its environment is ``prefix``, else the active conda environment, else the active venv, else the one that clusterctl
    itself runs in. Runs lie in ``$XDG_DATA_HOME/clusterctl/runs`` (``~/.local/share/clusterctl/runs``), wherever the
    command is given. Checks that compare nodes, or look for a deployed release, are off.

    Args:
        prefix: of the environment.
        environ: the variables of this process.
        starts: programs of the environment are to be started, so that it must be one.

    Raises:
        UsageError: there is no environment.
    """
    chosen = prefix or _active(environ)
    if starts and not (chosen / "bin/python").exists():
        raise UsageError(f"{chosen} is not an environment: {chosen / 'bin/python'} does not exist", hint=_HINT)
    return Inventory(
        path=Path("this machine").absolute(),  # no file: its name is for messages, its folder for the record of a run
        alone=True,
        prefix=PurePosixPath(chosen.absolute()),
        nodes=(Node(_name(), LOCAL),),
        base=PurePosixPath(data_folder(environ)),
        checks=CheckOptions(off=("env.same", "net.dns", "net.hostname")),
    )


def data_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this machine's runs lie, in ``runs``, when there is no inventory (XDG Base Directory Specification)."""
    data = environ.get("XDG_DATA_HOME", "")
    return (Path(data) if data.startswith("/") else Path.home() / ".local/share") / "clusterctl"


_HINT = "activate the environment: conda activate NAME; or use an inventory: --inventory FILE"


def _active(environ: Mapping[str, str]) -> Path:
    for name in ("CONDA_PREFIX", "VIRTUAL_ENV"):
        if environ.get(name):
            return Path(environ[name])
    return Path(sys.prefix)


def _name() -> str:
    """The host's name, as far as a node can have it."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", platform.node()).lstrip(".-")[:253] or LOCAL
