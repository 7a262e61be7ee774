"""An archive that conda-pack made somewhere becomes a bundle."""

from __future__ import annotations

import time
from pathlib import Path

from provision.env.bundle.manifest import Manifest
from provision.env.interchange import restore
from provision.env.interchange.unpack import format_of, unpack
from provision.env.packing import temporary
from provision.env.packing.pack import pack
from provision.errors import BundleError
from provision.model import Emit, Notice, StageFinished, StageStarted

STAGE = "import"

_REFUSED = {
    "zip": "a zip file, which keeps neither symlinks nor permissions",
    "squashfs": "a squashfs image",
    None: "no archive that is known",
}


def import_archive(archive: Path, out: Path, *, emit: Emit) -> Manifest:
    """Make the bundle ``out`` of a conda-pack archive: tar, plain or compressed with gzip, zstd, bzip2 or xz.

    It is unpacked beside ``out``, given the prefix that it had where it was packed, packed from there, and removed.
    Nothing in it is run.

    Args:
        archive: made by conda-pack, by ``export``, or a tar of an environment's folder.
        out: the bundle; it appears when it is whole.
        emit: told about the progress.

    Returns:
        The manifest that was written; its first notice is ``origin(archive)``.

    Raises:
        BundleError: it is no archive of an environment, damaged, or a member would leave the folder.
        UsageError: a file cannot be read or written.
    """
    kind = format_of(archive)
    if kind in _REFUSED:
        raise BundleError(
            f"{archive} is {_REFUSED[kind]}: environments come as .tar.gz, .tar.zst or .tar",
            hint="pack it again with conda-pack --format tar.gz",
        )
    source_of = origin(archive)
    started = time.monotonic()
    with temporary.folder_beside(out.absolute()) as folder:
        emit(StageStarted(STAGE, f"Unpacking {archive}", archive.stat().st_size, "bytes"))
        unpacked = unpack(archive, folder, stage=STAGE, emit=emit)
        name = name_of(archive)
        try:
            environment = restore.find(unpacked)
            unpacker = restore.unpacker_of(environment)
            source = restore.source_prefix(environment, unpacker, name)
        except BundleError as error:
            raise BundleError(f"{archive}: {error}", hint=error.hint) from error
        notices = restore.restore(environment, unpacker, source)
        unpacked.seal()
        emit(StageFinished(STAGE, time.monotonic() - started))
        for text in notices:
            emit(Notice(text, "warning"))
        return pack(environment.root, out, name=name, emit=emit, source_prefix=source, notices=(source_of, *notices))


def origin(archive: Path) -> str:
    """The notice by which a bundle tells which archive it was made from: by name, size and time of change."""
    status = archive.stat()
    seconds, rest = divmod(status.st_mtime_ns, 1_000_000_000)
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"made from the archive {archive.name}: {status.st_size} bytes of {when}.{rest:09d}Z"


def name_of(archive: Path) -> str:
    """What the environment is called: the archive's name without its suffixes."""
    name = archive.name
    for suffix in (".tar.gz", ".tar.zst", ".tar.bz2", ".tar.xz", ".tgz", ".tzst", ".tbz2", ".txz", ".tar"):
        name = name.removesuffix(suffix)
    return name
