"""What a node has of a pushed tree, and what must therefore be done there. Pure."""

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
# Here and there: what takes no other's place by itself. A symlink is replaced by anything, and replaces a file.
_UNLIKE = {("dir", "file"), *((here, other) for here in _WORDS for other in ("dir", "other") if here != other)}
_OPEN = 0o700  # what the owner of a folder needs to put files in it


class Thing(NamedTuple):
    """What lies at a path on a node."""

    kind: Kind
    mode: int
    size: int
    mtime: int
    owner: int
    target: str = ""


@dataclass(frozen=True)
class There:
    """What a node says.

    Attributes:
        things: what lies at those of the wanted paths where something lies; the destination itself is ``""``.
        closed: folders among them in which the user may not write as they are.
        user: the user's number.
        tools: of ``zstd`` and ``ssh`` those that it has.
        free_bytes: where the push leads, when that is known.
        staged: bytes that broken pushes have left there; None: nothing is left.
        refused: why it can take nothing.
    """

    things: Mapping[str, Thing] = field(default_factory=dict)
    closed: frozenset[str] = frozenset()
    user: int = 0
    tools: frozenset[str] = frozenset()
    free_bytes: int | None = None
    staged: int | None = None
    refused: str = ""


@dataclass(frozen=True)
class Lack:
    """What is to be done on a node: all that is kept of its answer, which may be long.

    Attributes:
        wanted: the paths of files and symlinks that it lacks, or has otherwise.
        folders: those below the destination that are made or get another mode, see ``folders``.
        incomplete: whether there is anything to do but to send files.
        refused: why it cannot take the tree; nothing is sent that could not be put to its place.
        has_ssh: whether it can pass bytes on.
        free_bytes: where the push leads, when that is known.
        staged: bytes that broken pushes have left there.
    """

    wanted: frozenset[str] = frozenset()
    folders: tuple[tuple[str, int], ...] = ()
    incomplete: bool = False
    refused: str = ""
    has_ssh: bool = False
    free_bytes: int | None = None
    staged: int = 0


def lack(tree: Tree, there: There, destination: str) -> Lack:
    """Conclude from what a node has what is to be done on it."""
    wanted = differing(tree, there)
    return Lack(
        wanted,
        folders(tree, there, wanted),
        incomplete(tree, there),
        refusal(tree, there, destination, wanted),
        "ssh" in there.tools,
        there.free_bytes,
        there.staged or 0,
    )


def read(out: str, token: str) -> There:
    """What ``push/compare.sh.j2`` printed; ``token`` begins every answer, so that a name may hold any character.

    Raises:
        ClusterctlError: the output is not whole.
    """
    rows = [row.removesuffix("\n") for row in out.split(f"{token} ")[1:]]
    if not rows or rows[-1] != "end":
        raise ClusterctlError("its answer is incomplete")
    things: dict[str, Thing] = {}
    facts: dict[str, str] = {}
    closed: list[str] = []
    link = ""
    for row in rows[:-1]:
        word, _, rest = row.partition(" ")
        if word == "at":
            mode, size, mtime, owner, path = rest.split(" ", 4)
            number = int(mode, 16)
            kind = _KINDS.get(stat.S_IFMT(number), "other")
            things[_path(path)] = Thing(kind, number & 0o777, whole(size), whole(mtime), whole(owner))
        elif word == "link":
            link = _path(rest)
        elif word == "to" and link in things:
            things[link] = things[link]._replace(target=rest)
        elif word == "closed":
            closed.append(_path(rest))
        else:
            facts[word] = rest
    if "refuse" in facts:
        return There(refused=" ".join(facts["refuse"].split()))
    return There(
        things,
        frozenset(closed),
        whole(facts["user"]),
        frozenset(facts["tools"].split()),
        whole(facts["free"]) if "free" in facts else None,
        whole(facts["staged"]) if "staged" in facts else None,
    )


def differing(tree: Tree, there: There) -> frozenset[str]:
    """The paths of files and symlinks that the node lacks, or has with another size, time, mode or target."""
    real = _real(tree, there)
    return frozenset(one.path for one in tree.found if one.type != "dir" and not _same(one, _thing(one, there, real)))


def folders(tree: Tree, there: There, wanted: frozenset[str]) -> tuple[tuple[str, int], ...]:
    """The folders below the destination that are made, or get another mode if only for a while; parents first.

    Args:
        tree: what is pushed.
        there: what the node has.
        wanted: the files and symlinks that are put there.

    Returns:
        Their paths, and the modes that they have in the end. A folder of another user keeps its mode.
    """
    real = _real(tree, there)
    closed = there.closed & _written(tree, real, wanted)

    def changes(one: Source) -> bool:
        if one.path not in real:
            return True
        thing = there.things[one.path]
        return there.user in (0, thing.owner) and (thing.mode != one.mode or one.path in closed)

    return tuple((one.path, one.mode) for one in tree.found if one.type == "dir" and changes(one))


def incomplete(tree: Tree, there: There) -> bool:
    """Whether there is anything to do on the node but to send files."""
    lacks = not tree.single and "" not in _real(tree, there)
    return lacks or there.staged is not None or bool(folders(tree, there, frozenset()))


def refusal(tree: Tree, there: There, destination: str, wanted: frozenset[str]) -> str:
    """Why the node cannot take the tree, empty where it can."""
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
        f"{_join(destination, path)} belongs to another user, and nothing may be written in it"
        for path in sorted(there.closed & _written(tree, real, wanted) - {""})
        if there.things[path].owner != there.user
    ]
    return f"{wrong[0]} (and {len(wrong) - 1} more like this)" if len(wrong) > 1 else "".join(wrong)


def opened(mode: int) -> int:
    """A folder's mode while files are put in it."""
    return mode | _OPEN


def _path(path: str) -> str:
    return "" if path == "." else path


def _join(destination: str, path: str) -> str:
    return f"{destination}/{path}" if path else destination


def _above(path: str) -> str:
    return path.rpartition("/")[0]


def _real(tree: Tree, there: There) -> frozenset[str]:
    """The folders of the tree that are folders on the node, and not merely behind a symlink that lies in the way."""
    real = {""} if "" in there.things and there.things[""].kind == "dir" else set[str]()
    for one in tree.found:
        if one.type == "dir" and _above(one.path) in real:
            thing = there.things.get(one.path)
            if thing and thing.kind == "dir":
                real.add(one.path)
    return frozenset(real)


def _thing(one: Source, there: There, real: frozenset[str]) -> Thing | None:
    return there.things.get(one.path) if not one.path or _above(one.path) in real else None


def _written(tree: Tree, real: frozenset[str], wanted: frozenset[str]) -> frozenset[str]:
    """The folders in which something is put."""
    made = (one.path for one in tree.found if one.type == "dir" and one.path not in real)
    return frozenset(map(_above, (*wanted, *made)))


def _same(one: Source, thing: Thing | None) -> bool:
    if thing is None or thing.kind != one.type:
        return False
    if one.type == "link":
        return thing.target == one.target
    return (thing.mode, thing.size, thing.mtime) == (one.mode, one.size, one.mtime)
