"""What apt is told, as text: an apt that sees nothing of the machine it runs on but its network settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from provision.errors import UsageError
from provision.ospackages.collection import Mirrors, Wanted
from provision.ospackages.releases import Release

SCHEMES = ("http://", "https://", "file:", "copy:")


@dataclass(frozen=True)
class Archive:
    """A distribution's archive, as its own installer writes it into sources.list(5)."""

    main: str
    security: str
    components: tuple[str, ...]
    keyring: str
    keyring_package: str


_DEBIAN = Archive(
    main="http://deb.debian.org/debian",
    security="http://deb.debian.org/debian-security",
    components=("main",),
    keyring="/usr/share/keyrings/debian-archive-keyring.gpg",
    keyring_package="debian-archive-keyring",
)
_UBUNTU = Archive(
    main="http://archive.ubuntu.com/ubuntu",
    security="http://security.ubuntu.com/ubuntu",
    components=("main", "universe"),  # infiniband-diags and opensm are in universe
    keyring="/usr/share/keyrings/ubuntu-archive-keyring.gpg",
    keyring_package="ubuntu-keyring",  # of this name in Ubuntu, and in Debian from 13 on
)
_PORTS = "http://ports.ubuntu.com/ubuntu-ports"  # of Ubuntu, all but PCs


def archive(release: Release, architecture: str) -> Archive:
    """Where a release of Debian or Ubuntu lies for everybody."""
    if release.distribution == "debian":
        return _DEBIAN
    if architecture in ("amd64", "i386"):
        return _UBUNTU
    return Archive(_PORTS, _PORTS, _UBUNTU.components, _UBUNTU.keyring, _UBUNTU.keyring_package)


def security_beside(main: str) -> str | None:
    """Where a mirror of Debian keeps security updates, by the custom of its mirrors: ``debian-security``."""
    head, _, last = main.rstrip("/").rpartition("/")
    return f"{head}/debian-security" if last == "debian" else None


def address(given: str) -> str:
    """An address that apt takes. ``file:`` becomes ``copy:``, so that packages lie in our folder like fetched ones.

    Raises:
        UsageError: it is none.
    """
    if not given.startswith(SCHEMES) or re.search(r"[\s\[\]]", given):
        raise UsageError(
            f"{given!r} is no address of a mirror", hint="such as http://mirror.example/debian or file:/srv/debian"
        )
    return re.sub(r"^file:", "copy:", given.rstrip("/"))


def sources(wanted: Wanted) -> str:
    """The sources.list of a release with its updates; every archive must be signed with a key of the keyring."""
    release, mirrors = wanted.release, wanted.mirrors
    components = " ".join(archive(release, wanted.architecture).components)
    places = [(mirrors.main, release.codename), (mirrors.main, f"{release.codename}-updates")]
    if mirrors.security:
        places.append((mirrors.security, f"{release.codename}-security"))
    return "".join(f"deb [signed-by={mirrors.keyring}] {uri} {suite} {components}\n" for uri, suite in places)


def configuration(folder: Path, architecture: str, network: Iterable[str]) -> str:
    """An apt.conf for ``$APT_CONFIG``, which is read first: no other file of the machine is read after it.

    Args:
        folder: holds all that this apt writes.
        architecture: of the packages.
        network: lines of ``apt-config dump`` that are kept, see ``network_settings``.
    """
    settings = {
        # An empty status: what a package needs is never left out because this machine happens to have it, so the
        # closure is one for a minimal installation and for a full server.
        "Dir::State": folder,
        "Dir::State::lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder,
        "Dir::Cache::archives": folder / "archives",
        "Dir::Log": folder,
        "Dir::Etc::main": "/dev/null",
        "Dir::Etc::parts": "/dev/null",
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::Etc::trusted": "/dev/null",
        "Dir::Etc::trustedparts": "/dev/null",
        "APT::Architecture": architecture,
        "APT::Install-Recommends": "false",
        "APT::Get::Always-Include-Phased-Updates": "true",  # Ubuntu's: else it is a lot drawn by each machine
        "APT::Update::Error-Mode": "any",  # a list that could not be fetched is an error, not a warning
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
        "Acquire::http::Timeout": "20",  # seconds
        "Acquire::https::Timeout": "20",
    }
    lines = [f'{name} "{value}";' for name, value in settings.items()]
    return "\n".join([*lines, f'APT::Architectures {{ "{architecture}"; }};', *network, ""])


# Of the machine's own apt: how it reaches the network (proxies, certificates, bandwidth), and whether it believes the
# archives' dates. What it fetches, and where it takes it from, is none of ours.
_KEPT = re.compile(
    r"^Acquire::(?!IndexTargets|Languages|AllowInsecure|AllowWeak|AllowDowngrade|cdrom)[\w:.-]+ \".+\";$"
)


def network_settings(dump: str) -> tuple[str, ...]:
    """The lines of ``apt-config dump`` that tell how this machine reaches mirrors."""
    return tuple(line for line in dump.splitlines() if _KEPT.match(line))


def mirrors(
    release: Release,
    architecture: str,
    *,
    main: str | None,
    security: str | None,
    keyring: Path | None,
    own: Mapping[str, str],
) -> Mirrors:
    """See ``families.Family.mirrors``.

    Raises:
        UsageError: an address that is none, or one that does not tell where security updates lie.
    """
    known = archive(release, architecture)
    usual = own.get(release.codename) or known.main
    first = address(main or usual)
    if security == "none":
        second = None
    elif security:
        second = address(security)
    elif main and release.distribution == "debian":
        second = security_beside(first)
        if second is None:
            raise UsageError(
                f"{main} does not tell where its security updates lie",
                hint="--security-mirror URL, or --security-mirror none to do without",
            )
    elif main:
        second = first  # Ubuntu's mirrors have it with the rest
    else:
        second = address(own.get(f"{release.codename}-security") or known.security)
    return Mirrors(first, second, keyring or Path(known.keyring))
