"""The output of ``pack-env``, ``pack-os``, ``pack-tool``, ``inspect`` and ``diff``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from provision.env.text import number, size
from provision.output_text import Summary

if TYPE_CHECKING:
    from provision.env.difference import Difference
    from provision.tasks.bundles import ExportResult, Inspection, PackOsResult, PackResult, ToolResult


def pack_output(result: PackResult) -> Summary:
    """After ``pack-env``."""
    manifest = result.manifest
    unpacked = sum(entry.size for entry in manifest.files)
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items() if version)
    text = (
        f"packed {manifest.name} ({versions or 'python ' + (manifest.python or '?')}): "
        f"{size(result.size)} of {size(unpacked)}, {len(manifest.files)} files, {len(manifest.chunks)} chunks "
        f"in {result.seconds:.1f} s\n"
        f"{result.bundle} holds release {manifest.release_id}"
        + (f", in {number(len(result.files), 'file')}" if len(result.files) > 1 else "")
    )
    data = {
        "bundle": str(result.bundle),
        "files_written": [str(path) for path in result.files],
        "release": manifest.release_id,
        "bytes": result.size,
        "unpacked_bytes": unpacked,
        "files": len(manifest.files),
        "chunks": len(manifest.chunks),
        "versions": dict(manifest.versions),
        "notices": list(manifest.notices),
        "seconds": round(result.seconds, 2),
    }
    return data, text


def archive_output(result: ExportResult) -> Summary:
    """After ``pack-env --format conda-pack``."""
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


def inspection_output(
    result: Inspection, *, packages: bool = False, files: bool = False, prefix: bool = False
) -> Summary:
    """After ``inspect``. The flags select what the text lists in full."""
    from provision.env.overview import overview_data, overview_text  # noqa: PLC0415 - only ``inspect`` needs it

    data = {"bundle": str(result.bundle), "verified": result.verified, **overview_data(result.overview)}
    text = overview_text(result.overview, packages=packages, files=files, prefix=prefix, verified=result.verified)
    return data, text


def difference_output(result: Difference, *, files: bool = False) -> Summary:
    """After ``diff``. With ``files`` the text lists every path."""
    from provision.env.difference import difference_data, difference_text  # noqa: PLC0415 - only ``diff`` does

    return difference_data(result), difference_text(result, files=files)


def tool_output(result: ToolResult) -> Summary:
    """After ``pack-tool``."""
    tool = result.tool
    glibc = ".".join(map(str, tool.glibc))
    data = {
        "file": str(result.file),
        "digest": tool.digest,
        "python": tool.python,
        "machine": tool.machine,
        "glibc": glibc,
        "bytes": tool.size,
        "unpacked_bytes": tool.unpacked,
        "files": tool.files,
        "notices": list(tool.notices),
        "seconds": round(result.seconds, 2),
    }
    text = (
        f"packed clusterctl with Python {tool.python} for {tool.machine}, glibc {glibc} or later: "
        f"{size(tool.size)} of {size(tool.unpacked)} in {result.seconds:.1f} s\n"
        f"on the other side: sh {result.file.name} deploy --inventory inventory.yaml"
    )
    return data, text


def os_pack_output(result: PackOsResult) -> Summary:
    """After ``pack-os``: the file, and the versions of the requested packages."""
    bundle, manifest = result.bundle, result.bundle.manifest
    data = {
        "bundle": str(bundle.path),
        "release": manifest.release,
        "architecture": manifest.architecture,
        "bytes": bundle.size,
        "sha256": bundle.sha256,
        "requested": manifest.versions,
        "packages": {each.name: each.version for each in manifest.packages},
        "seconds": round(result.seconds, 2),
    }
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    text = (
        f"packed {versions} for {manifest.release} ({manifest.architecture}): "
        f"{number(len(manifest.packages), 'package')}, {size(bundle.size)} in {result.seconds:.1f} s\n"
        f"{bundle.path} is for every node with {manifest.release}"
    )
    return data, text
