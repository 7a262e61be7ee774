"""Packages of Debian and Ubuntu: an apt with separate folders and settings resolves and fetches them.

It needs ``apt-get`` of any release, and no root. It changes nothing on the machine, and uses only the network settings
of the machine's own apt. deb822(5) describes the index of a bundle, ``Packages`` and ``Release``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from provision.errors import ClusterctlError, UsageError
from provision.model import Emit, Progress
from provision.ospackages.releases import Collected, Mirrors, Package, Release, Wanted
from provision.stages import stage

STAGE = "os packages"


class Apt:
    """See ``families.Family``."""

    templates = "services/os_packages/apt"

    def mirrors(
        self,
        release: Release,
        architecture: str,
        *,
        main: str | None,
        security: str | None,
        keyring: Path | None,
        own: Mapping[str, str],
    ) -> Mirrors:
        """See ``families.Family.mirrors``."""
        found = mirrors(release, architecture, main=main, security=security, keyring=keyring, own=own)
        if not found.keyring.is_file():
            known = main_archive(release, architecture)
            raise UsageError(
                f"{found.keyring} is missing: it is needed to verify the packages of {release.name}",
                hint="--keyring FILE" + ("" if keyring else f", or apt-get install {known.keyring_package}"),
            )
        return found

    def collect(self, wanted: Wanted, cache: Path, emit: Emit) -> Collected:
        """See ``families.Family.collect``."""
        if not shutil.which("apt-get"):
            raise UsageError(
                f"packages of {wanted.release.name} are collected with apt-get, which is not installed here",
                hint="on a machine with Debian or Ubuntu (any release): clusterctl pack-os",
            )
        folder = cache.absolute() / f"{wanted.release.name}-{wanted.architecture}"
        with _exclusive_cache(folder):
            return _collect(wanted, folder, emit)


def _collect(wanted: Wanted, folder: Path, emit: Emit) -> Collected:
    title = f"Reading {wanted.mirrors.main} for {wanted.release.name}"
    with stage(emit, STAGE, title, unit="steps") as shown:
        known = _solve(wanted, folder)
        _fetch(wanted, folder, tuple(known), emit)
        packages = tuple(sorted(known, key=lambda each: each.name))
        index = packages_file(known.items())
        shown.summary = f"{len(packages)} packages"
    return Collected(
        packages,
        {each.file: _fetched_file(folder, each) for each in packages},
        {"Packages": index, "Release": release_file(wanted.release.name, wanted.architecture, index)},
    )


def _solve(wanted: Wanted, folder: Path) -> dict[Package, Stanza]:
    """The packages that apt would install, with their index entries."""
    _write_settings(wanted, folder)
    updated = _apt(folder, "apt-get", "update")
    if updated.returncode:
        raise unreachable_error(wanted, updated.stderr)
    solved = _apt(folder, "apt-get", "--simulate", "install", *wanted.packages)
    if solved.returncode:
        raise unsolved_error(wanted, solved.stdout + solved.stderr)
    versions = dict(installed_versions(solved.stdout))
    chosen = [f"{name}={version}" for name, version in versions.items()]
    shown = _apt(folder, "apt-cache", "--no-all-versions", "show", *chosen)
    known = {parse_package(stanza): stanza for stanza in parse_stanzas(shown.stdout)}
    if virtual := [name for name in wanted.packages if name not in versions]:
        raise virtual_error(wanted, virtual, providers(known.values(), virtual))
    assert versions == {each.name: each.version for each in known}, "apt-cache did not show what apt-get had chosen"
    return known


def _fetch(wanted: Wanted, folder: Path, packages: tuple[Package, ...], emit: Emit) -> None:
    """Fetch missing packages into ``archives``; apt compares them with the signed index.

    Of existing files apt compares only the size, so their digests are compared here.
    """
    missing = 0
    for each in packages:
        path = _fetched_file(folder, each)
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() != each.sha256:
            path.unlink()
        missing += not path.is_file()
    emit(Progress(STAGE, 0, missing, note=f"fetching {missing} of {len(packages)} packages"))
    result = _apt(folder, "apt-get", "--yes", "--download-only", "install", *wanted.packages)
    if result.returncode:
        raise unsolved_error(wanted, result.stdout + result.stderr)
    _apt(folder, "apt-get", "autoclean")  # deletes versions that the mirror no longer has


def _fetched_file(folder: Path, package: Package) -> Path:
    """The path of a package in apt's cache, where a colon in its version is percent-encoded."""
    version = package.version.replace(":", "%3a")
    return folder / "archives" / f"{package.name}_{version}_{package.architecture}.deb"


