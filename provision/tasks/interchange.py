"""``pack-env --format conda-pack``, and ``deploy`` of what conda-pack made.

A bundle is packed first and then written as an archive, so the archive has what a deploy would bring. Until then the
bundle is beside the archive, and takes as much room as a ``.tar.zst``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provision.env.bundle.find import SUFFIX
from provision.env.bundle.manifest import Manifest
from provision.env.bundle.reader import Bundle, open_bundle
from provision.env.interchange.export import Exported, compression, export
from provision.env.interchange.importing import import_archive, origin
from provision.env.interchange.unpack import format_of
from provision.env.packing import temporary, writer
from provision.env.packing.output import lies_in
from provision.env.packing.pack import pack
from provision.env.report.words import number, size
from provision.env.source.find import find_env
from provision.errors import BundleError, UsageError
from provision.model import Emit, Notice
from provision.tasks.pack import refuse_folder

DEFAULT_SUFFIX = ".tar.gz"  # conda-pack's


@dataclass(frozen=True)
class ExportResult:
    """An archive, the environment in it, and how long it took."""

    archive: Exported
    manifest: Manifest
    seconds: float


def pack_archive(
    env: str | None, *, environ: Mapping[str, str], output: Path | None = None, emit: Emit, **options: Any
) -> ExportResult:
    """Write an environment as an archive for conda-pack's users.

    Args:
        env: a path, the name of a conda environment, or None for the active one; or the path of a bundle.
        environ: the process environment, where the active environment is named.
        output: the archive's path; by default NAME.tar.gz in the current folder. One that exists is replaced.
        emit: receives events.
        options: further ones of ``pack``.

    Raises:
        UsageError: no such environment, the output cannot be written, or its name tells of no format.
        BundleError: the environment could not be packed, or the bundle is damaged.
    """
    began = time.monotonic()
    if env is not None and env.endswith(SUFFIX) and os.path.isfile(env):  # noqa: PTH113 - False where unreadable
        bundle = open_bundle(Path(env))
        out = _checked(output or Path(bundle.manifest.name + DEFAULT_SUFFIX))
        return _export(bundle, out, began, emit)
    prefix = find_env(env, environ)
    out = _checked(output or Path(prefix.name + DEFAULT_SUFFIX))
    if lies_in(out, prefix):
        raise UsageError(f"{out} would lie inside the environment", hint="write it elsewhere with --output")
    with temporary.folder_beside(out) as folder:
        path = folder / (prefix.name + SUFFIX)
        pack(prefix, path, name=prefix.name, emit=emit, **options)
        return _export(open_bundle(path), out, began, emit)


def bundle_of(path: Path, *, emit: Emit) -> Path:
    """The bundle that is meant by ``path``: itself, or the one that was or is now made of the archive it is.

    The bundle of ``NAME.tar.gz`` is ``NAME.tar.gz.ccb`` beside it, or in the current folder where that may not be
    written. It is made once, and again when the archive's size or time is another.

    Raises:
        BundleError: an archive that cannot be used.
        UsageError: the bundle cannot be written.
    """
    if SUFFIX in path.suffixes or not os.path.isfile(path) or format_of(path) is None or _is_bundle(path):  # noqa: PTH113
        return path  # whatever it is, or why it cannot be read, ``open_bundle`` knows what to say
    out = path.with_name(path.name + SUFFIX)
    if not os.access(out.parent, os.W_OK):
        out = Path(out.name)
    if not _is_made_of(out, path):
        import_archive(path, out, emit=emit)
        emit(Notice(f"{out} was made of {path.name}, and is used from now on as long as that does not change"))
    return out


def archived(result: ExportResult) -> tuple[Mapping[str, Any], str]:
    """After ``pack-env --format conda-pack``: one mapping for ``--json``, one text for people."""
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


def _checked(out: Path) -> Path:
    refuse_folder(out, f"--output {out / ('NAME' + DEFAULT_SUFFIX)}")
    compression(out)
    return out


def _export(bundle: Bundle, out: Path, began: float, emit: Emit) -> ExportResult:
    archive = export(bundle, out, emit=emit)
    return ExportResult(archive, bundle.manifest, time.monotonic() - began)


def _is_bundle(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(writer.INDEX)) == writer.INDEX.encode()


def _is_made_of(bundle: Path, archive: Path) -> bool:
    try:
        return origin(archive) in open_bundle(bundle).manifest.notices
    except (BundleError, UsageError):
        return False  # none yet, or one of an older format
