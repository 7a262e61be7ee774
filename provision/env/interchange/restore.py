"""Give an unpacked archive the prefix that its environment had where it was packed, as if it had been brought whole."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from provision.env.bundle.consistency import REWRITTEN
from provision.env.bundle.manifest import Entry
from provision.env.interchange import conda_unpack, programs
from provision.env.interchange.programs import Record, Unpacker
from provision.env.interchange.unpack import Kind, Unpacked
from provision.env.packing import temporary
from provision.env.packing.chunks import is_record
from provision.env.relocation import records, shebangs
from provision.errors import BundleError

_UNPACK = "bin/conda-unpack"


@dataclass(frozen=True)
class Environment:
    """An environment in an unpacked archive: its folder, and what lies there, by path."""

    root: Path
    kinds: Mapping[str, Kind]

    def read(self, path: str) -> bytes:
        """A regular file's content; none for anything else, or for a file that is too large to be rewritten."""
        file = self.root / path
        if self.kinds.get(path) != "file" or not file.exists() or file.stat().st_size > REWRITTEN:
            return b""
        return file.read_bytes()

    def declared(self) -> tuple[Record, ...]:
        """What its packages say of the placeholders in their files."""
        return programs.declared(self.read(path) for path in self.beneath("conda-meta") if path.endswith(".json"))

    def beneath(self, folder: str) -> Iterator[str]:
        """The regular files beneath a folder, in order."""
        yield from sorted(p for p, kind in self.kinds.items() if kind == "file" and p.startswith(folder + "/"))


def find(unpacked: Unpacked) -> Environment:
    """The environment in an archive: at its top, or in the one folder that holds everything.

    Raises:
        BundleError: it is none, or none that can be used.
    """
    metas = sorted((path.count("/"), path) for path in unpacked.kinds if f"/{path}".endswith("/conda-meta"))
    if any(f"/{path}".endswith("/meta/parcel.json") for path in unpacked.kinds):
        raise BundleError("it is a Cloudera parcel", hint="pack the environment again with --format tar.gz")
    if not metas or unpacked.kinds[metas[0][1]] != "dir":
        raise BundleError(
            "it is no archive of a conda environment: it holds no conda-meta folder",
            hint="conda-pack -n NAME -o NAME.tar.gz makes one",
        )
    if len(metas) > 1 and metas[0][0] == metas[1][0]:
        raise BundleError(f"it holds several environments: {metas[0][1]}, {metas[1][1]}", hint="pack one at a time")
    top = metas[0][1].removesuffix("conda-meta")
    kinds = {path[len(top) :]: kind for path, kind in unpacked.kinds.items() if path.startswith(top) and path != top}
    root = unpacked.folder / top
    if kinds.get("bin/python") is None or not (root / "bin/python").is_file():
        raise BundleError("it holds no Python: there is no bin/python in it", hint="a node has none of its own")
    return Environment(root, kinds)


def unpacker_of(environment: Environment) -> Unpacker | None:
    """What the archive's ``conda-unpack`` lists; None where there is none.

    Raises:
        BundleError: it is none that conda-pack writes.
    """
    data = environment.read(_UNPACK)
    return programs.read(data) if data else None


def source_prefix(environment: Environment, unpacker: Unpacker | None, name: str) -> str:
    """The prefix that the environment had where it was packed.

    Raises:
        BundleError: nothing tells it.
    """
    if unpacker is None:
        found = programs.prefix_of_scripts(environment.read(path)[:4096] for path in environment.beneath("bin"))
        if not found:
            raise BundleError(
                "nothing tells which prefix its files name: it has no bin/conda-unpack, and no script in bin names one",
                hint="pack the environment again, without --dest-prefix",
            )
        return found
    return (
        unpacker.source_prefix
        or programs.prefix_of_records(unpacker.records, environment.declared())
        or programs.prefix_of_history(environment.read("conda-meta/history").decode("utf-8", "replace"))
        or f"/opt/{name}"  # no file names any
    )


def restore(environment: Environment, unpacker: Unpacker | None, source: str) -> tuple[str, ...]:
    """Undo what conda-pack did: placeholders, ``#!/usr/bin/env python``, and its own scripts.

    Returns:
        What could not be undone, for people.
    """
    for path, text in programs.SCRIPTS.items():
        if text in environment.read(path) and (unpacker or path != _UNPACK):
            (environment.root / path).unlink()
    if unpacker is None:
        return ()
    changed, notices = _put_prefix(environment, unpacker, os.fsencode(source))
    changed |= _put_interpreters(environment, unpacker, os.fsencode(source))
    for path in sorted(filter(is_record, environment.kinds), key=lambda path: path.startswith("conda-meta/")):
        data = environment.read(path)
        updated = records.update(path, data, changed, source)
        if updated != data:
            changed[path] = _replace(environment, path, updated)
    return notices


def _put_prefix(
    environment: Environment, unpacker: Unpacker, source: bytes
) -> tuple[dict[str, Entry], tuple[str, ...]]:
    """Replace placeholders; what has changed, and what could not be.

    conda-pack lists nothing whose path begins like ``bin/python``, since it would be running, and so leaves
    ``bin/python3.11-config`` with a placeholder as well: what packages declare is therefore seen to, listed or not.
    """
    changed, notices = {}, []
    for path, text, mode in dict.fromkeys((*unpacker.records, *environment.declared())):
        placeholder = os.fsencode(text)
        data = environment.read(path)
        if not data and environment.kinds.get(path) == "file" and (environment.root / path).stat().st_size > REWRITTEN:
            notices.append(f"{path} has more than {REWRITTEN >> 20} MiB, and is left as it is")
            continue
        if placeholder == source or placeholder not in data:
            continue
        if mode == "binary" and len(source) > len(placeholder):
            notices.append(f"{path} has room for a prefix of {len(placeholder)} bytes only, and is left as it is")
            continue
        rewrite = conda_unpack.in_text if mode == "text" else conda_unpack.padded
        changed[path] = _replace(environment, path, rewrite(data, placeholder, source))
    return changed, tuple(notices)


def _put_interpreters(environment: Environment, unpacker: Unpacker, source: bytes) -> dict[str, Entry]:
    """Name a script's interpreter by its path where it is one of the environment's; what has changed."""
    names = {os.fsencode(path[4:]) for path in environment.kinds if path.startswith("bin/")}
    changed = {}
    for path in (*environment.beneath("bin"), *unpacker.scripts):
        wanted = shebangs.env_program(environment.read(path))
        if wanted and wanted[0] in names:
            name, options, rest = wanted
            line = b"#!" + source + b"/bin/" + name + (b" " + options if options else b"")
            changed[path] = _replace(environment, path, line + b"\n" + rest)
    return changed


def _replace(environment: Environment, path: str, data: bytes) -> Entry:
    """New content under the same name, time and permissions; other names of the file keep theirs."""
    file = environment.root / path
    status = file.stat()
    new = temporary.beside(file)
    new.write_bytes(data)
    new.chmod(status.st_mode)
    os.utime(new, ns=(status.st_mtime_ns, status.st_mtime_ns))
    new.replace(file)
    return Entry(path, "file", 0, 0, len(data), hashlib.sha256(data).hexdigest())
