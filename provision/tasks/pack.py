"""``clusterctl pack-env``: a conda environment becomes a bundle."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from provision.env.pack import pack
from provision.env.source import find_env
from provision.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from provision.env.manifest import Manifest
    from provision.model import Emit

SUFFIX = ".ccb"


@dataclass(frozen=True)
class PackResult:
    """A bundle and what is in it. Sizes in bytes."""

    bundle: Path
    manifest: Manifest
    size: int
    seconds: float


def pack_env(env: str | None, *, environ: Mapping[str, str], output: Path | None = None, emit: Emit) -> PackResult:
    """Pack a conda environment into one file.

    Args:
        env: a path, the name of a conda environment, or None for the active one.
        environ: the process environment, where the active environment is named.
        output: the bundle's path; by default NAME.ccb in the current folder. One that exists is replaced.
        emit: is told about the progress.

    Raises:
        UsageError: no such environment, or the output cannot be written.
        BundleError: the environment could not be packed.
    """
    prefix = find_env(env, environ)
    out = output or Path(prefix.name + SUFFIX)
    if out.is_dir():
        raise UsageError(f"{out} is a folder", hint=f"clusterctl pack-env -o {out / (prefix.name + SUFFIX)}")
    began = time.monotonic()
    manifest = pack(prefix, out, name=prefix.name, emit=emit)
    return PackResult(out, manifest, out.stat().st_size, time.monotonic() - began)
