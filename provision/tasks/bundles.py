"""``clusterctl pack-env``, ``pack-os``, ``pack-tool``, ``inspect`` and ``diff``: files for the nodes.

``bundle_of`` also accepts an archive from conda-pack. An archive for conda-pack is written from a bundle, so that it
has the files of a deploy. The temporary bundle is next to the archive, and as large as a ``.tar.zst``.

Each function imports what only it needs, because together that takes much longer.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provision.env.bundle.layout import INDEX, SUFFIX, bundle_name, find_files
from provision.env.bundle.reader import Bundle, open_bundle
from provision.env.source.environment import find_env
from provision.errors import BundleError, UsageError
from provision.model import Emit, Notice
from provision.stages import stage

if TYPE_CHECKING:
    from provision.env.bundle.manifest import Manifest
    from provision.env.difference import Difference
    from provision.env.interchange.export import Exported
    from provision.env.overview import Overview
    from provision.env.source.files import Source
    from provision.ospackages.bundle import OsBundle
    from provision.tool.pack import Tool

ARCHIVE = ".tar.gz"  # conda-pack's default suffix
TOOL = "clusterctl.run"
# What clusterctl's services need:
PACKAGES = ("chrony", "nfs-common", "nfs-kernel-server", "infiniband-diags", "opensm")
SMALLEST_PART = 1_000_000  # bytes; smaller parts would be thousands

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?:(?P<unit>[KMGT])(?P<binary>i)?)?B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]*[a-z0-9+.]")  # deb-control(5); apt removes a package named with a final '-'


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
    from provision.env.packing.pack import PackOptions, pack  # noqa: PLC0415

    prefix = find_env(env, environ)
    out = output or Path(prefix.name + SUFFIX)
    _refuse_folder(out, f"clusterctl pack-env -o {out / (prefix.name + SUFFIX)}")
    whole = bundle_name(out)
    if whole != out:
        raise UsageError(f"{out} is the name of a part of {whole.name}", hint=f"clusterctl pack-env -o {whole}")
    if split and split < SMALLEST_PART:
        raise UsageError(f"parts of {split} bytes are too small", hint="--split 4G, or at least --split 1M")
    began = time.monotonic()
    added, notices = _ops(prefix, wanted=with_ops, baseline=cpu_baseline, environ=environ, emit=emit)
    options = PackOptions(exclude=exclude, data=data, split=split, additions=added, notices=notices)
    manifest = pack(prefix, out, name=prefix.name, emit=emit, options=options)
    files = find_files(out)
    return PackResult(out, manifest, files.size, time.monotonic() - began, files.files)


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


@dataclass(frozen=True)
class ExportResult:
    """An archive, the manifest of its environment, and the seconds that packing took."""

    archive: Exported
    manifest: Manifest
    seconds: float


def pack_archive(
    env: str | None, *, environ: Mapping[str, str], output: Path | None = None, emit: Emit, **options: Any
) -> ExportResult:
    """Pack an environment as an archive for users of conda-pack.

    Args:
        env: a path, the name of a conda environment, or None for the active one; or the path of a bundle.
        environ: environment variables.
        output: the archive's path; by default NAME.tar.gz in the current folder. An existing file is replaced.
        emit: receives events.
        options: the fields of ``PackOptions``.

    Raises:
        UsageError: no such environment, the output cannot be written, or its suffix is unknown.
        BundleError: the environment could not be packed, or the bundle is damaged.
    """
    from provision.env.interchange.export import compression, export  # noqa: PLC0415
    from provision.env.packing.pack import PackOptions, pack  # noqa: PLC0415
    from provision.env.packing.temporary import create_folder_beside  # noqa: PLC0415
    from provision.env.packing.writer import is_inside  # noqa: PLC0415

    def path_for(name: str) -> Path:
        out = output or Path(name + ARCHIVE)
        _refuse_folder(out, f"--output {out / ('NAME' + ARCHIVE)}")
        compression(out)
        return out

    def write(bundle: Bundle, out: Path) -> ExportResult:
        return ExportResult(export(bundle, out, emit=emit), bundle.manifest, time.monotonic() - began)

    began = time.monotonic()
    if env is not None and env.endswith(SUFFIX) and os.path.isfile(env):  # noqa: PTH113 - False where unreadable
        bundle = open_bundle(Path(env))
        return write(bundle, path_for(bundle.manifest.name))
    prefix = find_env(env, environ)
    out = path_for(prefix.name)
    if is_inside(out, prefix):
        raise UsageError(f"{out} would be inside the environment", hint="write it elsewhere with --output")
    with create_folder_beside(out) as folder:
        path = folder / (prefix.name + SUFFIX)
        pack(prefix, path, name=prefix.name, emit=emit, options=PackOptions(**options))
        return write(open_bundle(path), out)


def bundle_of(path: Path, *, emit: Emit) -> Path:
    """The bundle of ``path``: the path itself, or for an archive a bundle with the same environment.

    The bundle of ``NAME.tar.gz`` is ``NAME.tar.gz.ccb`` next to it, or in the current folder if that folder is not
    writable. It is created once, and again after a change of the archive's size or time.

    Raises:
        BundleError: the archive cannot be used.
        UsageError: the bundle cannot be written.
    """
    if SUFFIX in path.suffixes or not os.path.isfile(path):  # noqa: PTH113
        return path  # ``open_bundle`` reports files that cannot be read
    from provision.env.interchange.importer import import_archive, origin  # noqa: PLC0415
    from provision.env.interchange.unpack import format_of  # noqa: PLC0415

    if format_of(path) is None or _is_bundle(path):
        return path  # ``open_bundle`` reports other files
    out = path.with_name(path.name + SUFFIX)
    if not os.access(out.parent, os.W_OK):
        out = Path(out.name)
    try:
        imported = origin(path) in open_bundle(out).manifest.notices
    except (BundleError, UsageError):
        imported = False  # it does not exist, or has an older format
    if not imported:
        import_archive(path, out, emit=emit)
        emit(Notice(f"imported {path.name} as {out}; later deploys use it until {path.name} changes"))
    return out


@dataclass(frozen=True)
class Inspection:
    """A bundle's description; ``verified``: all of the bundle was read and is intact."""

    bundle: Path
    overview: Overview
    verified: bool


