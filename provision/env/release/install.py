"""Install a release on a node: the files that it receives or derives from another release, and the steps. Pure.

A part is a chunk, a range of a large file, or the last files, which contain the new prefix. A part of a chunk has the
chunk's members, then files near them in path order that turned out not to need rewriting, and the list by which a later
deploy recognises and checks all of them. It does not contain the prefix: a node that has the part in any release links
it from there. The lists are for ``sha256sum -c``.

Two releases in one root have paths of equal length, and their rewritten files differ only in the release's name and in
the hashes of rewritten files in RECORD and conda-meta. A node derives nearly all of them by replacing texts of equal
length in a tar stream of the older files. Each derived file's digest is checked; files that differ are sent.

``conda activate NAME`` works on nodes with conda, mamba or micromamba. Conda looks for a name in ``~/.conda/envs`` (and
in its own ``envs`` folder, which may be another user's); mamba and micromamba look in theirs. A symlink there leads to
the inventory's prefix, which leads to the current release: the name stays right after every deploy and rollback. The
prefix is also listed in ``~/.conda/environments.txt``, like environments that conda creates. Source: conda 26.7,
``base/context.py`` (``envs_dirs``) and ``core/envs_manager.py``; mamba 2, ``libmamba/src/api/configuration.cpp``
(``envs_dirs_hook``).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import PurePosixPath

import zstandard

from provision.env.bundle import tar
from provision.env.bundle.manifest import Entry, Manifest, stream_order
from provision.env.bundle.parse import OWN_FOLDER
from provision.env.bundle.reader import Bundle
from provision.env.release.catalog import ReleasePaths
from provision.env.relocation import Relocated, relocate
from provision.env.source.files import FOLDER_MTIME
from provision.model import Inventory, Part, Step, Wire
from provision.render import quote, render, words

FILES = f"{OWN_FOLDER}/files"  # the folder of lists
STALE = f"{OWN_FOLDER}/stale"  # .pyc files whose .py file was rewritten: removed, and compiled again on the node
LINKS = f"{OWN_FOLDER}/links"
DESCRIPTION = f"{OWN_FOLDER}/release.json"
COMPLETE = f"{OWN_FOLDER}/complete"

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Payload:
    """Everything that a node receives for one release."""

    bundle: Bundle
    relocated: Relocated

    def parts(self, wire: Wire, derived: frozenset[str] = frozenset()) -> tuple[Part, ...]:
        """The parts in the order of unpacking; the last one completes the release.

        Args:
            wire: their encoding on the wire.
            derived: rewritten files that the node derives itself; see ``derive_recipe``.
        """
        found = [self._chunk_part(index, wire) for index in self._steady]
        found += [part for entry in self._manifest.files if entry.raw for part in self._ranges(entry, wire)]
        return (*found, self._last_part(wire, derived))

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The names of the lists of chunks and large files, which a node may have in another release."""
        large = (self._file_key(entry) for entry in self._manifest.files if entry.raw)
        return (*(self._chunk_key(index) for index in self._steady), *large)

    def chunks(self, keys: Collection[str]) -> frozenset[int]:
        """The numbers of the bundle's chunks in the parts with these keys."""
        tars = {index for index in self._steady if self._chunk_key(index) in keys}
        large = (entry for entry in self._manifest.files if entry.raw)
        ranges = {
            index
            for entry in large
            for number, index in enumerate(entry.chunks)
            if f"{self._file_key(entry)}.{number}" in keys
        }
        return frozenset(tars | ranges)

    def unpacked(self, keys: Iterable[str]) -> int:
        """Bytes of the unpacked parts with these keys, without what a file system adds."""
        return sum(self._sizes[key] for key in keys)

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        return {part.key: part.size for part in self.parts("plain")}

    @property
    def _manifest(self) -> Manifest:
        return self.bundle.manifest

    @cached_property
    def _split(self) -> _Split:
        return _divide(self._manifest, self.relocated)

    @property
    def _steady(self) -> Mapping[int, tuple[tuple[Entry, bytes], ...]]:
        return self._split.steady

    def _chunk_key(self, index: int) -> str:
        steady = self._steady[index]
        chunk = self._manifest.chunks[index]
        return contents_key((entry for entry, _ in steady), chunk.key) if steady else chunk.key

    def _chunk_part(self, index: int, wire: Wire) -> Part:
        chunk = self._manifest.chunks[index]
        steady = self._steady[index]
        key = self._chunk_key(index)
        listed = [entry for entry in self._manifest.members(index) if entry.path not in self.relocated.stale_pyc]
        extra = [*steady, *_own_file(f"{FILES}/{key}", checksum_lines([*listed, *(entry for entry, _ in steady)]))]
        end = _encode(b"".join(map(_member, extra)), wire)
        size = chunk.compressed if wire == "zstd" else chunk.size
        return Part(key, "tar", size + len(end), _then(self._read(index, wire), end))

    def _read(self, index: int, wire: Wire) -> Callable[[], Iterator[bytes]]:
        return partial(self.bundle.chunk_compressed if wire == "zstd" else self.bundle.chunk_blocks, index)

    def _file_key(self, entry: Entry) -> str:
        return contents_key([entry])

    def _ranges(self, entry: Entry, wire: Wire) -> Iterator[Part]:
        offset = 0
        group = self._file_key(entry)
        for number, index in enumerate(entry.chunks):
            chunk = self._manifest.chunks[index]
            yield Part(
                f"{group}.{number}",
                "range",
                chunk.compressed if wire == "zstd" else chunk.size,
                self._read(index, wire),
                path=entry.path,
                offset=offset,
                mode=entry.mode,
                mtime=entry.mtime,
                group=group,
            )
            offset += chunk.size

    def _last_part(self, wire: Wire, derived: frozenset[str]) -> Part:
        """The part with files that contain the prefix, symlinks, folders and hard links, and clusterctl's own files."""
        manifest = self._manifest
        large = [entry for entry in manifest.files if entry.raw]
        final = {entry.path: entry for entry in manifest.files}
        final |= {entry.path: entry for entry, _ in self.relocated.files}
        symlinks = [entry for entry in final.values() if entry.type == "link"]
        rewritten = self._split.rewritten
        changed = [entry for entry, _ in rewritten]
        description = {
            "name": manifest.name,
            "digest": manifest.digest,
            "prefix": str(self.relocated.prefix),
            "created": manifest.created,
            "versions": dict(manifest.versions),
        }
        # Hard links are listed as files: a file in no list counts as added later.
        others = [
            replace(final[entry.target], path=entry.path)
            for entry in manifest.files
            if entry.type == "hard" and entry.path not in self.relocated.stale_pyc
        ]
        own = {
            **({f"{FILES}/{contents_key(others)}": checksum_lines(others)} if others else {}),
            f"{FILES}/{contents_key(changed)}": checksum_lines(changed),
            **{f"{FILES}/{self._file_key(entry)}": checksum_lines([entry]) for entry in large},
            LINKS: link_lines(sorted(symlinks, key=lambda entry: entry.path)),
            STALE: b"".join(escape(path) + b"\n" for path in sorted(self.relocated.stale_pyc)),
            DESCRIPTION: json.dumps(description, sort_keys=True, indent=1).encode() + b"\n",
        }
        files = [(entry, data) for entry, data in rewritten if entry.path not in derived]
        members = [*files, *((entry, b"") for entry in symlinks), *((entry, b"") for entry in self._tail())]
        members += [member for path, data in own.items() for member in _own_file(path, data)]
        members += [(Entry(OWN_FOLDER, "dir", 0o755, FOLDER_MTIME), b""), *_own_file(COMPLETE, b"")]
        data = _encode(b"".join(map(_member, members)), wire)
        key = contents_key(changed, str(self.relocated.prefix), manifest.digest)
        return Part(key, "last", len(data), partial(_blocks, data))

    def _tail(self) -> tuple[Entry, ...]:
        """Hard links, and the folders that tar would not create automatically with their mode."""
        files = self._manifest.files
        parents = {entry.path.rpartition("/")[0] for entry in files if entry.path not in self.relocated.stale_pyc}
        hard = [entry for entry in files if entry.type == "hard"]
        folders = [e for e in files if e.type == "dir" and (e.mode != 0o755 or e.path not in parents)]
        return (*hard, *stream_order(folders))


