"""``clusterctl pack-os``: pack OS packages and their dependencies into one file for every node."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from provision.errors import UsageError
from provision.ospackages import bundle, families, releases
from provision.ospackages.apt import SCHEMES
from provision.ospackages.releases import Wanted
from provision.sandbox import rootfs as machine
from provision.tasks.pack import cache_folder, refuse_folder

if TYPE_CHECKING:
    from provision.model import Emit
    from provision.ospackages.bundle import OsBundle

# The packages that clusterctl's services need.
PACKAGES = ("chrony", "nfs-common", "nfs-kernel-server", "infiniband-diags", "opensm")

_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]*[a-z0-9+.]")  # deb-control(5); apt removes a package named with a final '-'


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
    found = releases.find(release)
    family = families.of(found)
    for name in packages:
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is not the name of a package", hint="use names without versions, such as chrony"
            )
    out = output or Path(f"os-packages-{found.name}-{architecture}{bundle.SUFFIX}")
    refuse_folder(out, f"clusterctl pack-os --release {found.name} -o {out / 'os-packages'}{bundle.SUFFIX}")
    mirrors = family.mirrors(
        found,
        architecture,
        main=mirror or (environ.get("CLUSTERCTL_DEBIAN_MIRROR") if found.distribution == "debian" else None),
        security=security_mirror,
        keyring=keyring.absolute() if keyring else None,
        own=_own_mirrors(),
    )
    wanted = Wanted(found, architecture, tuple(dict.fromkeys(packages or PACKAGES)), mirrors)
    began = time.monotonic()
    collected = family.collect(wanted, cache_folder(environ) / "os-packages", emit)
    written = bundle.write(out, wanted, collected)
    return PackOsResult(written, time.monotonic() - began)


def _own_mirrors() -> dict[str, str]:
    """The first archive of each suite in this machine's apt sources."""
    found: dict[str, str] = {}
    for source in machine.apt_sources():
        if source.uri.startswith(SCHEMES):
            for suite in source.suites:
                found.setdefault(suite, source.uri)
    return found