def inspect(bundle: Path, *, verify: bool = False, emit: Emit) -> Inspection:
    """Describe a bundle.

    Args:
        bundle: its path.
        verify: read all of it, and compare it with the manifest.
        emit: receives events.

    Raises:
        BundleError: it is not a bundle, damaged, truncated or too new.
        UsageError: it cannot be read.
    """
    from provision.env.overview import Overview  # noqa: PLC0415

    opened = open_bundle(bundle)
    if verify:
        opened.verify(emit)
    return Inspection(bundle, Overview(opened.manifest, opened.storage.size), verify)


def diff(old: Path, new: Path) -> Difference:
    """Compare two bundles.

    Raises:
        BundleError: one of them is not a bundle, damaged, truncated or too new.
        UsageError: one of them cannot be read.
    """
    from provision.env.difference import compare  # noqa: PLC0415

    return compare(open_bundle(old), open_bundle(new))


@dataclass(frozen=True)
class PackOsResult:
    """The bundle, and the seconds that packing took."""

    bundle: OsBundle
    seconds: float


def pack_os(
    release: str,
    packages: Sequence[str] = (),
    *,
    environ: Mapping[str, str],
    architecture: str = "amd64",
    output: Path | None = None,
    mirror: str | None = None,
    security_mirror: str | None = None,
    keyring: Path | None = None,
    emit: Emit,
) -> PackOsResult:
    """Download packages of a release and write them into one file.

    Args:
        release: such as ``debian12``.
        packages: their names; by default the packages that clusterctl's services need.
        environ: environment variables.
        architecture: the release's name for it.
        output: the bundle's path; by default os-packages-RELEASE-ARCHITECTURE.osb in the current folder.
        mirror: the archive's URL; by default the mirror of this machine's apt for the release, else the public one.
        security_mirror: the URL of security updates, or ``none``.
        keyring: the keys that sign the archive; by default the distribution's.
        emit: receives events.

    Raises:
        UsageError: the release or a package does not exist, the mirror fails, or the output cannot be written.
        BundleError: a package differs from its description in the archive.
    """
    from provision.ospackages import bundle, families, releases  # noqa: PLC0415

    found = releases.find(release)
    family = families.of(found)
    for name in packages:
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is not the name of a package", hint="use names without versions, such as chrony"
            )
    out = output or Path(f"os-packages-{found.name}-{architecture}{bundle.SUFFIX}")
    _refuse_folder(out, f"clusterctl pack-os --release {found.name} -o {out / 'os-packages'}{bundle.SUFFIX}")
    mirrors = family.mirrors(
        found,
        architecture,
        main=mirror or (environ.get("CLUSTERCTL_DEBIAN_MIRROR") if found.distribution == "debian" else None),
        security=security_mirror,
        keyring=keyring.absolute() if keyring else None,
        own=_own_mirrors(),
    )
    wanted = releases.Wanted(found, architecture, tuple(dict.fromkeys(packages or PACKAGES)), mirrors)
    began = time.monotonic()
    collected = family.collect(wanted, _cache_folder(environ) / "os-packages", emit)
    written = bundle.write(out, wanted, collected)
    return PackOsResult(written, time.monotonic() - began)


