"""A push of a data set, a model or code: its parts, the comparison with a node's files, and the scripts. Pure.

Small files are sent together, large ones in ranges.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from provision.env.bundle import tar
from provision.env.bundle.manifest import Entry
from provision.env.release.install import escape
from provision.env.source import files
from provision.env.source.files import Source
from provision.errors import ClusterctlError, UsageError
from provision.model import Inventory, Part
from provision.render import render
from provision.script import whole

LARGE = 64 << 20  # bytes; larger files are sent in ranges of this length, smaller ones in tars of about it
MANY = 4096  # files in one tar at most
STAGING = ".clusterctl-push-"  # the prefix of folders of running or interrupted pushes

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Tree:
    """The pushed file or folder.

    Attributes:
        source: its path here.
        found: every file, symlink and folder below a pushed folder; a single file has the empty path.
        skipped: sockets and the like, which are not pushed.
        mode: the mode of the pushed folder itself.
    """

    source: Path
    found: tuple[Source, ...]
    skipped: tuple[str, ...] = ()
    mode: int = 0o755

    @property
    def single(self) -> bool:
        """Whether this is one file, not a folder."""
        return len(self.found) == 1 and not self.found[0].path

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(one.size for one in self.found)


@dataclass(frozen=True)
class Pushed:
    """The parts for one node, and the final paths of their files.

    Attributes:
        parts: small files unpack as ``small/KEY/PATH``, so that tars never mix; a large one as ``large/NAME``.
        small: the paths of small files and symlinks, by the KEY of their part.
        large: the path of each large file, by NAME.
    """

    parts: tuple[Part, ...]
    small: Mapping[str, tuple[str, ...]]
    large: Mapping[str, str]

    @property
    def size(self) -> int:
        """Bytes on the wire."""
        return sum(part.size for part in self.parts)

    @property
    def room(self) -> int:
        """The space that it needs on a node, where a part exists twice while it is unpacked."""
        return self.size + max((part.size for part in self.parts), default=0)


def scan_tree(source: Path) -> Tree:
    """Everything below a folder, or one file; symlinks inside stay symlinks.

    Raises:
        UsageError: it does not exist, or cannot be read.
    """
    try:
        status = source.stat()
    except OSError as error:
        raise UsageError(
            f"{source}: {(error.strerror or str(error)).lower()}", hint="clusterctl push SRC DEST"
        ) from error
    if source.is_dir():
        tree = files.walk(source, "", skip=lambda _path, name: name.startswith(STAGING))
        return Tree(source, tree.sources, tree.skipped, status.st_mode & 0o777)
    if not source.is_file():
        raise UsageError(f"{source} is not a file or folder", hint="clusterctl push SRC DEST")
    one = Source("", str(source.resolve()), "file", status.st_mode & 0o777, status.st_mtime_ns, status.st_size)
    return Tree(source, (one,))


def plan_parts(tree: Tree, wanted: frozenset[str], *, limit: int = LARGE) -> Pushed:
    """The parts for the files and symlinks whose paths are ``wanted``, always in the same order.

    The grouping of small files does not depend on ``wanted``, so a rerun has the same parts for the rest.
    """
    files = [one for one in tree.found if one.type != "dir"]
    groups = (
        tuple(one for one in group if one.path in wanted)
        for group in _groups((one for one in files if one.size <= limit), limit)
    )
    small = {_key(*map(_name, group)): group for group in groups if group}
    large = {_name(one): one for one in files if one.size > limit and one.path in wanted}
    return Pushed(
        parts=(
            *(_tar_part(key, group) for key, group in small.items()),
            *(part for name, one in large.items() for part in _ranges(one, name, limit)),
        ),
        small={key: tuple(one.path for one in group) for key, group in small.items()},
        large={name: one.path for name, one in large.items()},
    )


def _name(one: Source) -> str:
    """The name of a file's content: a hash of its path, mode, size, time and target."""
    return _key(one.path, str(one.mode), str(one.size), str(one.mtime_ns), one.target)


def _key(*words: str) -> str:
    """A short hash, because the name of every file in a tar contains it."""
    return hashlib.sha256(os.fsencode("\0".join(words))).hexdigest()[:24]


def _groups(files: Iterable[Source], limit: int) -> Iterator[tuple[Source, ...]]:
    group: list[Source] = []
    size = 0
    for one in files:
        if group and (size + one.size > limit or len(group) == MANY):
            yield tuple(group)
            group, size = [], 0
        group.append(one)
        size += one.size
    if group:
        yield tuple(group)


