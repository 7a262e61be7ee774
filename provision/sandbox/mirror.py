"""The Debian release of minimal nodes and the mirror of its packages, from this machine's apt."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from provision.sandbox.process import run

_DEFAULT_SUITE = "bookworm"
_DEFAULT_MIRROR = "http://deb.debian.org/debian"
_SCHEMES = ("http://", "https://", "file:")


@dataclass(frozen=True)
class Source:
    """An archive from which apt fetches binary packages."""

    uri: str
    suites: tuple[str, ...]


def suite(os_release: Path = Path("/etc/os-release")) -> str:
    """The Debian release of the nodes: this machine's, or bookworm if it does not run Debian."""
    try:
        text = os_release.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _DEFAULT_SUITE
    fields = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', text, re.MULTILINE))
    return fields.get("VERSION_CODENAME") or _DEFAULT_SUITE if fields.get("ID") == "debian" else _DEFAULT_SUITE


def mirror(wanted: str, folder: Path = Path("/etc/apt")) -> str:
    """The mirror of Debian's ``wanted`` suite: ``$CLUSTERCTL_DEBIAN_MIRROR``, apt's, or deb.debian.org."""
    override = os.environ.get("CLUSTERCTL_DEBIAN_MIRROR")
    if override:
        return override
    usable = (source.uri for source in sources(folder) if wanted in source.suites)
    return next((uri.rstrip("/") for uri in usable if uri.startswith(_SCHEMES)), _DEFAULT_MIRROR)


def proxy() -> Mapping[str, str]:
    """The environment variables with apt's proxy for debootstrap. Empty if apt has none or the environment sets one."""
    if not shutil.which("apt-config"):
        return {}
    found = re.findall(r"^(\w+)='(.*)'$", run("apt-config", "shell", *_PROXY_QUERY), re.MULTILINE)
    return {name: value for name, value in found if name not in os.environ and value != "DIRECT"}


_PROXY_QUERY = ("http_proxy", "Acquire::http::Proxy", "https_proxy", "Acquire::https::Proxy")


def parse_sources(name: str, text: str) -> list[Source]:
    """The binary sources in a file of ``sources.list.d``, in either format (see sources.list(5))."""
    return list(_deb822(text) if name.endswith(".sources") else _one_line(text))


def sources(folder: Path = Path("/etc/apt")) -> Iterator[Source]:
    """The archives of this machine's apt, in its order."""
    parts = folder / "sources.list.d"
    files = [folder / "sources.list", *sorted(parts.glob("*.list")), *sorted(parts.glob("*.sources"))]
    for path in files:
        if path.is_file():
            yield from parse_sources(path.name, path.read_text(encoding="utf-8", errors="replace"))


def _one_line(text: str) -> Iterator[Source]:
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[[^\]]*\]\s*)?(\S+)\s+(\S+)", line)
        if match:
            yield Source(match[1], (match[2],))


def _deb822(text: str) -> Iterator[Source]:
    without_comments = re.sub(r"^#.*\n?", "", text, flags=re.MULTILINE)
    for stanza in re.split(r"\n\s*\n", without_comments):
        pairs = re.findall(r"^([\w-]+):((?:.*\n?)(?:[ \t].*\n?)*)", stanza, re.MULTILINE)
        fields = {key.lower(): value.split() for key, value in pairs}
        if "deb" in fields.get("types", ()) and fields.get("enabled") != ["no"]:
            for uri in fields.get("uris", ()):
                yield Source(uri, tuple(fields.get("suites", ())))
