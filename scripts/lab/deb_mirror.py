"""A mirror of made-up packages in the layout of Debian's and Ubuntu's, signed with a private key.

It needs dpkg-deb and gpg, takes about a second, and is read with ``file:`` addresses.
"""

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path


@dataclass(frozen=True)
class Deb:
    """A package. ``fields`` are further ones of its control file, ``scripts`` the files beside it."""

    name: str
    version: str = "1"
    fields: Mapping[str, str] = field(default_factory=dict)
    scripts: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    suite: str = ""  # such as "-security"; "": the release itself
    component: str = "main"

    @property
    def control(self) -> str:
        given = {
            "Package": self.name,
            "Version": self.version,
            "Architecture": "all",
            "Maintainer": "Nobody <nobody@example.invalid>",
            "Description": f"{self.name} of a mirror for tests",
            **self.fields,
        }
        return "".join(f"{key}: {value}\n" for key, value in given.items())


@dataclass(frozen=True)
class Mirror:
    folder: Path
    keyring: Path

    @property
    def uri(self) -> str:
        return f"file:{self.folder}"


def make(
    folder: Path,
    codename: str,
    debs: Sequence[Deb],
    *,
    suites: Sequence[str] = ("", "-updates", "-security"),
    components: Sequence[str] = ("main", "universe"),
) -> Mirror:
    """Write the mirror of one release into ``folder``."""
    places = [(deb, build(deb, folder / "pool")) for deb in debs]
    with tempfile.TemporaryDirectory(prefix="cc-gpg-") as home:  # short: gpg's agent has a socket in it
        gpg = ["gpg", "--homedir", home, "--batch", "--quiet", "--pinentry-mode", "loopback", "--passphrase", ""]
        try:
            _run(*gpg, "--quick-gen-key", "mirror@example.invalid", "ed25519", "sign", "never")
            for suffix in suites:
                mine = [(deb, path) for deb, path in places if deb.suite == suffix]
                release = _suite(folder, codename + suffix, mine, components)
                _run(*gpg, "--clearsign", "--output", str(release.with_name("InRelease")), str(release))
            keyring = folder / "keyring.gpg"
            _run(*gpg, "--output", str(keyring), "--export")
        finally:
            _run("gpgconf", "--homedir", home, "--kill", "gpg-agent")
    return Mirror(folder, keyring)


def build(deb: Deb, folder: Path) -> Path:
    """One package as a file."""
    folder.mkdir(parents=True, exist_ok=True)
    tree = Path(tempfile.mkdtemp(dir=folder))
    try:
        tree.chmod(0o755)
        (tree / "DEBIAN").mkdir(mode=0o755)
        (tree / "DEBIAN/control").write_text(deb.control)
        doc = tree / "usr/share/doc" / deb.name
        doc.mkdir(parents=True)
        (doc / "README").write_text(deb.version)
        for name, text in deb.files.items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(text)
        for name, text in deb.scripts.items():
            script = tree / "DEBIAN" / name
            script.write_text(text)
            script.chmod(0o755)
        path = folder / f"{deb.name}_{deb.version.replace(':', '')}_all.deb"
        _run("dpkg-deb", "--root-owner-group", "-Zgzip", "--build", str(tree), str(path))
    finally:
        shutil.rmtree(tree)
    return path


def _suite(folder: Path, suite: str, debs: Sequence[tuple[Deb, Path]], components: Sequence[str]) -> Path:
    dists = folder / "dists" / suite
    sums = []
    for component in components:
        path = dists / component / "binary-amd64" / "Packages"
        path.parent.mkdir(parents=True)
        path.write_text("\n".join(_stanza(folder, deb, at) for deb, at in debs if deb.component == component))
        data = path.read_bytes()
        sums.append(f" {hashlib.sha256(data).hexdigest()} {len(data)} {path.relative_to(dists)}\n")
    date = datetime.now(timezone.utc).strftime("%a, %d %b %Y %H:%M:%S UTC")
    fields = (
        f"Suite: {suite}\nCodename: {suite}\nDate: {date}\nArchitectures: amd64\nComponents: {' '.join(components)}\n"
    )
    release = dists / "Release"
    release.write_text(fields + "SHA256:\n" + "".join(sums))
    return release


def _stanza(folder: Path, deb: Deb, path: Path) -> str:
    data = path.read_bytes()
    name = path.relative_to(folder)
    return f"{deb.control}Filename: {name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n"


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True)