@dataclass(frozen=True)
class _Split:
    """The relocated files: unchanged ones by chunk, and rewritten ones."""

    steady: Mapping[int, tuple[tuple[Entry, bytes], ...]] = field(default_factory=dict)
    rewritten: tuple[tuple[Entry, bytes], ...] = ()


def _divide(manifest: Manifest, relocated: Relocated) -> _Split:
    """Assign every unchanged relocated file to the tar chunk of the previous file in path order."""
    packed = {entry.path: entry.sha256 for entry in manifest.marked}
    chunked = [entry for entry in manifest.files if entry.type == "file" and entry.chunks and not entry.raw]
    paths = [entry.path for entry in chunked]
    steady: dict[int, list[tuple[Entry, bytes]]] = defaultdict(list)
    for entry in chunked:
        steady.setdefault(entry.chunks[0], [])
    rewritten = []
    for entry, data in relocated.files:
        if entry.type != "file":
            continue
        if entry.sha256 == packed[entry.path] and paths:
            steady[chunked[max(0, bisect_right(paths, entry.path) - 1)].chunks[0]].append((entry, data))
        else:
            rewritten.append((entry, data))
    # A chunk with only symlinks has no list; its links are in the last part.
    return _Split({index: tuple(steady[index]) for index in sorted(steady)}, tuple(rewritten))


