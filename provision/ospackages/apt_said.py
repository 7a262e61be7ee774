"""What apt printed, read back: a simulation's packages, and why it failed in words of ours. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from provision.errors import UsageError
from provision.ospackages.collection import Wanted

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
    """Why ``apt-get update`` failed: which mirror, and whether it is away, lacks the release, or is not proven."""
    if match := _UNSIGNED.search(text) or _BADLY_SIGNED.search(text):
        why = " ".join(match["why"].split()) if "why" in match.groupdict() else "it has no signature"
        return UsageError(
            f"the mirror {match['uri']} is not signed by a key of {wanted.mirrors.keyring}: {why}",
            hint="--keyring FILE with the keys of who signs it, or another --mirror URL",
        )
    if match := _ABSENT.search(text):
        option = "--security-mirror" if match[2].endswith("-security") else "--mirror"
        return UsageError(
            f"the mirror {match[1]} has no {match[2]}",
            hint=f"{option} URL with one that has {wanted.release.name}"
            + (", or none to do without" if option == "--security-mirror" else ""),
        )
    return _failed(wanted, text)


def unsolved(wanted: Wanted, text: str) -> UsageError:
    """Why ``apt-get install`` found no way."""
    release = wanted.release.name
    if match := _VIRTUAL.search(text):
        return virtual(wanted, [match[1]], sorted(line.split()[0] for line in match[2].splitlines()))
    missing = [match[1] or match[2] for match in _MISSING.finditer(text)]
    if missing:
        names = ", ".join(dict.fromkeys(missing))
        return UsageError(f"{release} has no package {names}", hint="check the spelling: apt-cache search WORD")
    if match := _UNMET.search(text):
        said = "; ".join(" ".join(line.split()) for line in match[1].splitlines())
        return UsageError(
            f"these packages of {release} do not go together: {said}", hint="pack them into bundles of their own"
        )
    return _failed(wanted, text)


def virtual(wanted: Wanted, names: Sequence[str], providers: Sequence[str]) -> UsageError:
    """Why names that apt knows cannot be asked for: whether a node has them is a question about another name."""
    return UsageError(
        f"{', '.join(names)} is no package of {wanted.release.name}, only something that others provide",
        hint=f"name one of {', '.join(providers)}" if providers else "name a package that provides it",
    )


def _failed(wanted: Wanted, text: str) -> UsageError:
    if match := _FETCH.search(text):
        return UsageError(
            f"the mirror {match[1]} failed: {' '.join(match[2].split())}",
            hint="check the network and apt's proxy (apt-config dump Acquire), or --mirror URL with another one",
        )
    return UsageError(
        f"apt could not collect packages of {wanted.release.name} from {wanted.mirrors.main}: {_trouble(text)}",
        hint="--mirror URL with another mirror",
    )


def _trouble(text: str) -> str:
    lines: Sequence[str] = [line for line in text.splitlines() if line.startswith(("E:", "W:"))]
    return "; ".join(line[3:] for line in lines[:3]) or text.strip()[-300:] or "it said nothing"