def _entry(key: str, one: Source) -> Entry:
    return Entry(f"small/{key}/{one.path}".rstrip("/"), one.type, one.mode, one.mtime, one.size, target=one.target)


def _tar_part(key: str, group: tuple[Source, ...]) -> Part:
    return Part(key, "tar", sum(tar.span(_entry(key, one)) for one in group), partial(_tar, key, group))


def _tar(key: str, group: tuple[Source, ...]) -> Iterator[bytes]:
    """A tar stream of whole files; each is compared with its scan after it has been read."""
    for one in group:
        yield tar.entry_header(_entry(key, one))
        if one.type == "file":
            yield from _read(one, 0, one.size)
            yield bytes(tar.padding(one.size))


def _ranges(one: Source, name: str, limit: int) -> Iterator[Part]:
    for number, offset in enumerate(range(0, one.size, limit)):
        size = min(limit, one.size - offset)
        yield Part(
            f"{name}.{number}",
            "range",
            size,
            partial(_read, one, offset, size),
            path=f"large/{name}",
            offset=offset,
            mode=one.mode,
            mtime=one.mtime,
        )


def _read(one: Source, offset: int, size: int) -> Iterator[bytes]:
    with files.open_source(one) as descriptor:
        for at in range(offset, offset + size, _BLOCK):
            yield files.read_at(descriptor, at, min(_BLOCK, offset + size - at), one)


# --- the comparison with a node's files -----------------------------------------------------------

Kind = Literal["file", "dir", "link", "other"]

_KINDS: dict[int, Kind] = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}
_WORDS: dict[str, str] = {"file": "file", "dir": "folder", "link": "symlink", "other": "device, pipe or socket"}
# Types here and on the node where one never replaces the other. A symlink is replaced by anything, and replaces a file.
_UNLIKE = {("dir", "file"), *((here, other) for here in _WORDS for other in ("dir", "other") if here != other)}
_OPEN = 0o700  # the owner's permissions to write files in a folder


class NodeFile(NamedTuple):
    """The file, folder or symlink at a path on a node."""

    kind: Kind
    mode: int
    size: int
    mtime: int
    owner: int
    target: str = ""


@dataclass(frozen=True)
class NodeTree:
    """A node's answer.

    Attributes:
        things: the existing files at the wanted paths; the destination itself is ``""``.
        closed: folders among them in which the user may not write.
        user: the user's id.
        tools: the ones of ``zstd`` and ``ssh`` that the node has.
        free_bytes: free space at the destination, if known.
        staged: bytes that interrupted pushes have left there; None: nothing is left.
        refused: why the node cannot take the tree.
    """

    things: Mapping[str, NodeFile] = field(default_factory=dict)
    closed: frozenset[str] = frozenset()
    user: int = 0
    tools: frozenset[str] = frozenset()
    free_bytes: int | None = None
    staged: int | None = None
    refused: str = ""


@dataclass(frozen=True)
class Changes:
    """The changes that a node needs; its answer, which may be long, is not kept.

    Attributes:
        wanted: the paths of files and symlinks that are missing or different.
        folders: the folders below the destination to create or change, see ``folders``.
        incomplete: whether there is work besides sending files.
        refused: why the node cannot take the tree; then nothing is sent.
        has_ssh: whether the node can pass bytes on.
        free_bytes: free space at the destination, if known.
        staged: bytes that interrupted pushes have left there.
    """

    wanted: frozenset[str] = frozenset()
    folders: tuple[tuple[str, int], ...] = ()
    incomplete: bool = False
    refused: str = ""
    has_ssh: bool = False
    free_bytes: int | None = None
    staged: int = 0


def find_changes(tree: Tree, there: NodeTree, destination: str) -> Changes:
    """The changes that a node needs."""
    wanted = differing(tree, there)
    return Changes(
        wanted,
        folders(tree, there, wanted),
        incomplete(tree, there),
        refusal(tree, there, destination, wanted),
        "ssh" in there.tools,
        there.free_bytes,
        there.staged or 0,
    )