def _own_file(path: str, data: bytes) -> list[tuple[Entry, bytes]]:
    return [(Entry(path, "file", 0o644, FOLDER_MTIME, len(data)), data)]


def _member(member: tuple[Entry, bytes]) -> bytes:
    entry, data = member
    return b"".join((tar.entry_header(entry), data, bytes(tar.padding(len(data)))))


def _encode(data: bytes, wire: Wire) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(data) if wire == "zstd" else data


def _then(blocks: Callable[[], Iterator[bytes]], end: bytes) -> Callable[[], Iterator[bytes]]:
    def both() -> Iterator[bytes]:
        yield from blocks()
        yield from _blocks(end)

    return both


def _blocks(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), _BLOCK):
        yield data[start : start + _BLOCK]


def checksum_lines(entries: Iterable[Entry]) -> bytes:
    """A line for every file among ``entries``, as ``sha256sum`` writes it."""
    return b"".join(_checksum_line(entry) for entry in entries if entry.type == "file")


def link_lines(entries: Iterable[Entry]) -> bytes:
    """Two lines for every symlink: its path and its target, escaped like names in ``checksum_lines``."""
    return b"".join(
        b"%b\n%b\n" % (escape(entry.path), escape(entry.target)) for entry in entries if entry.type == "link"
    )


def escape(name: str) -> bytes:
    r"""Escape backslash, newline and carriage return for ``printf %b``: ``\\``, ``\n`` and ``\r``."""
    return os.fsencode(name).replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")


