"""Where a bundle is when nobody has said so: the only one in a folder."""

from __future__ import annotations

from pathlib import Path

from provision.env.bundle import slices
from provision.errors import UsageError

SUFFIX = ".ccb"


def find_bundle(folder: Path) -> Path:
    """The only bundle in a folder, whole or in parts.

    Raises:
        UsageError: there is none, or more than one.
    """
    paths = [path for path in folder.glob(f"*{SUFFIX}*") if path.is_file()]
    # A hidden one is what a pack at work, or a killed one, has not given its name yet.
    found = sorted({slices.name_of(path) for path in paths if not path.name.startswith(".")})
    if not found:
        raise UsageError(f"no bundle (*{SUFFIX}) in {folder}", hint="clusterctl pack-env")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise UsageError(f"several bundles in {folder}: {names}", hint=f"clusterctl deploy {found[0].name}")
    return found[0]
