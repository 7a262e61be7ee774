"""Parses apt's output: the packages of a simulation, the reason of a failure, and the index of packages. Pure.

It also writes the index of a bundle: deb822(5) describes ``Packages`` and ``Release``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from provision.errors import ClusterctlError, UsageError
from provision.ospackages.releases import Package, Wanted

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


def installed(simulation: str) -> list[tuple[str, str]]:
    """Name and version of every package that ``apt-get -s install`` would unpack."""
    return [(match["name"], match["version"]) for match in _INST.finditer(simulation)]


def unreachable(wanted: Wanted, text: str) -> UsageError:
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
    return _failed(wanted, text)


def unsolved(wanted: Wanted, text: str) -> UsageError:
    """Why ``apt-get install`` could not resolve the packages."""
    release = wanted.release.name
    if match := _VIRTUAL.search(text):
        return virtual(wanted, [match[1]], sorted(line.split()[0] for line in match[2].splitlines()))
    missing = [match[1] or match[2] for match in _MISSING.finditer(text)]
    if missing:
        names = ", ".join(dict.fromkeys(missing))
        return UsageError(f"{release} has no package {names}", hint="check the spelling: apt-cache search WORD")
    if match := _UNMET.search(text):
        conflicts = "; ".join(" ".join(line.split()) for line in match[1].splitlines())
        return UsageError(f"these packages of {release} conflict: {conflicts}", hint="pack them into separate bundles")
    return _failed(wanted, text)


def virtual(wanted: Wanted, names: Sequence[str], providers: Sequence[str]) -> UsageError:
    """The error for virtual packages, because a node cannot determine whether they are installed."""
    return UsageError(
        f"{', '.join(names)} is a virtual package of {wanted.release.name}, which other packages provide",
        hint=f"name one of {', '.join(providers)}" if providers else "name a package that provides it",
    )


def _failed(wanted: Wanted, text: str) -> UsageError:
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


def stanzas(text: str) -> list[Stanza]:
    """The packages of an index, or of the output of ``apt-cache show``, each a mapping of fields."""
    found = [dict(_FIELD.findall(block)) for block in re.split(r"\n\s*\n", text)]
    return [stanza for stanza in found if "Package" in stanza]


def package(stanza: Stanza) -> Package:
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