def contents_key(entries: Iterable[Entry], *more: str) -> str:
    """64 hex digits that identify files by path, mode and content, regardless of mtimes."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(b"%o %b %b\0" % (entry.mode, entry.sha256.encode(), os.fsencode(entry.path)))
    for text in more:
        digest.update(text.encode())
    return digest.hexdigest()


def _checksum_line(entry: Entry) -> bytes:
    name = escape(entry.path)
    # coreutils: a line with an escaped name starts with a backslash
    return b"%b%b  %b\n" % (b"\\" if b"\\" in name else b"", entry.sha256.encode(), name)


_DIGEST = re.compile(rb"(?<![\w-])(?:[\w-]{43}|[0-9a-f]{64})(?![\w-])")


@dataclass(frozen=True)
class Recipe:
    """How to derive files of a new release.

    Attributes:
        words: pairs of texts of equal length: the old files' text and the new files' text.
        entries: the files that can be derived.
    """

    words: tuple[tuple[bytes, bytes], ...] = ()
    entries: tuple[Entry, ...] = ()

    @property
    def script(self) -> bytes:
        """The words as a script for sed; they have no special characters."""
        return b"".join(b"s/%b/%b/g\n" % pair for pair in self.words)


def derive_recipe(
    manifest: Manifest, prefix_files: Mapping[str, bytes], relocated: Relocated, old: PurePosixPath
) -> Recipe:
    """The files of ``relocated`` that can be derived from files of the release at ``old``."""
    before = {entry.path: (entry, data) for entry, data in relocate(manifest, prefix_files, old).files}
    new, was = relocated.prefix.name, old.name
    if len(new) != len(was) or relocated.prefix.parent != old.parent:
        return Recipe()
    words = {was.encode(): new.encode()}
    listed = _recorded_names(before[path][1] for path in manifest.records if path in before)
    candidates = [(entry, data, before[entry.path]) for entry, data in relocated.files if entry.type == "file"]
    for entry, _, (old_entry, _) in candidates:
        if entry.sha256 != old_entry.sha256:
            hashes = _hashes(old_entry.sha256, entry.sha256)
            words |= {past: now for past, now in hashes if past in listed}
    pairs = tuple(words.items())
    entries = tuple(
        entry
        for entry, data, (old_entry, old_data) in candidates
        if entry.sha256 != old_entry.sha256 and _replace_words(old_data, pairs) == data
    )
    return Recipe(pairs, entries)


def _recorded_names(records: Iterable[bytes]) -> set[bytes]:
    """All words in RECORD and conda-meta files that may be digests."""
    return {word for data in records for word in _DIGEST.findall(data)}


def _hashes(old: str, new: str) -> Iterator[tuple[bytes, bytes]]:
    """A digest in RECORD's form (URL-safe base64 without padding, PEP 376) and in conda-meta's."""
    yield _record_hash(old), _record_hash(new)
    yield old.encode(), new.encode()


def _record_hash(digest: str) -> bytes:
    return base64.urlsafe_b64encode(bytes.fromhex(digest)).rstrip(b"=")


def _replace_words(data: bytes, pairs: tuple[tuple[bytes, bytes], ...]) -> bytes:
    for old, new in pairs:
        data = data.replace(old, new)
    return data


# --- the steps ------------------------------------------------------------------------------------

COMPILED = ".clusterctl/files/compiled"  # the list of files that the node compiled

# A release works if these can be imported and started; only packed ones are tried.
MODULES = ("torch", "deepspeed", "llamafactory")
COMMANDS = (("torchrun", "--help"), ("deepspeed", "--help"), ("llamafactory-cli", "help"))

# Where installers put conda by default; these folders are not in the PATH of ssh commands.
_KINDS = ("miniconda3", "anaconda3", "miniforge3", "mambaforge", "miniconda", "anaconda", "conda")
_TOPS = ("/opt", "/usr/local")
_MAMBAS = ("micromamba", ".local/share/mamba", "miniforge3", "mambaforge")  # in the home

_NAME = re.compile(r"[^/\s:#]+\Z")  # conda rejects these in a name


def gather_script(paths: ReleasePaths, *, repair: bool = False, base: str = "") -> str:
    """The script that creates a release's folder and links files from other releases; its input is ``wanted``.

    Args:
        paths: of the release.
        repair: replace an existing release, and only use its intact files.
        base: the release whose files the recipe changes into new ones; empty for none.
    """
    return render(
        "release/gather.sh.j2",
        releases=paths.releases,
        id=paths.release_id,
        replace="yes" if repair else "no",
        base=base,
    )


def gather_input(keys: Iterable[str], recipe: Recipe) -> bytes:
    """The input of ``gather``: keys, the files of the recipe, and its words, each ended by a line ``.``."""
    listed = checksum_lines(recipe.entries)
    return b"".join((*(key.encode() + b"\n" for key in keys), b".\n", listed, b".\n", recipe.script))


def activate_steps(
    paths: ReleasePaths, manifest: Manifest, relocated: Relocated, *, repair: bool = False, naming: Sequence[Step] = ()
) -> tuple[Step, ...]:
    """The steps from received files to the current release. After a kill between two steps, a rerun continues there.

    Args:
        paths: of the release.
        manifest: of the bundle.
        relocated: its rewritten files.
        repair: replace an existing release.
        naming: steps that register the prefix, before it leads to this release.
    """
    release = paths.release
    marked = f"[ -e {quote(paths.mark)} ]"
    there = f"[ -e {quote(paths.incoming if repair else release)} ]"
    lacking = sorted(relocated.uncompiled)
    packed = {entry.path for entry in manifest.files}
    program = "import " + ", ".join(["sys", *(m for m in MODULES if manifest.versions.get(m))])
    commands = [argv for argv in COMMANDS if f"bin/{argv[0]}" in packed]
    compiling = (
        Step(
            "compile",
            render(
                "release/compile.sh.j2",
                release=release,
                sources=lacking,
                compiled=[relocated.uncompiled[path] for path in lacking],
                list=COMPILED,
            ),
            unless=f"[ -e {quote(release)}/{COMPILED} ]",
        ),
    )
    return (
        Step(
            "complete",
            render(
                "release/complete.sh.j2",
                incoming=paths.incoming,
                release=release,
                removing=paths.removing,
            ),
            unless=f"! {there}" if repair else there,
        ),
        *(compiling if lacking else ()),
        Step("seal", f"chmod -R a-w -- {quote(release)}", unless=marked),
        Step(
            "smoke test",
            render("release/smoke.sh.j2", release=release, program=program, commands=commands),
            unless=marked,
        ),
        Step("mark", f": >{quote(paths.mark)}", unless=marked),
        *naming,
        switch_step(paths),
        discard_step("tidy", [paths.transfer, paths.removing, paths.incoming]),
    )


def switch_step(paths: ReleasePaths) -> Step:
    """Make a release the current one with one rename."""
    return Step(
        "switch",
        render(
            "release/switch.sh.j2",
            root=str(paths.root),
            link=paths.link.name,
            target=paths.target,
            id=paths.release_id,
        ),
        unless=f't=$(readlink -- {quote(paths.link)}) && [ "$t" = {quote(paths.target)} ]',
    )


def discard_step(name: str, paths: Sequence[str]) -> Step:
    """Remove clusterctl's folders that are not releases."""
    return Step(
        name,
        render("release/discard.sh.j2") + f"discard {words(paths)}",
        unless=f'for path in {words(paths)}; do [ ! -e "$path" ] || exit 1; done',
    )


def remove_step(paths: ReleasePaths) -> Step:
    """Remove a release."""
    return Step(
        "remove",
        render("release/remove.sh.j2", release=paths.release, removing=paths.removing),
    )


def conda_name_steps(inventory: Inventory, manifest: Manifest) -> tuple[Step, ...]:
    """The step that registers the environment's name. Without conda it changes nothing, and it never fails."""
    name = manifest.name
    if not _NAME.match(name) or name in (".", "..", "base", "root"):
        return ()
    values = {
        "prefix": str(inventory.prefix),
        "name": name,
        "tops": [f"{top}/{kind}" for top in _TOPS for kind in _KINDS],
        "kinds": list(_KINDS),
        "mambas": list(_MAMBAS),
    }
    return (
        Step(
            "conda name",
            render("release/conda_name.sh.j2", change=True, **values),
            unless=render("release/conda_name.sh.j2", change=False, **values),
        ),
    )
