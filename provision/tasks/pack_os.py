"""``clusterctl pack-os``: packages of an operating system, with all that they need, become one file for every node."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from provision.errors import UsageError
from provision.ospackages import bundle, families, releases
from provision.ospackages.apt_config import SCHEMES
from provision.ospackages.collection import Wanted
from provision.sandbox import mirror as machine
from provision.tasks.pack import cache_folder, refuse_folder

if TYPE_CHECKING:
    from provision.model import Emit
    from provision.ospackages.bundle import OsBundle

# What the services of clusterctl rest on.
PACKAGES = ("chrony", "nfs-common", "nfs-kernel-server", "infiniband-diags", "opensm")

_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]*[a-z0-9+.]")  # of a package; deb-control(5). One with '-' at its end removes


@dataclass(frozen=True)
class PackOsResult:
    """The bundle, and how long it took."""

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
    """Collect packages of a release and write them into one file.

    Args:
        release: such as ``debian12``.
        packages: their names; by default what the services of clusterctl rest on.
        environ: the process environment, where the cache and a mirror may be named.
        architecture: as the release calls it.
        output: the bundle's path; by default os-packages-RELEASE-ARCHITECTURE.osb in the current folder.
        mirror: the archive's address; by default what this machine's apt uses for that release, else everybody's.
        security_mirror: that of the security updates, or ``none``.
        keyring: the keys that prove the archive; by default the distribution's.
        emit: receives events.

    Raises:
        UsageError: a release or package that does not exist, a mirror that fails, or an output that cannot be written.
        BundleError: a package is not the one that its archive describes.
    """
    found = releases.find(release)
    family = families.of(found)
    for name in packages:
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name!r} is no name of a package", hint="names only, without versions, such as chrony")
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
    """The archive that this machine's own apt uses for each suite; the first one that it names."""
    found: dict[str, str] = {}
    for source in machine.sources():
        if source.uri.startswith(SCHEMES):
            for suite in source.suites:
                found.setdefault(suite, source.uri)
    return found
