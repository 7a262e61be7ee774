"""OS packages on a node: chooses bundles, divides them into parts, writes scripts and judges answers. Pure."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath

from provision.errors import BundleError, UsageError
from provision.model import Part
from provision.ospackages import bundle, families, releases
from provision.ospackages.bundle import OsBundle
from provision.render import render
from provision.script import whole

LOCK_SECONDS = 120  # seconds that apt waits for another process, such as unattended-upgrades; a stage has 300

INCOMING = PurePosixPath("/var/lib/clusterctl/os-packages")
FILE = "bundle"

RANGE = 16 << 20  # bytes of a part; an interrupted transfer continues with the next one
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Choice:
    """The packages for nodes of one release and architecture.

    Attributes:
        bundle: the bundle.
        packages: the packages to install from it.
    """

    bundle: OsBundle
    packages: tuple[str, ...]

    @property
    def name(self) -> str:
        """The release and architecture, in the terms of a node's own files."""
        manifest = self.bundle.manifest
        return f"{manifest.release}-{manifest.architecture}"

    @property
    def folder(self) -> PurePosixPath:
        """The folder on a node that receives the bundle; deleted after the installation."""
        return INCOMING / self.bundle.sha256[:12]

    @property
    def file(self) -> PurePosixPath:
        """The path of the bundle on a node."""
        return self.folder / "tree" / FILE


@dataclass(frozen=True)
class Packages:
    """The packages that a service needs before its plan runs.

    Attributes:
        choices: one for each release and architecture.
        replace: installed packages that may be removed if another one replaces them.
    """

    choices: tuple[Choice, ...]
    replace: tuple[str, ...] = ()


def choices(wanted: Mapping[str, Path], packages: Sequence[str]) -> tuple[Choice, ...]:
    """Open bundles and choose the packages for the nodes.

    Args:
        wanted: the bundles' files, by their label in the inventory (a release, or any text).
        packages: the packages to install; empty: all that were requested for a bundle.

    Raises:
        UsageError: a file cannot be read, is for another release, or lacks a package; or two are for one release.
        BundleError: a file is not a bundle, or is damaged.
    """
    found: dict[str, Choice] = {}
    for label, path in wanted.items():
        opened = _open_cached(path)
        manifest = opened.manifest
        families.find_family(manifest.family)
        if label != str(path) and releases.find(label).name != manifest.release:
            raise UsageError(f"{path} is for {manifest.release}, and the inventory names it for {label}")
        known = {each.name for each in manifest.packages}
        if missing := [name for name in packages if name not in known]:
            raise UsageError(
                f"{path} has no {', '.join(missing)}",
                hint=f"clusterctl pack-os --release {manifest.release} -o {path} {' '.join(packages)}",
            )
        choice = Choice(opened, tuple(packages) or manifest.requested)
        if choice.name in found:
            raise UsageError(
                f"{path} and {found[choice.name].bundle.path} are both for {choice.name}",
                hint="name one of them in the inventory: services: os_packages: bundle: FILE",
            )
        found[choice.name] = choice
    return tuple(found.values())


def index(chosen: Sequence[Choice]) -> bytes:
    """The input of ``facts``: a tar with every bundle's index, in a folder with the choice's name."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for choice in chosen:
            with tarfile.open(choice.bundle.path) as file:
                for member in choice.bundle.manifest.index:
                    data = file.extractfile(member.name)
                    assert data is not None
                    info = tarfile.TarInfo(f"{choice.name}/{member.name}")
                    info.size, info.mode = member.size, 0o644
                    archive.addfile(info, data)
    return out.getvalue()


def facts(chosen: Sequence[Choice]) -> str:
    """The read-only script for ``facts.read``; its input is ``index``."""
    return _functions(chosen) + render(f"{_templates(chosen)}/facts.sh.j2")


def opening(choice: Choice) -> str:
    """The script that creates, as root, the ssh user's folder for a bundle; prints ``ssh`` if there is a client."""
    return render("services/os_packages/open.sh.j2", folder=choice.folder, file=choice.file)


def parts(choice: Choice) -> tuple[Part, ...]:
    """The bundle in ranges, for the transfer."""
    name, size = choice.bundle.sha256[:12], choice.bundle.size
    return tuple(
        Part(
            f"{name}.{number}",
            "range",
            min(RANGE, size - offset),
            partial(_blocks, choice.bundle.path, offset, min(RANGE, size - offset)),
            path=FILE,
            offset=offset,
            mode=0o600,
        )
        for number, offset in enumerate(range(0, size, RANGE))
    )


