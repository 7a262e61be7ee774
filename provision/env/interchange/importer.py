"""Import an archive of conda-pack as a bundle.

The archive is unpacked next to the bundle, gets the prefix back that it had where it was packed, is packed from there,
and is deleted. No program in it is run: its ``bin/conda-unpack`` is only parsed.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from provision.env import relocation
from provision.env.bundle.manifest import PACKAGE_FILE, Entry, Manifest
from provision.env.bundle.parse import REWRITTEN
from provision.env.interchange import conda_unpack
from provision.env.interchange.unpack import Kind, UnpackedArchive, format_of, unpack
from provision.env.packing import temporary
from provision.env.packing.pack import PackOptions, pack
from provision.env.source.environment import is_record
from provision.errors import BundleError
from provision.model import Emit, Notice
from provision.stages import stage
from trainer.agent.contract.untrusted import parse_object

_REFUSED = {
    "zip": "a zip file, which has no symlinks and permissions",
    "squashfs": "a squashfs image",
    None: "not a known kind of archive",
}

# Files that conda-pack adds, which a bundle does not need, with a text that only they contain.
SCRIPTS: Mapping[str, bytes] = {
    "bin/activate": b"_conda_pack_activate",
    "bin/activate.fish": b"Exit conda mode and return",
    "bin/deactivate": b"_conda_pack_deactivate",
    "bin/conda-unpack": b"_prefix_records",
    "bin/conda_unpack_progress.py": b"progress",
}

LIMIT = 32 << 20  # bytes of conda-unpack; a large environment has 10,000 rows of 350 bytes

# The placeholder before conda-build declared it; split, so that this file does not contain it.
_OLDEST = "/opt/anaconda1anaconda2" + "anaconda3"
_PYTHON = re.compile(rb"#!(/[^\n]*)/bin/python[^/\n ]*(?: [^\n]*)?\n")
_COMMAND = re.compile(r"^# cmd: .* (?:-p|--prefix)[ =](/[^\s'\"]+)", re.MULTILINE)

_UNPACK = "bin/conda-unpack"


class Record(NamedTuple):
    """A file with a prefix: its path, the prefix or placeholder, and ``text`` or ``binary``."""

    path: str
    placeholder: str
    mode: str


@dataclass(frozen=True)
class Unpacker:
    """The tables of a ``conda-unpack``.

    Attributes:
        records: files with a prefix.
        scripts: scripts outside ``bin`` that ask ``/usr/bin/env`` for their interpreter instead of its path.
        source_prefix: where the environment was packed; only in archives from clusterctl.
    """

    records: tuple[Record, ...]
    scripts: tuple[str, ...] = ()
    source_prefix: str = ""


@dataclass(frozen=True)
class Environment:
    """An environment in an unpacked archive: its folder, and the kind of each path."""

    root: Path
    kinds: Mapping[str, Kind]

    def read(self, path: str) -> bytes:
        """The content of a regular file; empty for other paths and for files too large to rewrite."""
        file = self.root / path
        if self.kinds.get(path) != "file" or not file.exists() or file.stat().st_size > REWRITTEN:
            return b""
        return file.read_bytes()

    def declared(self) -> tuple[Record, ...]:
        """The placeholders that its packages declare."""
        return declared_records(self.read(path) for path in self.files_below("conda-meta") if path.endswith(".json"))

    def files_below(self, folder: str) -> Iterator[str]:
        """The regular files below a folder, in order."""
        yield from sorted(p for p, kind in self.kinds.items() if kind == "file" and p.startswith(folder + "/"))


def import_archive(archive: Path, out: Path, *, emit: Emit) -> Manifest:
    """Import a tar archive, uncompressed or compressed with gzip, zstd, bzip2 or xz.

    Args:
        archive: from conda-pack, from ``export``, or a tar of an environment's folder.
        out: the bundle. It gets this name when it is complete.
        emit: receives the progress.

    Returns:
        The manifest of the bundle; its first notice is ``origin(archive)``.

    Raises:
        BundleError: it is not an archive of an environment, damaged, or a member would leave the folder.
        UsageError: a file cannot be read or written.
    """
    kind = format_of(archive)
    if kind in _REFUSED:
        raise BundleError(
            f"{archive} is {_REFUSED[kind]}: an environment must be a .tar.gz, .tar.zst or .tar",
            hint="pack it again with conda-pack --format tar.gz",
        )
    origin_notice = origin(archive)
    name = name_of(archive)
    with temporary.create_folder_beside(out.absolute()) as folder:
        with stage(emit, "import", f"Unpacking {archive}", archive.stat().st_size, "bytes") as shown:
            unpacked = unpack(archive, folder, shown.progress)
            try:
                environment = find_environment(unpacked)
                unpacker = unpacker_of(environment)
                source = source_prefix(environment, unpacker, name)
            except BundleError as error:
                raise BundleError(f"{archive}: {error}", hint=error.hint) from error
            notices = restore(environment, unpacker, source)
            unpacked.seal()
        for text in notices:
            emit(Notice(text, "warning"))
        options = PackOptions(source_prefix=source, notices=(origin_notice, *notices))
        return pack(environment.root, out, name=name, emit=emit, options=options)


def origin(archive: Path) -> str:
    """The notice about the archive of a bundle: its name, size and mtime."""
    status = archive.stat()
    seconds, rest = divmod(status.st_mtime_ns, 1_000_000_000)
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"imported from the archive {archive.name}: {status.st_size} bytes of {when}.{rest:09d}Z"


def name_of(archive: Path) -> str:
    """The environment's name: the archive's name without suffixes."""
    name = archive.name
    for suffix in (".tar.gz", ".tar.zst", ".tar.bz2", ".tar.xz", ".tgz", ".tzst", ".tbz2", ".txz", ".tar"):
        name = name.removesuffix(suffix)
    return name


def find_environment(unpacked: UnpackedArchive) -> Environment:
    """The environment in an archive, at its top or in a single folder.

    Raises:
        BundleError: there is none, or it cannot be used.
    """
    metas = sorted((path.count("/"), path) for path in unpacked.kinds if f"/{path}".endswith("/conda-meta"))
    if any(f"/{path}".endswith("/meta/parcel.json") for path in unpacked.kinds):
        raise BundleError("it is a Cloudera parcel", hint="pack the environment again with --format tar.gz")
    if not metas or unpacked.kinds[metas[0][1]] != "dir":
        raise BundleError(
            "it is not an archive of a conda environment: it has no conda-meta folder",
            hint="to create one: conda-pack -n NAME -o NAME.tar.gz",
        )
    if len(metas) > 1 and metas[0][0] == metas[1][0]:
        raise BundleError(f"it contains several environments: {metas[0][1]}, {metas[1][1]}", hint="pack one at a time")
    top = metas[0][1].removesuffix("conda-meta")
    kinds = {path[len(top) :]: kind for path, kind in unpacked.kinds.items() if path.startswith(top) and path != top}
    root = unpacked.folder / top
    if kinds.get("bin/python") is None or not (root / "bin/python").is_file():
        raise BundleError("it has no bin/python", hint="nodes have no other Python")
    return Environment(root, kinds)


def unpacker_of(environment: Environment) -> Unpacker | None:
    """The tables of the archive's ``conda-unpack``; None without one.

    Raises:
        BundleError: it is not from conda-pack.
    """
    data = environment.read(_UNPACK)
    return read_unpacker(data) if data else None


def source_prefix(environment: Environment, unpacker: Unpacker | None, name: str) -> str:
    """The prefix of the environment where it was packed.

    Raises:
        BundleError: it is unknown.
    """
    if unpacker is None:
        found = prefix_of_scripts(environment.read(path)[:4096] for path in environment.files_below("bin"))
        if not found:
            raise BundleError(
                "the prefix in its files is unknown: it has no bin/conda-unpack, and no script in bin contains one",
                hint="pack the environment again, without --dest-prefix",
            )
        return found
    return (
        unpacker.source_prefix
        or prefix_of_records(unpacker.records, environment.declared())
        or prefix_of_history(environment.read("conda-meta/history").decode("utf-8", "replace"))
        or f"/opt/{name}"  # no file contains one
    )


def restore(environment: Environment, unpacker: Unpacker | None, source: str) -> tuple[str, ...]:
    """Undo what conda-pack did: placeholders, ``#!/usr/bin/env python``, and its own scripts.

    Returns:
        Notices about what could not be undone.
    """
    for path, text in SCRIPTS.items():
        if text in environment.read(path) and (unpacker or path != _UNPACK):
            (environment.root / path).unlink()
    if unpacker is None:
        return ()
    changed, notices = _put_prefix(environment, unpacker, os.fsencode(source))
    changed |= _put_interpreters(environment, unpacker, os.fsencode(source))
    for path in sorted(filter(is_record, environment.kinds), key=lambda path: path.startswith("conda-meta/")):
        data = environment.read(path)
        updated = relocation.update_hashes(path, data, changed, source)
        if updated != data:
            changed[path] = _replace(environment, path, updated)
    return notices


def _put_prefix(
    environment: Environment, unpacker: Unpacker, source: bytes
) -> tuple[dict[str, Entry], tuple[str, ...]]:
    """Replace placeholders; returns the changed files, and notices about others.

    conda-pack does not list paths that begin with ``bin/python``, since they would be running, and therefore leaves a
    placeholder in ``bin/python3.11-config``: files that packages declare are rewritten as well.
    """
    changed, notices = {}, []
    for path, text, mode in dict.fromkeys((*unpacker.records, *environment.declared())):
        placeholder = os.fsencode(text)
        data = environment.read(path)
        if not data and environment.kinds.get(path) == "file" and (environment.root / path).stat().st_size > REWRITTEN:
            notices.append(f"{path} has more than {REWRITTEN >> 20} MiB and is not changed")
            continue
        if placeholder == source or placeholder not in data:
            continue
        if mode == "binary" and len(source) > len(placeholder):
            notices.append(f"{path} has room for a prefix of {len(placeholder)} bytes only and is not changed")
            continue
        rewrite = conda_unpack.in_text if mode == "text" else conda_unpack.padded
        changed[path] = _replace(environment, path, rewrite(data, placeholder, source))
    return changed, tuple(notices)


def _put_interpreters(environment: Environment, unpacker: Unpacker, source: bytes) -> dict[str, Entry]:
    """Write the path of a script's interpreter if it is in the environment; returns the changed files."""
    names = {os.fsencode(path[4:]) for path in environment.kinds if path.startswith("bin/")}
    changed = {}
    for path in (*environment.files_below("bin"), *unpacker.scripts):
        wanted = relocation.env_program(environment.read(path))
        if wanted and wanted[0] in names:
            name, options, rest = wanted
            line = b"#!" + source + b"/bin/" + name + (b" " + options if options else b"")
            changed[path] = _replace(environment, path, line + b"\n" + rest)
    return changed