def read_answer(out: str, token: str) -> NodeTree:
    """Parse the output of ``push/compare.sh.j2``; every answer starts with ``token``, so names may have any character.

    Raises:
        ClusterctlError: the output is incomplete.
    """
    rows = [row.removesuffix("\n") for row in out.split(f"{token} ")[1:]]
    if not rows or rows[-1] != "end":
        raise ClusterctlError("its answer is incomplete")
    things: dict[str, NodeFile] = {}
    facts: dict[str, str] = {}
    closed: list[str] = []
    link = ""
    for row in rows[:-1]:
        word, _, rest = row.partition(" ")
        if word == "at":
            mode, size, mtime, owner, path = rest.split(" ", 4)
            number = int(mode, 16)
            kind = _KINDS.get(stat.S_IFMT(number), "other")
            things[_path(path)] = NodeFile(kind, number & 0o777, whole(size), whole(mtime), whole(owner))
        elif word == "link":
            link = _path(rest)
        elif word == "to" and link in things:
            things[link] = things[link]._replace(target=rest)
        elif word == "closed":
            closed.append(_path(rest))
        else:
            facts[word] = rest
    if "refuse" in facts:
        return NodeTree(refused=" ".join(facts["refuse"].split()))
    return NodeTree(
        things,
        frozenset(closed),
        whole(facts["user"]),
        frozenset(facts["tools"].split()),
        whole(facts["free"]) if "free" in facts else None,
        whole(facts["staged"]) if "staged" in facts else None,
    )


def differing(tree: Tree, there: NodeTree) -> frozenset[str]:
    """The paths of files and symlinks that are missing on the node, or have another size, time, mode or target."""
    real = _real(tree, there)
    return frozenset(one.path for one in tree.found if one.type != "dir" and not _same(one, _thing(one, there, real)))


def folders(tree: Tree, there: NodeTree, wanted: frozenset[str]) -> tuple[tuple[str, int], ...]:
    """The folders below the destination to create, or whose mode changes, perhaps temporarily; parents first.

    Args:
        tree: the pushed tree.
        there: the node's answer.
        wanted: the files and symlinks to write.

    Returns:
        Their paths and final modes. A folder of another user keeps its mode.
    """
    real = _real(tree, there)
    closed = there.closed & _folders_to_write(tree, real, wanted)

    def is_changed(one: Source) -> bool:
        if one.path not in real:
            return True
        thing = there.things[one.path]
        return there.user in (0, thing.owner) and (thing.mode != one.mode or one.path in closed)

    return tuple((one.path, one.mode) for one in tree.found if one.type == "dir" and is_changed(one))


def incomplete(tree: Tree, there: NodeTree) -> bool:
    """Whether there is work on the node besides sending files."""
    lacks = not tree.single and "" not in _real(tree, there)
    return lacks or there.staged is not None or bool(folders(tree, there, frozenset()))


def refusal(tree: Tree, there: NodeTree, destination: str, wanted: frozenset[str]) -> str:
    """Why the node cannot take the tree; empty if it can."""
    if there.refused:
        return there.refused
    real = _real(tree, there)
    wrong = [
        f"{_join(destination, one.path)} is a {_WORDS[thing.kind]} on the node and a {_WORDS[one.type]} here; "
        "move it away"
        for one in tree.found
        if (thing := _thing(one, there, real)) and (one.type, thing.kind) in _UNLIKE
    ]
    wrong += [
        f"{_join(destination, path)} belongs to another user and is not writable"
        for path in sorted(there.closed & _folders_to_write(tree, real, wanted) - {""})
        if there.things[path].owner != there.user
    ]
    return f"{wrong[0]} (and {len(wrong) - 1} more like this)" if len(wrong) > 1 else "".join(wrong)


def writable_mode(mode: int) -> int:
    """A folder's mode while files are written in it."""
    return mode | _OPEN


def _path(path: str) -> str:
    return "" if path == "." else path


def _join(destination: str, path: str) -> str:
    return f"{destination}/{path}" if path else destination


def _above(path: str) -> str:
    return path.rpartition("/")[0]


def _real(tree: Tree, there: NodeTree) -> frozenset[str]:
    """The folders of the tree that are real folders on the node, not behind a symlink."""
    real = {""} if "" in there.things and there.things[""].kind == "dir" else set[str]()
    for one in tree.found:
        if one.type == "dir" and _above(one.path) in real:
            thing = there.things.get(one.path)
            if thing and thing.kind == "dir":
                real.add(one.path)
    return frozenset(real)


def _thing(one: Source, there: NodeTree, real: frozenset[str]) -> NodeFile | None:
    return there.things.get(one.path) if not one.path or _above(one.path) in real else None


def _folders_to_write(tree: Tree, real: frozenset[str], wanted: frozenset[str]) -> frozenset[str]:
    """The folders in which something is written."""
    new_folders = (one.path for one in tree.found if one.type == "dir" and one.path not in real)
    return frozenset(map(_above, (*wanted, *new_folders)))


def _same(one: Source, thing: NodeFile | None) -> bool:
    if thing is None or thing.kind != one.type:
        return False
    if one.type == "link":
        return thing.target == one.target
    return (thing.mode, thing.size, thing.mtime) == (one.mode, one.size, one.mtime)


