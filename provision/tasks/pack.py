"""``clusterctl pack-env``: pack a conda environment into a bundle."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from provision.env.bundle import layout
from provision.env.bundle.layout import SUFFIX
from provision.env.ops import choose, prebuild, unbuilt
from provision.env.packing.pack import PackOptions, pack
from provision.env.source import environment
from provision.env.source.environment import find_env
from provision.errors import UsageError
from provision.model import Notice
from provision.stages import stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from provision.env.bundle.manifest import Manifest
    from provision.env.source.files import Source
    from provision.model import Emit


SMALLEST_PART = 1_000_000  # bytes; smaller parts would be thousands

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?:(?P<unit>[KMGT])(?P<binary>i)?)?B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class PackResult:
    """A bundle. Sizes in bytes.

    Attributes:
        bundle: its name; no file has this name if the bundle was split.
        files: the bundle's file, or its parts.
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
        environ: environment variables.
        output: the bundle's path; by default NAME.ccb in the current folder. An existing file is replaced.
        exclude: patterns of paths to exclude, as in a .gitignore file, relative to the environment.
        data: files and folders to pack as ``data/NAME``.
        split: bytes of a part; 0 for one file. See ``parse_size``.
        with_ops: build the extensions that DeepSpeed would compile on the nodes.
        cpu_baseline: the CPU type to build them for.
        emit: receives events.

    Raises:
        UsageError: no such environment, or the output cannot be written.
        BundleError: the environment could not be packed.
    """
    prefix = find_env(env, environ)
    out = output or Path(prefix.name + SUFFIX)
    refuse_folder(out, f"clusterctl pack-env -o {out / (prefix.name + SUFFIX)}")
    whole = layout.bundle_name(out)
    if whole != out:
        raise UsageError(f"{out} is the name of a part of {whole.name}", hint=f"clusterctl pack-env -o {whole}")
    if split and split < SMALLEST_PART:
        raise UsageError(f"parts of {split} bytes are too small", hint="--split 4G, or at least --split 1M")
    began = time.monotonic()
    added, notices = additions(prefix, wanted=with_ops, baseline=cpu_baseline, environ=environ, emit=emit)
    options = PackOptions(exclude=exclude, data=data, split=split, additions=added, notices=notices)
    manifest = pack(prefix, out, name=prefix.name, emit=emit, options=options)
    files = layout.find_files(out)
    return PackResult(out, manifest, files.size, time.monotonic() - began, files.files)


def refuse_folder(out: Path, hint: str) -> None:
    """Check early that the output is not a folder.

    Raises:
        UsageError: it is.
    """
    if os.path.isdir(out):  # noqa: PTH112 - False without permission; the error comes later
        raise UsageError(f"{out} is a folder", hint=hint)


def parse_size(text: str) -> int:
    """A number of bytes, such as ``4G``, ``3900M``, ``700MB`` or ``4GiB``.

    Without an ``i`` the units are powers of 1000, as for disks: a file of ``4G`` fits on a FAT32 stick.

    Raises:
        UsageError: it is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a size", hint="such as 4G, 3900M, 700MB or 4GiB")
    base = 1024 if match["binary"] else 1000
    return int(float(match["number"]) * base ** _POWERS[(match["unit"] or "").upper()])


def additions(
    prefix: Path, *, wanted: bool, baseline: str | None, environ: Mapping[str, str], emit: Emit
) -> tuple[tuple[Source, ...], tuple[str, ...]]:
    """Build DeepSpeed's extensions: the files to add to an environment, and notices for the manifest.

    Args:
        prefix: the environment.
        wanted: build them; if false, only warn about extensions that the nodes would compile.
        baseline: the CPU type to build for; None for the platform's default.
        environ: environment variables.
        emit: receives events, also about extensions that could not be built.

    Raises:
        UsageError: no such baseline.
    """
    sites = sorted(str(path.relative_to(prefix)) for path in prefix.glob("lib/python*/site-packages") if path.is_dir())
    if not wanted:
        notices = unbuilt(prefix, sites)
        found: tuple[Source, ...] = ()
    else:
        chosen = choose(baseline, environment.find_platform(prefix))
        with stage(emit, "ops", "Building DeepSpeed's extensions (minutes the first time)", unit="steps") as shown:
            ops = prebuild(prefix, sites, chosen, cache_folder(environ))
            shown.summary = ", ".join(ops.built) or "none"
        notices, found = ops.notices, ops.additions
    for text in notices:
        emit(Notice(text, "warning"))
    return found, notices


def cache_folder(environ: Mapping[str, str]) -> Path:
    """The cache folder: ``$CLUSTERCTL_CACHE``, else ``clusterctl`` in the user's cache folder."""
    if given := environ.get("CLUSTERCTL_CACHE"):
        return Path(given)
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises where there is none
    return Path(environ.get("XDG_CACHE_HOME") or f"{home}/.cache") / "clusterctl"