def _replace(environment: Environment, path: str, data: bytes) -> Entry:
    """Replace a file, with the same mtime and permissions; its other names keep the old content."""
    file = environment.root / path
    status = file.stat()
    new = temporary.temporary_name(file)
    new.write_bytes(data)
    new.chmod(status.st_mode)
    os.utime(new, ns=(status.st_mtime_ns, status.st_mtime_ns))
    new.replace(file)
    return Entry(path, "file", 0, 0, len(data), hashlib.sha256(data).hexdigest())


def read_unpacker(data: bytes) -> Unpacker:
    """The tables in the program ``data``.

    Raises:
        BundleError: it is not a conda-unpack.
    """
    if len(data) > LIMIT:
        raise BundleError(
            f"its bin/conda-unpack has {len(data)} bytes, more than the limit of {LIMIT}",
            hint="create the archive again",
        )
    try:
        values = dict(_assignments(ast.parse(data)))
        rows = [Record(*row) for row in values["_prefix_records"]]
        scripts = [path for path, _ in values.get("_script_records", ())]
        source = values.get("_source_prefix", "")
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise BundleError("its bin/conda-unpack is not from conda-pack", hint="create the archive again") from error
    texts = [text for row in rows for text in row] + [*scripts, source]
    if not all(isinstance(text, str) for text in texts) or any(row.mode not in ("text", "binary") for row in rows):
        raise BundleError("its bin/conda-unpack has an invalid table", hint="create the archive again")
    return Unpacker(tuple(rows), tuple(scripts), source)