# --- the scripts and their input ------------------------------------------------------------------


@dataclass(frozen=True)
class PushTarget:
    """The destination of a push on a node, and its staging folder."""

    root: PurePosixPath
    destination: PurePosixPath
    folder: bool  # a folder is pushed, not one file

    @classmethod
    def of(cls, inventory: Inventory, destination: str, *, folder: bool) -> PushTarget:
        """The paths of a push.

        Raises:
            UsageError: the destination is not absolute, or overlaps the releases.
        """
        path = PurePosixPath(os.path.normpath(destination).replace("//", "/"))
        if not destination.startswith("/") or len(path.parts) < 2:
            raise UsageError(f"{destination!r} is no absolute path on the nodes", hint="clusterctl push SRC /data/NAME")
        release_folders = (inventory.prefix, inventory.root / "releases")
        if any(each == path or each in path.parents or path in each.parents for each in release_folders):
            raise UsageError(
                f"{path} is where clusterctl keeps releases",
                hint="choose another destination, such as /data/NAME; to send an environment: clusterctl deploy",
            )
        return cls(inventory.root, path, folder)

    @property
    def staging(self) -> str:
        """The folder for received files, on the destination's file system, so that they only need to be renamed.

        If a folder is pushed, it is in that folder, which may be a mount point and the only writable folder.
        """
        if self.folder:
            return f"{self.destination}/{STAGING}folder"
        name = hashlib.sha256(os.fsencode(self.destination.name)).hexdigest()[:12]
        return f"{self.destination.parent}/{STAGING}{name}"

    @property
    def transfer(self) -> str:
        """The transfer's folder."""
        return f"{self.staging}/transfer"

    @property
    def into(self) -> str:
        """The folder where parts are unpacked."""
        return f"{self.staging}/tree"


def compare_script(target: PushTarget, token: str) -> str:
    """The read-only script that lists which of the wanted paths exist on a node; its input is ``compare_input``."""
    return render(
        "push/compare.sh.j2",
        token=token,
        destination=str(target.destination),
        staging=target.staging,
        releases=f"{target.root}/releases",
        folder=target.folder,
    )


def compare_input(tree: Tree) -> bytes:
    """The input of ``compare_script``: the paths, each followed by a NUL."""
    wanted = (one.path for one in tree.found if one.path)
    return b"".join(os.fsencode(path) + b"\0" for path in (".", *wanted))


def open_script(target: PushTarget, mode: int) -> str:
    """The script that creates a destination folder with this mode, or makes it writable, before the lock is taken."""
    return render(
        "push/open.sh.j2",
        destination=str(target.destination),
        staging=target.staging,
        mode=f"{mode:o}",
        opened=f"{writable_mode(mode):o}",
    )


def close_script(target: PushTarget) -> str:
    """The script that sets the destination's final mode, after the lock is released."""
    return render("push/close.sh.j2", destination=str(target.destination), staging=target.staging)


def begin_script(target: PushTarget) -> str:
    """The script that prepares a transfer, or continues an interrupted one; its input is ``begin_input``."""
    return render("push/begin.sh.j2", staging=target.staging, transfer=target.transfer, into=target.into)


def begin_input(pushed: Pushed, keys: Iterable[str]) -> bytes:
    """The input of ``begin_script``: files for this node's staging folder, and keys of parts that only others need."""
    own = {part.key for part in pushed.parts}
    lines = [f"want {name}\n" for name in (*pushed.small, *pushed.large)]
    lines += [f"skip {key}\n" for key in keys if key not in own]
    return "".join(lines).encode("ascii")


def place_script(target: PushTarget) -> str:
    """The script that moves received files to the destination; its input is ``place_input``."""
    return render("push/place.sh.j2", staging=target.staging, into=target.into, destination=str(target.destination))


def place_input(pushed: Pushed, folders: Iterable[tuple[str, int]]) -> bytes:
    """The input of ``place_script``, in order; ``folders`` are the ones to create or change."""
    folders = tuple(folders)
    return b"".join(escape(line) + b"\n" for line in _moves(pushed, folders))


def _moves(pushed: Pushed, folders: tuple[tuple[str, int], ...]) -> Iterator[str]:
    for path, mode in folders:
        yield f"folder {writable_mode(mode):o} {path}"
    for key, small in pushed.small.items():
        if small == ("",):
            yield f"one small/{key} "
        else:
            yield f"group {key}"
            yield from (f"small {path}" for path in small)
    for name, path in pushed.large.items():
        yield f"one large/{name} {path}"
    for path, mode in reversed(folders):
        if mode != writable_mode(mode):
            yield f"mode {mode:o} {path}"