def _blocks(path: Path, offset: int, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(offset)
        while size:
            block = file.read(min(size, _BLOCK))
            if not block:
                raise BundleError(f"{path} changed while it was sent")
            size -= len(block)
            yield block


def present(chosen: Sequence[Choice]) -> str:
    """The test whether a node has all packages."""
    return _functions(chosen) + 'os_choose && [ -z "$(os_missing)" ]\n'


def absent(chosen: Sequence[Choice]) -> str:
    """The script that prints the missing packages of a node."""
    return _functions(chosen) + 'os_choose && echo "not installed: $(os_missing)"\n'


def install(chosen: Sequence[Choice], replace: Sequence[str]) -> str:
    """The script that installs a received bundle; it needs the functions of ``services/library.sh.j2``.

    Args:
        chosen: the bundles.
        replace: packages that may be removed because others replace them.
    """
    folder, functions = _templates(chosen), _functions(chosen)
    return functions + render(
        f"{folder}/install.sh.j2",
        replace=tuple(replace),
        incoming=INCOMING,
        lock_seconds=LOCK_SECONDS,
        undo=render(f"{folder}/undo.sh.j2", lock_seconds=LOCK_SECONDS),
        transaction=render(f"{folder}/transaction.sh.j2", functions=functions),
    )


def _templates(chosen: Sequence[Choice]) -> str:
    # Several families would need a choice on the node; there is only one.
    return families.find_family(chosen[0].bundle.manifest.family).templates


def _functions(chosen: Sequence[Choice]) -> str:
    bundles = [
        {"name": each.name, "packages": each.packages, "sha256": each.bundle.sha256, "file": each.file}
        for each in chosen
    ]
    return render(
        f"{_templates(chosen)}/functions.sh.j2",
        bundles=bundles,
        names=", ".join(each.name for each in chosen),
        lock_seconds=LOCK_SECONDS,
    )


def _open_cached(path: Path) -> OsBundle:
    try:
        status = path.stat()
    except OSError:
        return bundle.open_bundle(path)  # raises the error
    return _cached(path, status.st_size, status.st_mtime_ns)


@lru_cache
def _cached(path: Path, _size: int, _mtime: int) -> OsBundle:
    """The bundle, which a command reads only once."""
    return bundle.open_bundle(path)


_ROOM = 4  # bytes on the disk per byte of a bundle: the file, its copy, its packages, and their installed files


@dataclass(frozen=True)
class Facts:
    """A node's answer.

    Attributes:
        refused: why no bundle fits it; empty if one does.
        lacks: wanted packages that are not installed.
        broken: packages that dpkg has not finished.
        errors: apt's messages if it cannot resolve the packages.
        changes: names by the kind of change (``new``, ``upgrade``, ``downgrade``, ``remove``).
        holder: the process that uses dpkg now: its id and name.
        free: free bytes on the disks of the installation; None if unknown.
        name: release and architecture; empty if nothing is missing.
    """

    refused: str = ""
    lacks: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    changes: Mapping[str, tuple[str, ...]] | None = None
    holder: str = ""
    free: int | None = None
    name: str = ""


def read(out: str) -> Facts:
    """Parse the output of ``facts``."""
    lines: dict[str, list[str]] = {}
    for line in out.splitlines():
        word, _, rest = line.partition(" ")
        lines.setdefault(word, []).append(rest.strip())

    def names(word: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(rest.split()[0] for rest in lines.get(word, ()) if rest))

    free = [whole(rest) for rest in lines.get("free", ()) if re.fullmatch("[0-9]{1,18}", rest)]
    return Facts(
        refused=" ".join(lines.get("refused", ())),
        lacks=tuple(" ".join(lines.get("lacks", ())).split()),
        broken=names("broken"),
        errors=tuple(lines.get("unmet", ()) or lines.get("error", ())),
        changes={kind: names(kind) for kind in ("new", "upgrade", "downgrade", "remove")},
        holder=" ".join(lines.get("holder", ())),
        free=min(free, default=None),
        name=" ".join(lines.get("name", ())),
    )


def judge(found: Facts, chosen: Sequence[Choice], replace: Sequence[str]) -> str:
    """Why a node cannot install its packages, with the fix; empty if it can."""
    if found.refused:
        return found.refused
    if not found.lacks:
        return ""
    if found.broken:
        return f"dpkg was interrupted: {', '.join(found.broken)} half installed; run there: dpkg --configure -a"
    if found.errors:
        return (
            f"apt cannot install {', '.join(found.lacks)}: {'; '.join(found.errors)}; if the node is newer "
            "than the bundle, pack it again"
        )
    changes = found.changes or {}
    removed = [name for name in changes.get("remove", ()) if name not in replace]
    if removed:
        return (
            f"installing {', '.join(found.lacks)} would remove {', '.join(removed)}; to allow it, write "
            f"`replace: [{', '.join(removed)}]` below os_packages in the inventory"
        )
    if lower := changes.get("downgrade", ()):
        return f"installing {', '.join(found.lacks)} would downgrade {', '.join(lower)}; pack the bundle again"
    size = next((choice.bundle.size for choice in chosen if choice.name == found.name), 0)
    if found.free is not None and found.free < _ROOM * size:
        return f"{found.free / 1e6:.0f} MB free, {_ROOM * size / 1e6:.0f} MB are needed; free some space in /var"
    return ""
