"""Make the rewritten files of a release from those of another one, on the node.

Two releases of one root have paths of equal length, and what was rewritten for them differs in little: the release's
name, and the hashes of rewritten files in RECORD and conda-meta. So a node can make nearly all of them by replacing
words of equal length in a tar stream of the older ones, and need not be sent them. Whether a file came out right is
decided by its digest; one that did not is sent.
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
    """How to make files of a new release.

    Attributes:
        words: pairs of words of equal length: what stands in the old files, and what replaces it.
        entries: the files that come out right.
    """

    words: tuple[tuple[bytes, bytes], ...] = ()
    entries: tuple[Entry, ...] = ()

    @property
    def script(self) -> bytes:
        """The words as a script for sed; they hold nothing that means something to it."""
        return b"".join(b"s/%b/%b/g\n" % pair for pair in self.words)


def recipe(manifest: Manifest, prefix_files: Mapping[str, bytes], relocated: Relocated, old: PurePosixPath) -> Recipe:
    """What of ``relocated`` can be made from the same files at the path ``old``, if they are the same there."""
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
    """Every word in RECORD and conda-meta files that may be a digest."""
    return {word for data in records for word in _DIGEST.findall(data)}


def _hashes(old: str, new: str) -> Iterator[tuple[bytes, bytes]]:
    """A digest as RECORD has it (base64 for URLs without padding, PEP 376) and as conda-meta has it."""
    yield _record_hash(old), _record_hash(new)
    yield old.encode(), new.encode()


def _record_hash(digest: str) -> bytes:
    return base64.urlsafe_b64encode(bytes.fromhex(digest)).rstrip(b"=")


def _replaced(data: bytes, pairs: tuple[tuple[bytes, bytes], ...]) -> bytes:
    for old, new in pairs:
        data = data.replace(old, new)
    return data
