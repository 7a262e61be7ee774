"""After ``pack-os``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from provision.env.report.text import number, size
from provision.summaries._summary import Summary

if TYPE_CHECKING:
    from provision.tasks.pack_os import PackOsResult


def os_packed(result: PackOsResult) -> Summary:
    """After ``pack-os``: the file, and the versions of what was asked for."""
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