@dataclass(frozen=True)
class ToolResult:
    """The file, its contents, and the seconds that packing took."""

    file: Path
    tool: Tool
    seconds: float


def pack_tool(*, output: Path | None = None, emit: Emit) -> ToolResult:
    """Write clusterctl with its Python and every package it needs into one self-extracting file.

    Args:
        output: the file's path; by default clusterctl.run in the current folder. An existing file is replaced.
        emit: receives events.

    Raises:
        UsageError: the running Python cannot be packed or lacks a package, or the output cannot be written.
    """
    from provision.tool.pack import pack as pack_clusterctl  # noqa: PLC0415

    out = output or Path(TOOL)
    _refuse_folder(out, f"clusterctl pack-tool -o {out / TOOL}")
    began = time.monotonic()
    tool = pack_clusterctl(out, emit=emit)
    return ToolResult(out, tool, time.monotonic() - began)


def _ops(
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
    from provision.env.ops import choose, prebuild, unbuilt  # noqa: PLC0415
    from provision.env.source.environment import find_platform  # noqa: PLC0415

    sites = sorted(str(path.relative_to(prefix)) for path in prefix.glob("lib/python*/site-packages") if path.is_dir())
    if not wanted:
        notices = unbuilt(prefix, sites)
        found: tuple[Source, ...] = ()
    else:
        chosen = choose(baseline, find_platform(prefix))
        with stage(emit, "ops", "Building DeepSpeed's extensions (minutes the first time)", unit="steps") as shown:
            ops = prebuild(prefix, sites, chosen, _cache_folder(environ))
            shown.summary = ", ".join(ops.built) or "none"
        notices, found = ops.notices, ops.additions
    for text in notices:
        emit(Notice(text, "warning"))
    return found, notices


def _is_bundle(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(INDEX)) == INDEX.encode()


def _own_mirrors() -> dict[str, str]:
    """The first archive of each suite in this machine's apt sources."""
    from provision.ospackages.apt import SCHEMES  # noqa: PLC0415
    from provision.sandbox.rootfs import apt_sources  # noqa: PLC0415

    found: dict[str, str] = {}
    for source in apt_sources():
        if source.uri.startswith(SCHEMES):
            for suite in source.suites:
                found.setdefault(suite, source.uri)
    return found


def _refuse_folder(out: Path, hint: str) -> None:
    """Check early that the output is not a folder.

    Raises:
        UsageError: it is.
    """
    if os.path.isdir(out):  # noqa: PTH112 - False without permission; the error comes later
        raise UsageError(f"{out} is a folder", hint=hint)


def _cache_folder(environ: Mapping[str, str]) -> Path:
    """The cache folder: ``$CLUSTERCTL_CACHE``, else ``clusterctl`` in the user's cache folder."""
    if given := environ.get("CLUSTERCTL_CACHE"):
        return Path(given)
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises where there is none
    return Path(environ.get("XDG_CACHE_HOME") or f"{home}/.cache") / "clusterctl"
