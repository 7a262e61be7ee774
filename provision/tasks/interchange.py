"""``pack-env --format conda-pack``, and ``deploy`` of archives from conda-pack.

The environment is packed as a bundle first, so that the archive has the files of a deploy. The temporary bundle is
next to the archive, and as large as a ``.tar.zst``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provision.env.bundle.layout import INDEX, SUFFIX
from provision.env.bundle.manifest import Manifest
from provision.env.bundle.reader import Bundle, open_bundle
from provision.env.interchange.export import Exported, compression, export
from provision.env.interchange.importer import import_archive, origin
from provision.env.interchange.unpack import format_of
from provision.env.packing import temporary
from provision.env.packing.pack import PackOptions, pack
from provision.env.packing.writer import is_inside
from provision.env.source.environment import find_env
from provision.env.text import number, size
from provision.errors import BundleError, UsageError
from provision.model import Emit, Notice
from provision.tasks.pack import refuse_folder

DEFAULT_SUFFIX = ".tar.gz"  # conda-pack's


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
    began = time.monotonic()
    if env is not None and env.endswith(SUFFIX) and os.path.isfile(env):  # noqa: PTH113 - False where unreadable
        bundle = open_bundle(Path(env))
        out = _check_output(output or Path(bundle.manifest.name + DEFAULT_SUFFIX))
        return _export(bundle, out, began, emit)
    prefix = find_env(env, environ)
    out = _check_output(output or Path(prefix.name + DEFAULT_SUFFIX))
    if is_inside(out, prefix):
        raise UsageError(f"{out} would be inside the environment", hint="write it elsewhere with --output")
    with temporary.create_folder_beside(out) as folder:
        path = folder / (prefix.name + SUFFIX)
        pack(prefix, path, name=prefix.name, emit=emit, options=PackOptions(**options))
        return _export(open_bundle(path), out, began, emit)


def bundle_of(path: Path, *, emit: Emit) -> Path:
    """The bundle of ``path``: the path itself, or for an archive a bundle with the same environment.

    The bundle of ``NAME.tar.gz`` is ``NAME.tar.gz.ccb`` next to it, or in the current folder if that folder is not
    writable. It is created once, and again after a change of the archive's size or time.

    Raises:
        BundleError: the archive cannot be used.
        UsageError: the bundle cannot be written.
    """
    if SUFFIX in path.suffixes or not os.path.isfile(path) or format_of(path) is None or _is_bundle(path):  # noqa: PTH113
        return path  # ``open_bundle`` reports other files and files that cannot be read
    out = path.with_name(path.name + SUFFIX)
    if not os.access(out.parent, os.W_OK):
        out = Path(out.name)
    if not _is_imported_from(out, path):
        import_archive(path, out, emit=emit)
        emit(Notice(f"imported {path.name} as {out}; later deploys use it until {path.name} changes"))
    return out


def archive_output(result: ExportResult) -> tuple[Mapping[str, Any], str]:
    """The output of ``pack-env --format conda-pack``: data for ``--json``, and text."""
    archive = result.archive
    unpacked = sum(entry.size for entry in result.manifest.files)
    data = {
        "archive": str(archive.path),
        "name": result.manifest.name,
        "bytes": archive.size,
        "unpacked_bytes": unpacked,
        "files": archive.members,
        "rewritten_by_conda_unpack": archive.records,
        "notices": [*result.manifest.notices, *archive.notices],
        "seconds": round(result.seconds, 2),
    }
    text = (
        f"wrote {archive.path}: {size(archive.size)} of {size(unpacked)}, "
        f"{number(archive.members, 'file')} in {result.seconds:.1f} s\n"
        f"to use it: tar xf {archive.path.name} -C FOLDER, FOLDER/bin/conda-unpack, source FOLDER/bin/activate"
    )
    return data, text


def _check_output(out: Path) -> Path:
    refuse_folder(out, f"--output {out / ('NAME' + DEFAULT_SUFFIX)}")
    compression(out)
    return out


def _export(bundle: Bundle, out: Path, started: float, emit: Emit) -> ExportResult:
    archive = export(bundle, out, emit=emit)
    return ExportResult(archive, bundle.manifest, time.monotonic() - started)


def _is_bundle(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(INDEX)) == INDEX.encode()


def _is_imported_from(bundle: Path, archive: Path) -> bool:
    try:
        return origin(archive) in open_bundle(bundle).manifest.notices
    except (BundleError, UsageError):
        return False  # it does not exist, or has an older format