def _write_settings(wanted: Wanted, folder: Path) -> None:
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "status").write_text("", encoding="utf-8")
    dump = subprocess.run(["apt-config", "dump", "Acquire"], capture_output=True, text=True, check=False).stdout
    network = network_settings(dump)
    text = configuration(folder, wanted.architecture, network)
    settings = folder / "apt.conf"
    settings.touch(mode=0o600)  # a proxy's address may hold a password
    settings.write_text(text, encoding="utf-8")
    (folder / "sources.list").write_text(sources(wanted), encoding="utf-8")


def _apt(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [argv[0], "--quiet=2", *argv[1:]] if argv[0] == "apt-cache" else [argv[0], "--quiet", *argv[1:]],
        env={**os.environ, "LC_ALL": "C", "APT_CONFIG": str(folder / "apt.conf")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


@contextmanager
def _exclusive_cache(folder: Path) -> Iterator[None]:
    """Lock the folder: one process at a time collects packages for a release."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


SCHEMES = ("http://", "https://", "file:", "copy:")


@dataclass(frozen=True)
class Archive:
    """A distribution's archive, as in the sources.list(5) of its installer."""

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


def main_archive(release: Release, architecture: str) -> Archive:
    """The public archive of a release of Debian or Ubuntu."""
    if release.distribution == "debian":
        return _DEBIAN
    if architecture in ("amd64", "i386"):
        return _UBUNTU
    return Archive(_PORTS, _PORTS, _UBUNTU.components, _UBUNTU.keyring, _UBUNTU.keyring_package)


def security_beside(main: str) -> str | None:
    """The security updates of a Debian mirror, by convention in ``debian-security``."""
    head, _, last = main.rstrip("/").rpartition("/")
    return f"{head}/debian-security" if last == "debian" else None


def parse_address(given: str) -> str:
    """An address for apt. ``file:`` becomes ``copy:``, so that packages are copied to the cache like fetched ones.

    Raises:
        UsageError: it is not a valid address.
    """
    if not given.startswith(SCHEMES) or re.search(r"[\s\[\]]", given):
        raise UsageError(
            f"{given!r} is not a mirror's address", hint="such as http://mirror.example/debian or file:/srv/debian"
        )
    return re.sub(r"^file:", "copy:", given.rstrip("/"))


def sources(wanted: Wanted) -> str:
    """The sources.list of a release with its updates; every archive must be signed with a key of the keyring."""
    release, mirrors = wanted.release, wanted.mirrors
    components = " ".join(main_archive(release, wanted.architecture).components)
    places = [(mirrors.main, release.codename), (mirrors.main, f"{release.codename}-updates")]
    if mirrors.security:
        places.append((mirrors.security, f"{release.codename}-security"))
    return "".join(f"deb [signed-by={mirrors.keyring}] {uri} {suite} {components}\n" for uri, suite in places)


def configuration(folder: Path, architecture: str, network: Iterable[str]) -> str:
    """An apt.conf for ``$APT_CONFIG``, which is read first and excludes the machine's other settings.

    Args:
        folder: the folder for everything that this apt writes.
        architecture: the packages' architecture.
        network: the lines of ``apt-config dump`` to keep, see ``network_settings``.
    """
    settings = {
        # An empty status: no dependency is omitted because this machine has it, so the bundle suits a minimal node.
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
        "APT::Get::Always-Include-Phased-Updates": "true",  # Ubuntu: else each machine decides at random
        "APT::Update::Error-Mode": "any",  # a list that could not be fetched is an error, not a warning
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
        "Acquire::http::Timeout": "20",  # seconds
        "Acquire::https::Timeout": "20",
    }
    lines = [f'{name} "{value}";' for name, value in settings.items()]
    return "\n".join([*lines, f'APT::Architectures {{ "{architecture}"; }};', *network, ""])


# Settings of the machine's apt to keep: network access (proxies, certificates, bandwidth), and the check of dates.
_KEPT = re.compile(
    r"^Acquire::(?!IndexTargets|Languages|AllowInsecure|AllowWeak|AllowDowngrade|cdrom)[\w:.-]+ \".+\";$"
)


def network_settings(dump: str) -> tuple[str, ...]:
    """The lines of ``apt-config dump`` with this machine's network settings."""
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
        UsageError: an invalid address, or no known address of security updates.
    """
    known = main_archive(release, architecture)
    usual = own.get(release.codename) or known.main
    first = parse_address(main or usual)
    if security == "none":
        second = None
    elif security:
        second = parse_address(security)
    elif main and release.distribution == "debian":
        second = security_beside(first)
        if second is None:
            raise UsageError(
                f"the address of security updates is not known for {main}",
                hint="--security-mirror URL, or --security-mirror none to omit them",
            )
    elif main:
        second = first  # Ubuntu's mirrors have it with the rest
    else:
        second = parse_address(own.get(f"{release.codename}-security") or known.security)
    return Mirrors(first, second, keyring or Path(known.keyring))


# --- apt's output ---------------------------------------------------------------------------------

# Inst chrony (4.3-2+deb12u3 Debian:12.15/oldstable [amd64])
# Inst libc6 [2.36-9] (2.36-9+deb12u14 Debian:12.15/oldstable [amd64]) []
_INST = re.compile(
    r"^Inst (?P<name>[^\s:]+)(?::\S+)? (?:\[\S+\] )?\((?P<version>\S+) .*\[(?P<arch>[a-z0-9-]+)\]\)", re.MULTILINE
)
_MISSING = re.compile(
    r"^E: (?:Unable to locate package (\S+)|Package '(\S+)' has no installation candidate)$", re.MULTILINE
)
_FETCH = re.compile(r"^[EW]: (?:Failed to fetch|GPG error:) (\S+?:/\S+)\s+(.*)$", re.MULTILINE)
_UNSIGNED = re.compile(r"^E: The repository '(?P<uri>\S+) .*' is not signed", re.MULTILINE)
_BADLY_SIGNED = re.compile(
    r"^[EW]: (?:Failed to fetch|GPG error:) (?P<uri>\S+?:/\S+)\s+(?P<why>.*signature.*)$", re.MULTILINE
)
_ABSENT = re.compile(r"^E: The repository '(\S+) (\S+) Release' does not have a Release file", re.MULTILINE)
_VIRTUAL = re.compile(r"^Package (\S+) is a virtual package provided by:\n((?:  .*\n)+)", re.MULTILINE)
_UNMET = re.compile(r"^The following packages have unmet dependencies:\n((?: .*\n)+)", re.MULTILINE)


def installed_versions(simulation: str) -> list[tuple[str, str]]:
    """Name and version of every package that ``apt-get -s install`` would unpack."""
    return [(match["name"], match["version"]) for match in _INST.finditer(simulation)]


def unreachable_error(wanted: Wanted, text: str) -> UsageError:
    """Why ``apt-get update`` failed: a mirror does not answer, lacks the release, or has no valid signature."""
    if match := _UNSIGNED.search(text) or _BADLY_SIGNED.search(text):
        why = " ".join(match["why"].split()) if "why" in match.groupdict() else "it has no signature"
        return UsageError(
            f"the mirror {match['uri']} is not signed by a key of {wanted.mirrors.keyring}: {why}",
            hint="--keyring FILE with the keys of its signer, or another --mirror URL",
        )
    if match := _ABSENT.search(text):
        option = "--security-mirror" if match[2].endswith("-security") else "--mirror"
        return UsageError(
            f"the mirror {match[1]} has no {match[2]}",
            hint=f"{option} URL of a mirror with {wanted.release.name}"
            + (", or none to omit security updates" if option == "--security-mirror" else ""),
        )
    return _fetch_error(wanted, text)


def unsolved_error(wanted: Wanted, text: str) -> UsageError:
    """Why ``apt-get install`` could not resolve the packages."""
    release = wanted.release.name
    if match := _VIRTUAL.search(text):
        return virtual_error(wanted, [match[1]], sorted(line.split()[0] for line in match[2].splitlines()))
    missing = [match[1] or match[2] for match in _MISSING.finditer(text)]
    if missing:
        names = ", ".join(dict.fromkeys(missing))
        return UsageError(f"{release} has no package {names}", hint="check the spelling: apt-cache search WORD")
    if match := _UNMET.search(text):
        conflicts = "; ".join(" ".join(line.split()) for line in match[1].splitlines())
        return UsageError(f"these packages of {release} conflict: {conflicts}", hint="pack them into separate bundles")
    return _fetch_error(wanted, text)


def virtual_error(wanted: Wanted, names: Sequence[str], providers: Sequence[str]) -> UsageError:
    """The error for virtual packages, because a node cannot determine whether they are installed."""
    return UsageError(
        f"{', '.join(names)} is a virtual package of {wanted.release.name}, which other packages provide",
        hint=f"name one of {', '.join(providers)}" if providers else "name a package that provides it",
    )


def _fetch_error(wanted: Wanted, text: str) -> UsageError:
    if match := _FETCH.search(text):
        return UsageError(
            f"the mirror {match[1]} failed: {' '.join(match[2].split())}",
            hint="check the network and apt's proxy (apt-config dump Acquire), or use another --mirror URL",
        )
    return UsageError(
        f"apt could not collect packages of {wanted.release.name} from {wanted.mirrors.main}: {_trouble(text)}",
        hint="use another mirror: --mirror URL",
    )


def _trouble(text: str) -> str:
    lines: Sequence[str] = [line for line in text.splitlines() if line.startswith(("E:", "W:"))]
    return "; ".join(line[3:] for line in lines[:3]) or text.strip()[-300:] or "no message"


# --- the index of packages ------------------------------------------------------------------------

FOLDER = "debs"

# The fields that a solver and dpkg need, in the order of archives. Others (translations, tags, fields added by apt) are
# omitted, so that equal packages have equal indexes.
_FIELDS = (
    "Package",
    "Source",
    "Version",
    "Architecture",
    "Essential",
    "Protected",
    "Important",
    "Multi-Arch",
    "Priority",
    "Section",
    "Maintainer",
    "Installed-Size",
    "Pre-Depends",
    "Depends",
    "Recommends",
    "Suggests",
    "Conflicts",
    "Breaks",
    "Replaces",
    "Provides",
    "Filename",
    "Size",
    "SHA256",
    "Description",
)
_FIELD = re.compile(r"^([A-Za-z0-9-]+):[ \t]*(.*(?:\n[ \t].*)*)", re.MULTILINE)

# A constant date: the bundle is verified by its digest, and its bytes must not depend on the day.
_DATE = "Thu, 01 Jan 1970 00:00:00 UTC"

Stanza = Mapping[str, str]


def parse_stanzas(text: str) -> list[Stanza]:
    """The packages of an index, or of the output of ``apt-cache show``, each a mapping of fields."""
    found = [dict(_FIELD.findall(block)) for block in re.split(r"\n\s*\n", text)]
    return [stanza for stanza in found if "Package" in stanza]


def parse_package(stanza: Stanza) -> Package:
    """The package of an index entry.

    Raises:
        ClusterctlError: the entry lacks a field, such as the digest.
    """
    try:
        return Package(
            name=stanza["Package"],
            version=stanza["Version"],
            architecture=stanza["Architecture"],
            file=f"{FOLDER}/{stanza['Filename'].rpartition('/')[2]}",
            size=int(stanza["Size"]),
            sha256=stanza["SHA256"].lower(),
        )
    except (KeyError, ValueError) as error:
        name = stanza.get("Package", "a package")
        raise ClusterctlError(f"the mirror's index entry of {name} is incomplete: {error} is missing") from error


def providers(found: Iterable[Stanza], names: Collection[str]) -> list[str]:
    """The packages that provide one of ``names``."""
    return sorted(
        stanza["Package"]
        for stanza in found
        if any(item.split()[0] in names for item in stanza.get("Provides", "").split(",") if item.strip())
    )


def packages_file(found: Iterable[tuple[Package, Stanza]]) -> bytes:
    """The ``Packages`` file of a folder with these packages, sorted by name."""
    blocks = []
    for each, stanza in sorted(found, key=lambda pair: pair[0].name):
        fields = {**stanza, "Filename": f"./{each.file}", "SHA256": each.sha256}
        fields["Description"] = fields.get("Description", fields.get("Description-en", "")).partition("\n")[0]
        blocks.append("".join(f"{name}: {fields[name]}\n" for name in _FIELDS if fields.get(name)))
    return "\n".join(blocks).encode()


def release_file(release: str, architecture: str, index: bytes) -> bytes:
    """The ``Release`` file of that folder, with which apt verifies ``Packages``."""
    return (
        "Origin: clusterctl\n"
        "Label: clusterctl\n"
        f"Suite: {release}-offline\n"
        f"Architectures: {architecture}\n"
        f"Date: {_DATE}\n"
        "SHA256:\n"
        f" {hashlib.sha256(index).hexdigest()} {len(index)} Packages\n"
    ).encode()