def _assignments(program: ast.Module) -> Iterable[tuple[str, Any]]:
    for node in program.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in ("_prefix_records", "_script_records", "_source_prefix"):
                yield name, ast.literal_eval(node.value)


def declared_records(metas: Iterable[bytes]) -> tuple[Record, ...]:
    """The placeholders that packages declare in the files of ``conda-meta``."""
    return tuple(record for data in metas for record in _declared_in(data))


def _declared_in(data: bytes) -> list[Record]:
    try:
        rows = [
            Record(one["_path"], one["prefix_placeholder"], one["file_mode"])
            for one in parse_object(data, limit=PACKAGE_FILE)["paths_data"]["paths"]
            if one.get("prefix_placeholder")
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # not a package's file
    return [row for row in rows if all(isinstance(text, str) for text in row)]


def prefix_of_records(records: Iterable[Record], declared: Iterable[Record]) -> str:
    """The prefix in most records that no package declares; empty if there is none.

    conda-pack lists every text file that is in no package of its cache, with the packed prefix.
    """
    placeholders = {_OLDEST, *(record.placeholder for record in declared)}
    counted = Counter(record.placeholder for record in records if record.placeholder not in placeholders)
    return max(counted, key=lambda prefix: (counted[prefix], prefix), default="")


def prefix_of_history(text: str) -> str:
    """The prefix in the last command of ``conda-meta/history``; empty if there is none."""
    found = _COMMAND.findall(text)
    return str(found[-1]) if found else ""


def prefix_of_scripts(scripts: Iterable[bytes]) -> str:
    """The prefix of Python in most scripts; empty if there is none."""
    counted = Counter(os.fsdecode(match[1]) for data in scripts if (match := _PYTHON.match(data)))
    counted.pop("/usr", None)
    return max(counted, key=lambda prefix: (counted[prefix], prefix), default="")
