"""How two bundles differ, and what a deploy of the newer one would send to a node that has the older."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

from provision.env.bundle.manifest import Entry, Manifest, Package
from provision.env.bundle.reader import Bundle
from provision.env.relocation.relocate import relocate
from provision.env.report.gpus import order
from provision.env.report.overview import is_data
from provision.env.report.ownership import owner, owners
from provision.env.source.owners import source_of

Sign = Literal["+", "-", "~"]

_DIARY = "conda-meta/history"
_SAME_PLACE = PurePosixPath("/p")  # where both are put to be compared, if they were packed at different prefixes


class Change(NamedTuple):
    """A path that was added (``+``), removed (``-``) or changed (``~``), and the package or folder it belongs to."""

    sign: Sign
    path: str
    owner: str


class Version(NamedTuple):
    """A package, or something else that has a version; empty where there is none."""

    name: str
    old: str
    new: str


class Sending(NamedTuple):
    """What goes to a node: how many chunks, and their bytes compressed and plain."""

    chunks: int
    compressed: int
    plain: int


@dataclass(frozen=True)
class Difference:
    """What is other in ``new``.

    Attributes:
        old: the older bundle's manifest.
        new: the newer one's.
        packages: added (no ``old``), removed (no ``new``) and changed ones.
        facts: platform, Python, glibc, CUDA and so on, where they differ.
        changes: paths whose content, type or mode differs, sorted.
        recompiled: compiled files that differ while their source does not.
        times: paths of which only the time differs.
        sending: chunks of ``new`` that no chunk of ``old`` equals.
        always: what is sent for every new release: the files that hold the prefix.
    """

    old: Manifest
    new: Manifest
    packages: tuple[Version, ...]
    facts: tuple[Version, ...]
    changes: tuple[Change, ...]
    recompiled: int
    times: int
    sending: Sending
    always: Sending

    @property
    def identical(self) -> bool:
        """Whether both are the same release."""
        return self.old.digest == self.new.digest

    @property
    def same_content(self) -> bool:
        """Whether nothing but times, and what follows from them, differs; conda's diary is full of times."""
        return not (self.packages or self.facts or [change for change in self.changes if change.path != _DIARY])

    def counts(self) -> dict[str, dict[Sign, int]]:
        """How many paths of each package or folder were added, removed and changed."""
        counted: defaultdict[str, Counter[Sign]] = defaultdict(Counter)
        for change in self.changes:
            counted[change.owner][change.sign] += 1
        return {name: dict(counted[name]) for name in sorted(counted)}

    @property
    def touched(self) -> tuple[str, ...]:
        """Packages that have the same version and other files."""
        versions = {version.name for version in self.packages}
        names = {package.name for package in self.new.packages}
        return tuple(name for name in self.counts() if name in names and name not in versions)

    @property
    def unowned(self) -> tuple[str, ...]:
        """Folders of files that differ and that no package owns."""
        return tuple(name for name in self.counts() if name.endswith("/") and not is_data(name))

    @property
    def data(self) -> tuple[str, ...]:
        """Data that travel with one of them and differ."""
        return tuple(name for name in self.counts() if is_data(name))


def compare(old: Bundle, new: Bundle) -> Difference:
    """Compare two bundles.

    Raises:
        BundleError: the files that hold the prefix are damaged in one of them.
    """
    before, after = _Side.of(old, new), _Side.of(new, old)
    keys = {chunk.key for chunk in old.manifest.chunks}
    missing = [chunk for chunk in new.manifest.chunks if chunk.key not in keys]
    differing = [path for path in before.entries.keys() & after.entries.keys() if _differs(path, before, after)]
    recompiled = {path for path in differing if _is_recompiled(path, before, after)}
    changes: list[Change] = [Change("-", path, before.owner(path)) for path in before.told - after.entries.keys()]
    changes += [Change("+", path, after.owner(path)) for path in after.told - before.entries.keys()]
    changes += [Change("~", path, after.owner(path)) for path in differing if path not in recompiled]
    times = sum(
        before.entries[path].mtime != after.entries[path].mtime
        for path in before.entries.keys() & after.entries.keys() - set(differing)
    )
    prefix_files = new.manifest.prefix_files
    return Difference(
        old=old.manifest,
        new=new.manifest,
        packages=tuple(_packages(old.manifest, new.manifest)),
        facts=tuple(_facts(old.manifest, new.manifest)),
        changes=tuple(sorted(changes, key=lambda change: change.path)),
        recompiled=len(recompiled),
        times=times,
        sending=Sending(len(missing), sum(c.compressed for c in missing), sum(c.size for c in missing)),
        always=Sending(1, prefix_files.compressed, prefix_files.size),
    )


