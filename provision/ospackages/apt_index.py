"""The index of a folder of packages, as apt reads it: what deb822(5) says of ``Packages`` and ``Release``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping

from provision.errors import ClusterctlError
from provision.ospackages.collection import Package

FOLDER = "debs"

# What a solver and dpkg need of a package, in the order in which archives write it. Everything else (translations,
# tags, what a version of apt adds) is left out, so that equal packages give an equal index.
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

# A date that nothing is older than: the folder is trusted by its digest, and its bytes must not depend on the day.
_DATE = "Thu, 01 Jan 1970 00:00:00 UTC"

Stanza = Mapping[str, str]


def stanzas(text: str) -> list[Stanza]:
    """The packages of an index, or of what ``apt-cache show`` prints, each a mapping of fields."""
    found = [dict(_FIELD.findall(block)) for block in re.split(r"\n\s*\n", text)]
    return [stanza for stanza in found if "Package" in stanza]


def package(stanza: Stanza) -> Package:
    """What a stanza says of its package.

    Raises:
        ClusterctlError: it lacks what proves the package.
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
        raise ClusterctlError(f"the mirror's index does not describe {name} whole: {error} is missing") from error


def providers(found: Iterable[Stanza], names: Collection[str]) -> list[str]:
    """The packages that provide one of ``names``."""
    return sorted(
        stanza["Package"]
        for stanza in found
        if any(item.split()[0] in names for item in stanza.get("Provides", "").split(",") if item.strip())
    )


def packages_file(found: Iterable[tuple[Package, Stanza]]) -> bytes:
    """The ``Packages`` of a folder that holds these packages, sorted by name."""
    blocks = []
    for each, stanza in sorted(found, key=lambda pair: pair[0].name):
        fields = {**stanza, "Filename": f"./{each.file}", "SHA256": each.sha256}
        fields["Description"] = fields.get("Description", fields.get("Description-en", "")).partition("\n")[0]
        blocks.append("".join(f"{name}: {fields[name]}\n" for name in _FIELDS if fields.get(name)))
    return "\n".join(blocks).encode()


def release_file(release: str, architecture: str, index: bytes) -> bytes:
    """The ``Release`` of that folder, by which apt knows that ``Packages`` is whole."""
    return (
        "Origin: clusterctl\n"
        "Label: clusterctl\n"
        f"Suite: {release}-offline\n"
        f"Architectures: {architecture}\n"
        f"Date: {_DATE}\n"
        "SHA256:\n"
        f" {hashlib.sha256(index).hexdigest()} {len(index)} Packages\n"
    ).encode()
