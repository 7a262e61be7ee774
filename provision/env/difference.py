"""Compare two bundles: how they differ, and what a deploy of the newer one sends to a node with the older."""

from __future__ import annotations

import csv
import hashlib
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple

from provision.env.bundle.manifest import PACKAGE_FILE, Entry, Manifest, Package
from provision.env.bundle.reader import Bundle
from provision.env.overview import architecture_order, is_data
from provision.env.relocation import relocate
from provision.env.source.environment import normalized, record_path, source_of
from provision.env.source.files import parents
from provision.env.text import columns, line, number, size, some
from trainer.agent.contract.untrusted import parse_object

Sign = Literal["+", "-", "~"]

_HISTORY = "conda-meta/history"
_COMMON_PREFIX = PurePosixPath("/p")  # both are relocated to it if they were packed at different prefixes

FEW = 20  # packages or folders that are named before --json is needed

_INFO = re.compile(r"(?P<folder>.*/(?P<name>[^/]+)-[^-/]+\.(?:dist-info|egg-info))/[^/]+\Z", re.DOTALL)


class Change(NamedTuple):
    """A path that was added (``+``), removed (``-``) or changed (``~``), and its package or folder."""

    sign: Sign
    path: str
    owner: str


class Version(NamedTuple):
    """Versions of a package or fact in both bundles; empty if missing."""

    name: str
    old: str
    new: str


class Sending(NamedTuple):
    """Chunks to send: their number, and their bytes compressed and uncompressed."""

    chunks: int
    compressed: int
    plain: int


@dataclass(frozen=True)
class Difference:
    """How ``new`` differs from ``old``.

    Attributes:
        old: the older bundle's manifest.
        new: the newer one's.
        packages: added (no ``old``), removed (no ``new``) and changed ones.
        facts: platform, Python, glibc, CUDA and so on, if they differ.
        changes: paths whose content, type or mode differs, sorted.
        recompiled: .pyc files that differ while their .py file does not.
        times: paths with only a different mtime.
        sending: chunks of ``new`` that are not in ``old``.
        always: the files that contain the prefix, which are sent for every new release.
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
        """Whether only times differ, and files that contain times, such as conda's history."""
        return not (self.packages or self.facts or [change for change in self.changes if change.path != _HISTORY])

    def counts(self) -> dict[str, dict[Sign, int]]:
        """The number of added, removed and changed paths in each package or folder."""
        counted: defaultdict[str, Counter[Sign]] = defaultdict(Counter)
        for change in self.changes:
            counted[change.owner][change.sign] += 1
        return {name: dict(counted[name]) for name in sorted(counted)}

    @property
    def touched(self) -> tuple[str, ...]:
        """Packages with the same version and different files."""
        versions = {version.name for version in self.packages}
        names = {package.name for package in self.new.packages}
        return tuple(name for name in self.counts() if name in names and name not in versions)

    @property
    def unowned(self) -> tuple[str, ...]:
        """Folders with different files that belong to no package."""
        return tuple(name for name in self.counts() if name.endswith("/") and not is_data(name))

    @property
    def data(self) -> tuple[str, ...]:
        """Data that differ."""
        return tuple(name for name in self.counts() if is_data(name))


def compare(old: Bundle, new: Bundle) -> Difference:
    """Compare two bundles.

    Raises:
        BundleError: the files that contain the prefix are damaged in one of them.
    """
    before, after = _Side.of(old, new), _Side.of(new, old)
    keys = {chunk.key for chunk in old.manifest.chunks}
    missing = [chunk for chunk in new.manifest.chunks if chunk.key not in keys]
    differing = [path for path in before.entries.keys() & after.entries.keys() if _differs(path, before, after)]
    recompiled = {path for path in differing if _is_recompiled(path, before, after)}
    changes: list[Change] = [Change("-", path, before.owner(path)) for path in before.listed - after.entries.keys()]
    changes += [Change("+", path, after.owner(path)) for path in after.listed - before.entries.keys()]
    changes += [Change("~", path, after.owner(path)) for path in differing if path not in recompiled]
    times = sum(
        before.entries[path].mtime != after.entries[path].mtime
        for path in before.entries.keys() & after.entries.keys() - set(differing)
    )
    prefix_files = new.manifest.prefix_files
    return Difference(
        old=old.manifest,
        new=new.manifest,
        packages=tuple(package_changes(old.manifest, new.manifest)),
        facts=tuple(fact_changes(old.manifest, new.manifest)),
        changes=tuple(sorted(changes, key=lambda change: change.path)),
        recompiled=len(recompiled),
        times=times,
        sending=Sending(len(missing), sum(c.compressed for c in missing), sum(c.size for c in missing)),
        always=Sending(1, prefix_files.compressed, prefix_files.size),
    )


