"""Derive the rewritten files of a release from those of another release on the node.

Two releases in one root have paths of equal length, and their rewritten files differ only in the release's name and in
the hashes of rewritten files in RECORD and conda-meta. A node derives nearly all of them by replacing words of equal
length in a tar stream of the older files. Each derived file's digest is checked; files that differ are sent.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from provision.env.bundle.manifest import Entry, Manifest
from provision.env.relocation.relocate import Relocated, relocate

_DIGEST = re.compile(rb"(?<![\w-])(?:[\w-]{43}|[0-9a-f]{64})(?![\w-])")


@dataclass(frozen=True)
class Recipe:
    """How to derive files of a new release.

    Attributes:
        words: pairs of words of equal length: in the old files, and in the new ones.
        entries: the files that can be derived.
    """

    words: tuple[tuple[bytes, bytes], ...] = ()
    entries: tuple[Entry, ...] = ()

    @property
    def script(self) -> bytes:
        """The words as a script for sed; they have no special characters."""
        return b"".join(b"s/%b/%b/g\n" % pair for pair in self.words)


def recipe(manifest: Manifest, prefix_files: Mapping[str, bytes], relocated: Relocated, old: PurePosixPath) -> Recipe:
    """Which files of ``relocated`` can be derived from those of the release at ``old``."""
    before = {entry.path: (entry, data) for entry, data in relocate(manifest, prefix_files, old).files}
    new, was = relocated.prefix.name, old.name
    if len(new) != len(was) or relocated.prefix.parent != old.parent:
        return Recipe()
    words = {was.encode(): new.encode()}
    listed = _listed(before[path][1] for path in manifest.records if path in before)
    candidates = [(entry, data, before[entry.path]) for entry, data in relocated.files if entry.type == "file"]
    for entry, _, (old_entry, _) in candidates:
        if entry.sha256 != old_entry.sha256:
            hashes = _hashes(old_entry.sha256, entry.sha256)
            words |= {past: now for past, now in hashes if past in listed}
    pairs = tuple(words.items())
    entries = tuple(
        entry
        for entry, data, (old_entry, old_data) in candidates
        if entry.sha256 != old_entry.sha256 and _replaced(old_data, pairs) == data
    )
    return Recipe(pairs, entries)


def _listed(records: Iterable[bytes]) -> set[bytes]:
    """All words in RECORD and conda-meta files that may be digests."""
    return {word for data in records for word in _DIGEST.findall(data)}


def _hashes(old: str, new: str) -> Iterator[tuple[bytes, bytes]]:
    """A digest in RECORD's form (URL-safe base64 without padding, PEP 376) and in conda-meta's."""
    yield _record_hash(old), _record_hash(new)
    yield old.encode(), new.encode()


def _record_hash(digest: str) -> bytes:
    return base64.urlsafe_b64encode(bytes.fromhex(digest)).rstrip(b"=")


def _replaced(data: bytes, pairs: tuple[tuple[bytes, bytes], ...]) -> bytes:
    for old, new in pairs:
        data = data.replace(old, new)
    return data
