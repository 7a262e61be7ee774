"""``clusterctl pack-env``: a conda environment becomes a bundle."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from provision.env.bundle import slices
from provision.env.bundle.slices import SUFFIX
from provision.env.packing.pack import pack
from provision.env.source.environments import find_env
from provision.errors import UsageError
from provision.tasks import ops

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from provision.env.bundle.manifest import Manifest
    from provision.model import Emit


SMALLEST_PART = 1_000_000  # bytes; of smaller ones there would be thousands

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?:(?P<unit>[KMGT])(?P<binary>i)?)?B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class PackResult:
    """A bundle and what is in it. Sizes in bytes.

    Attributes:
        bundle: its name; no file of this name exists if it was split.
        files: the files that it lies in: itself, or its parts.
    """

    bundle: Path
    manifest: Manifest
    size: int
    seconds: float
    files: tuple[Path, ...] = ()


def pack_env(
    env: str | None,
    *,
    environ: Mapping[str, str],
    output: Path | None = None,
    exclude: Sequence[str] = (),
    data: Sequence[Path] = (),
    split: int = 0,
    with_ops: bool = False,
    cpu_baseline: str | None = None,
    emit: Emit,
) -> PackResult:
    """Pack a conda environment into one file.

    Args:
        env: a path, the name of a conda environment, or None for the active one.
        environ: the process environment, where the active environment is named.
        output: the bundle's path; by default NAME.ccb in the current folder. One that exists is replaced.
        exclude: patterns of what is left out, as in a .gitignore file, relative to the environment.
        data: files and folders that travel with it, as ``data/NAME`` in the environment.
        split: bytes of a part, if the bundle is to lie in several files; else 0. See ``parse_size``.
        with_ops: build the extensions that DeepSpeed would compile on the nodes.
        cpu_baseline: the processors to build them for, by name.
        emit: is told about the progress.

    Raises:
        UsageError: no such environment, or the output cannot be written.
        BundleError: the environment could not be packed.
    """
    prefix = find_env(env, environ)
    out = output or Path(prefix.name + SUFFIX)
    refuse_folder(out, f"clusterctl pack-env -o {out / (prefix.name + SUFFIX)}")
    whole = slices.name_of(out)
    if whole != out:
        raise UsageError(f"{out} is the name of a part of {whole.name}", hint=f"clusterctl pack-env -o {whole}")
    if split and split < SMALLEST_PART:
        raise UsageError(f"parts of {split} bytes are too small", hint="--split 4G, or at least --split 1M")
    began = time.monotonic()
    added, notices = ops.additions(prefix, wanted=with_ops, baseline=cpu_baseline, environ=environ, emit=emit)
    manifest = pack(
        prefix,
        out,
        name=prefix.name,
        emit=emit,
        exclude=exclude,
        data=data,
        split=split,
        additions=added,
        notices=notices,
    )
    files = slices.find_slices(out)
    return PackResult(out, manifest, files.size, time.monotonic() - began, files.files)


def refuse_folder(out: Path, hint: str) -> None:
    """Notice before anything is done that a file cannot have this name.

    Raises:
        UsageError: there is a folder of that name.
    """
    if os.path.isdir(out):  # noqa: PTH112 - False where this user may not look; that it cannot be written is said later
        raise UsageError(f"{out} is a folder", hint=hint)


def parse_size(text: str) -> int:
    """A number of bytes, such as ``4G``, ``3900M``, ``700MB`` or ``4GiB``.

    Without an ``i`` the units are those of disks, powers of 1000: a file of ``4G`` fits on a FAT32 stick.

    Raises:
        UsageError: it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no size", hint="such as 4G, 3900M, 700MB or 4GiB")
    base = 1024 if match["binary"] else 1000
    return int(float(match["number"]) * base ** _POWERS[(match["unit"] or "").upper()])
