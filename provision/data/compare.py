"""Compares a pushed tree with the files on a node. Pure."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from provision.data.tree import Tree
from provision.env.source.files import Source
from provision.errors import ClusterctlError
from provision.script import whole

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


def changes(tree: Tree, there: NodeTree, destination: str) -> Changes:
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


def read(out: str, token: str) -> NodeTree:
    """Parse the output of ``push/compare.sh.j2``; every answer begins with ``token``, so names may have any character.

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
    closed = there.closed & _written(tree, real, wanted)

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
        for path in sorted(there.closed & _written(tree, real, wanted) - {""})
        if there.things[path].owner != there.user
    ]
    return f"{wrong[0]} (and {len(wrong) - 1} more like this)" if len(wrong) > 1 else "".join(wrong)


def opened(mode: int) -> int:
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


def _written(tree: Tree, real: frozenset[str], wanted: frozenset[str]) -> frozenset[str]:
    """The folders in which something is written."""
    made = (one.path for one in tree.found if one.type == "dir" and one.path not in real)
    return frozenset(map(_above, (*wanted, *made)))


def _same(one: Source, thing: NodeFile | None) -> bool:
    if thing is None or thing.kind != one.type:
        return False
    if one.type == "link":
        return thing.target == one.target
    return (thing.mode, thing.size, thing.mtime) == (one.mode, one.size, one.mtime)