@dataclass(frozen=True)
class _Side:
    """One of the bundles: entries, contents and packages by path."""

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
            moved = relocate(manifest, prefix_files, _COMMON_PREFIX)
            contents |= {entry.path: entry.target or hashlib.sha256(data).hexdigest() for entry, data in moved.files}
        return cls(
            manifest,
            {entry.path: entry for entry in manifest.files},
            contents,
            find_owners(prefix_files, manifest.source_prefix),
        )

    @property
    def listed(self) -> set[str]:
        """All paths except non-empty folders, which are added and removed with their contents."""
        above = {folder for path in self.entries for folder in parents(path)}
        return self.entries.keys() - above

    def owner(self, path: str) -> str:
        entry = self.entries[path]
        if entry.chunks and entry.type in ("file", "link"):
            return self.manifest.chunks[entry.chunks[0]].package
        return owner(path, self.known)


def _differs(path: str, before: _Side, after: _Side) -> bool:
    old, new = before.entries[path], after.entries[path]
    return (old.type, old.mode, before.contents[path]) != (new.type, new.mode, after.contents[path])


def _is_recompiled(path: str, before: _Side, after: _Side) -> bool:
    """Whether a .pyc file differs while its .py file is the same: it contains the .py file's mtime."""
    source = source_of(path)
    known = path.endswith(".pyc") and source in before.entries and source in after.entries
    return known and not _differs(source, before, after)


def package_changes(old: Manifest, new: Manifest) -> Iterator[Version]:
    """Packages with other versions."""
    before, after = _versions(old.packages), _versions(new.packages)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name):
            continue
        kinds = {kind for side in (before, after) for kind, _ in side.get(name, ())}
        texts = [_join_versions(side.get(name, ()), kinds) for side in (before, after)]
        yield Version(name, *texts)


def _versions(packages: tuple[Package, ...]) -> dict[str, tuple[tuple[str, str], ...]]:
    """Kinds and versions of each package; conda and pip may have installed one each."""
    found: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for package in packages:
        found[package.name].append((package.kind, package.version))
    return {name: tuple(sorted(kinds)) for name, kinds in found.items()}


def _join_versions(versions: tuple[tuple[str, str], ...], kinds: set[str]) -> str:
    return " and ".join(version if len(kinds) == 1 else f"{version} ({kind})" for kind, version in versions)


def fact_changes(old: Manifest, new: Manifest) -> Iterator[Version]:
    """Platform, Python, glibc and other facts that differ."""
    for name in ("platform", "python", "glibc"):
        before, after = getattr(old, name) or "", getattr(new, name) or ""
        if before != after:
            yield Version(name, before, after)
    packages = {package.name for manifest in (old, new) for package in manifest.packages}
    for name in sorted({*old.versions, *new.versions} - packages):  # packages are listed with their versions
        before, after = old.versions.get(name) or "", new.versions.get(name) or ""
        if before != after:
            yield Version(name, before, after)
    cards = [" ".join(sorted(side.gpu_architectures or (), key=architecture_order)) for side in (old, new)]
    if cards[0] != cards[1]:
        yield Version("GPU architectures", *cards)


def difference_data(difference: Difference) -> dict[str, Any]:
    """The difference for ``--json``. Sizes in bytes."""
    added, removed, changed = _sort_packages(difference)
    counts = difference.counts()
    return {
        "old": _side_data(difference, "old"),
        "new": _side_data(difference, "new"),
        "identical": difference.identical,
        "same_content": difference.same_content,
        "packages": {
            "added": {version.name: version.new for version in added},
            "removed": {version.name: version.old for version in removed},
            "changed": {version.name: [version.old, version.new] for version in changed},
            "same_version_other_content": list(difference.touched),
        },
        "facts": {version.name: [version.old or None, version.new or None] for version in difference.facts},
        "unowned": list(difference.unowned),
        "data": list(difference.data),
        "counts": counts,
        "files": [change._asdict() for change in difference.changes],
        "recompiled": difference.recompiled,
        "other_times": difference.times,
        "sends": _sending_data(difference.sending),
        "sends_always": _sending_data(difference.always),
    }