@dataclass(frozen=True)
class _Side:
    """One of the two: its entries by path, what each content is, and whose it is."""

    manifest: Manifest
    entries: Mapping[str, Entry]
    contents: Mapping[str, str]
    known: Mapping[str, str]

    @classmethod
    def of(cls, bundle: Bundle, other: Bundle) -> _Side:
        manifest = bundle.manifest
        prefix_files = bundle.prefix_files()
        contents = {entry.path: entry.sha256 or entry.target for entry in manifest.files}
        if manifest.source_prefix != other.manifest.source_prefix:
            moved = relocate(manifest, prefix_files, _SAME_PLACE)
            contents |= {entry.path: entry.target or hashlib.sha256(data).hexdigest() for entry, data in moved.files}
        return cls(
            manifest,
            {entry.path: entry for entry in manifest.files},
            contents,
            owners(prefix_files, manifest.source_prefix),
        )

    @property
    def told(self) -> set[str]:
        """Every path but folders that something lies in: they come and go with it."""
        above = {folder for path in self.entries for folder in _above(path)}
        return self.entries.keys() - above

    def owner(self, path: str) -> str:
        entry = self.entries[path]
        if entry.chunks and entry.type in ("file", "link"):
            return self.manifest.chunks[entry.chunks[0]].package
        return owner(path, self.known)


def _above(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path


def _differs(path: str, before: _Side, after: _Side) -> bool:
    old, new = before.entries[path], after.entries[path]
    return (old.type, old.mode, before.contents[path]) != (new.type, new.mode, after.contents[path])


def _is_recompiled(path: str, before: _Side, after: _Side) -> bool:
    """Whether a compiled file differs while its source is the same: it holds the source's time."""
    source = source_of(path)
    known = path.endswith(".pyc") and source in before.entries and source in after.entries
    return known and not _differs(source, before, after)


def _packages(old: Manifest, new: Manifest) -> Iterator[Version]:
    before, after = _versions(old.packages), _versions(new.packages)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name):
            continue
        kinds = {kind for side in (before, after) for kind, _ in side.get(name, ())}
        texts = [_text(side.get(name, ()), kinds) for side in (before, after)]
        yield Version(name, *texts)


def _versions(packages: tuple[Package, ...]) -> dict[str, tuple[tuple[str, str], ...]]:
    """Kind and version of each package; there may be two of a name, conda's and pip's."""
    found: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for package in packages:
        found[package.name].append((package.kind, package.version))
    return {name: tuple(sorted(kinds)) for name, kinds in found.items()}


def _text(versions: tuple[tuple[str, str], ...], kinds: set[str]) -> str:
    return " and ".join(version if len(kinds) == 1 else f"{version} ({kind})" for kind, version in versions)


def _facts(old: Manifest, new: Manifest) -> Iterator[Version]:
    for name in ("platform", "python", "glibc"):
        before, after = getattr(old, name) or "", getattr(new, name) or ""
        if before != after:
            yield Version(name, before, after)
    packages = {package.name for manifest in (old, new) for package in manifest.packages}
    for name in sorted({*old.versions, *new.versions} - packages):  # those of packages are named with them
        before, after = old.versions.get(name) or "", new.versions.get(name) or ""
        if before != after:
            yield Version(name, before, after)
    cards = [" ".join(sorted(side.gpu_architectures or (), key=order)) for side in (old, new)]
    if cards[0] != cards[1]:
        yield Version("GPU architectures", *cards)
