"""The copies that a node holds of other nodes' files: ``.clusterctl-copies`` in the output folder.

::

    .clusterctl-copies/checkpoint-20@1700000000000000000/…     the files of one save, as they are in the checkpoint
    .clusterctl-copies/checkpoint-20@1700000000000000000.jsonl  its manifest: the checkpoint, then a line for each file

Trainers see no checkpoint in a folder with this name, so they neither count nor delete copies. The number is
``Generation.saved``. A line is added when its file is complete on the disk. A last line that was cut off does not
count, and its file is copied again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional
from urllib.parse import quote

from ..checkpoints import selection
from ..checkpoints.names import COPIES as FOLDER
from ..checkpoints.places import Seen
from ..contract.offers import CHECKPOINTS, digest, file_name
from ..contract.untrusted import UntrustedError, is_whole, parse_object
from ..link.copies import parts_of
from .choices import Generation, Kept

MANIFEST = ".jsonl"
SIZE = 256 << 20  # bytes of a manifest
_PIECE = 1 << 20


class Recorded(NamedTuple):
    """A file in a manifest."""

    size: int
    mtime: int
    digest: str


class Copy(NamedTuple):
    """The copies of one save. ``folder``: their folder below the output folder."""

    generation: Generation
    folder: str
    files: Dict[str, Recorded]


def folder_of(generation: Generation) -> str:
    """The folder of the copies of a save, below the output folder."""
    return "%s/%s@%d" % (FOLDER, quote(generation.name, safe=""), generation.saved)


def begin(output: Path, generation: Generation) -> None:
    """Start a manifest, unless it exists."""
    path = output / (folder_of(generation) + MANIFEST)
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(generation._asdict()) + "\n")


def record(output: Path, generation: Generation, name: str, file: Recorded) -> None:
    """Record a file that is complete in its place. An invalid ``digest`` takes its file out of the manifest."""
    line = json.dumps(dict(file._asdict(), file=name)).encode()
    with (output / (folder_of(generation) + MANIFEST)).open("ab") as manifest:
        manifest.write(b"\n" + line + b"\n")  # the last line may have been cut off


def read(output: Path) -> List[Copy]:
    """All copies on this node, newest first."""
    found = []
    with contextlib.suppress(OSError):
        for path in (output / FOLDER).iterdir():
            if path.name.endswith(MANIFEST):
                copy = _read_manifest(path)
                if copy is not None:
                    found.append(copy)
    return sorted(found, key=lambda one: one.generation.saved, reverse=True)


def _object(line: bytes) -> Optional[Dict[str, Any]]:
    try:
        return parse_object(line)
    except UntrustedError:
        return None


def _read_manifest(path: Path) -> Optional[Copy]:
    """What a manifest says; None if it is damaged. The disk may have damaged any line."""
    files: Dict[str, Recorded] = {}
    try:
        with path.open("rb") as file:
            lines = file.read(SIZE).split(b"\n")
    except OSError:
        return None
    objects = [one for one in map(_object, filter(None, lines)) if one is not None]
    if not objects:
        return None
    head, step = objects[0], objects[0].get("step")
    if not file_name(head.get("name")) or not is_whole(head.get("saved")) or not isinstance(head.get("single"), bool):
        return None
    generation = Generation(head["name"], head["single"], head["saved"], step if is_whole(step) else None)
    for one in objects[1:]:
        if file_name(one.get("file")) and is_whole(one.get("size")) and is_whole(one.get("mtime")):
            files[one["file"]] = Recorded(one["size"], one["mtime"], str(one.get("digest")))
    files = {name: one for name, one in files.items() if digest(one.digest)}
    folder = folder_of(generation)
    return Copy(generation, folder, files) if path.name == folder.rpartition("/")[2] + MANIFEST else None


def offers(output: Path) -> List[Dict[str, Any]]:
    """This node's copies, for ``selection.newest``: the files that are as the manifest says, with their digests."""
    found = []
    for copy in read(output)[:CHECKPOINTS]:
        generation = copy.generation
        path = output / copy.folder
        if generation.single:
            path /= generation.name.rpartition("/")[2]
        one = selection.read(path, Seen(generation.name, generation.single))
        files = {
            name: file
            for name, file in one.files.items()
            if name in copy.files and (file.size, file.mtime) == copy.files[name][:2]
        }
        if files:
            digests = {name: copy.files[name].digest for name in files}
            more = {"saved": generation.saved, "folder": copy.folder, "digests": digests}
            found.append(dict(selection.described(one._replace(files=files)), **more))
    return found


def kept(output: Path) -> List[Kept]:
    """The size of each save's copies."""
    return [
        Kept(copy.folder, copy.generation.saved, sum(file.size for file in copy.files.values()))
        for copy in read(output)
    ]


def remove(output: Path, folder: str) -> None:
    """Remove the copies of one save: first the manifest, so that no part of them counts."""
    parts = parts_of(folder)
    if parts[0] != FOLDER or len(parts) != 2:
        raise ValueError("%s is not a folder of copies" % folder)
    with contextlib.suppress(FileNotFoundError):
        (output / (folder + MANIFEST)).unlink()
    shutil.rmtree(output / folder, ignore_errors=True)


def drop_damaged(output: Path, source: str) -> bool:
    """Compare a copy, given by its path below the output folder, with its digest. Removes it if it differs."""
    for copy in read(output):
        name = source[len(copy.folder) + 1 :]
        if source.startswith(copy.folder + "/") and name in copy.files:
            path = output.joinpath(*parts_of(source))
            recorded = copy.files[name]
            if _digest(path) != recorded.digest:
                record(output, copy.generation, name, recorded._replace(digest="damaged"))
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                return True
    return False


def _digest(path: Path) -> str:
    """The SHA-256 of a file; "" if it cannot be read."""
    found = hashlib.sha256()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd, "rb", buffering=0) as file:
            for piece in iter(lambda: file.read(_PIECE), b""):
                found.update(piece)
    except OSError:
        return ""
    return found.hexdigest()