def difference_text(difference: Difference, *, files: bool = False) -> str:
    """The text for users; ``files`` lists every path that differs."""
    old, new = difference.old, difference.new
    title = f"{old.name} {old.release_id} -> {new.name} {new.release_id}"
    if difference.identical:
        return f"{title}\nthe same release: a deploy sends nothing"
    added, removed, changed = _sort_packages(difference)
    counts = difference.counts()
    lines = [title]
    if difference.same_content:
        lines.append("same content, different times")
    lines += line("added", *_table([(version.name, version.new) for version in added]))
    lines += line("removed", *_table([(version.name, version.old) for version in removed]))
    lines += line("changed", *_table([(version.name, f"{version.old} -> {version.new}") for version in changed]))
    lines += line(
        "facts", *_table([(fact.name, f"{fact.old or 'none'} -> {fact.new or 'none'}") for fact in difference.facts])
    )
    lines += line("same version", *_table([(name, _count_text(counts[name])) for name in difference.touched]))
    lines += line("no package", *_table([(name, _count_text(counts[name])) for name in difference.unowned]))
    lines += line("data", *_table([(name, _count_text(counts[name])) for name in difference.data]))
    lines += line("only times", *_times(difference))
    lines += line("deploy sends", *_sending_lines(difference))
    if files and difference.changes:
        lines += ["", *(f"{change.sign} {change.path}" for change in difference.changes)]
    return "\n".join(lines)


def _sort_packages(difference: Difference) -> tuple[list[Version], list[Version], list[Version]]:
    """Added, removed, and changed packages."""
    packages = difference.packages
    added = [version for version in packages if not version.old]
    removed = [version for version in packages if not version.new]
    return added, removed, [version for version in packages if version.old and version.new]


def _table(rows: list[tuple[str, str]]) -> list[str]:
    return some(columns(rows), FEW, "--json") if rows else []


def _count_text(count: dict[Any, int]) -> str:
    words = {"+": "added", "-": "removed", "~": "changed"}
    parts = [f"{count[sign]:,} {words[sign]}" for sign in words if sign in count]
    return f"files: {', '.join(parts)}"


def _times(difference: Difference) -> list[str]:
    found = []
    if difference.times:
        found.append(f"of {number(difference.times, 'file')}")
    if difference.recompiled:
        found.append(f"{number(difference.recompiled, 'file')} compiled again from the same source")
    return found


def _sending_lines(difference: Difference) -> list[str]:
    sending, always = difference.sending, difference.always
    chunks = f"{sending.chunks} of {number(len(difference.new.chunks), 'chunk')}"
    return [
        f"{chunks} to a node that has {difference.old.release_id}",
        f"{size(sending.compressed)} compressed, {size(sending.plain)} plain",
        f"and the files that contain the prefix: {size(always.compressed)}, {size(always.plain)} plain",
    ]


def _side_data(difference: Difference, which: str) -> dict[str, str]:
    manifest = difference.old if which == "old" else difference.new
    return {"name": manifest.name, "release": manifest.release_id, "digest": manifest.digest}


def _sending_data(sending: Sending) -> dict[str, int]:
    return {"chunks": sending.chunks, "compressed_bytes": sending.compressed, "bytes": sending.plain}


def find_owners(prefix_files: Mapping[str, bytes], source_prefix: str) -> dict[str, str]:
    """The package of each path in RECORD files and ``conda-meta``, which are prefix files themselves."""
    found: dict[str, str] = {}
    for path in sorted(prefix_files, key=lambda path: not path.startswith("conda-meta/")):  # conda has priority
        if path.startswith("conda-meta/"):
            listed = _conda_owners(path, prefix_files[path])
        elif path.endswith(".dist-info/RECORD") and (match := _INFO.match(path)):
            listed = dict.fromkeys(_record_paths(path, prefix_files[path], source_prefix), normalized(match["name"]))
        else:
            continue
        for one, name in listed.items():
            found.setdefault(one, name)
    return found


def owner(path: str, known: Mapping[str, str]) -> str:
    """The package of a file that contains the prefix, else its folder, ending in a slash."""
    if name := known.get(path):
        return name
    match = _INFO.match(path)
    return normalized(match["name"]) if match else posixpath.dirname(path) + "/"


def _conda_owners(path: str, data: bytes) -> dict[str, str]:
    try:
        package = parse_object(data, limit=PACKAGE_FILE)
        return dict.fromkeys([path, *map(str, package["files"])], str(package["name"]))
    except (ValueError, KeyError, TypeError):
        return {}  # the history, or not a package's file


def _record_paths(path: str, data: bytes, source_prefix: str) -> list[str]:
    site = posixpath.dirname(posixpath.dirname(path))
    try:
        rows = list(csv.reader(data.decode("utf-8", "surrogateescape").splitlines()))
    except csv.Error:
        return [path]
    return [path, *(record_path(row[0], site, source_prefix) for row in rows if row)]
