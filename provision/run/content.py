"""What lies at the nodes' own paths, compared: data and models that a configuration names by absolute paths. Pure.

``trainer/agent/node/digests.py`` takes the fingerprints and says what they stand for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from provision.checks.kit.host import many
from provision.inventory import fold
from provision.model import Finding
from provision.run.fields import conform
from trainer.untrusted import UntrustedError, parse_object

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CHECK = "gate.data"
_LIMIT = 8 << 20  # characters of an answer
_ENTRY = re.compile(r"-?[0-9]{1,20} \S{1,64}")
_WHY = "Ranks that read other data or another model train something else; one that finds nothing fails, and all wait."
_EXPECTED = "the same content on every node"
_COPY = "copy it there: clusterctl push SOURCE {path} --limit {nodes}"


@dataclass(frozen=True)
class Content:
    """What a node has at a path."""

    state: str = "missing"
    error: str = ""
    names: str = ""
    content: str = ""
    partial: bool = False
    files: int = 0
    bytes: int = 0
    entries: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Whatever a node says, every entry can be compared.

        Raises:
            UntrustedError: one is not ``SIZE DIGEST``.
        """
        if not all(isinstance(each, str) and _ENTRY.fullmatch(each) for each in self.entries.values()):
            raise UntrustedError("has an entry that is none")

    def unlike(self, other: Content) -> str | None:
        """How this differs from another one, in a few words; None where it does not, as far as both were read."""
        if self.state != other.state:
            return f"is a {self.state}, not a {other.state}"
        if self.entries and other.entries:
            for name in sorted(self.entries.keys() | other.entries.keys()):
                if word := _unlike(self.entries.get(name), other.entries.get(name)):
                    return f"{word} {name}" if name else word
        elif self.names and other.names and self.names != other.names:
            return f"has other names or sizes ({self.files} files, {other.files} there)"
        elif not (self.partial or other.partial) and self.content != other.content:
            return "has other content"
        return None


def parse(text: str) -> dict[str, Content]:
    """The agent's line: what lies at each path; empty when it is not the agent's line."""
    try:
        said = parse_object(text, limit=_LIMIT)
    except UntrustedError:
        return {}
    return {path: found for path, one in said.items() if (found := _content(one)) is not None}


def _content(said: Any) -> Content | None:
    if not isinstance(said, dict):
        return None
    try:
        return Content(**conform(Content, said))
    except UntrustedError:
        return None


def compare(path: str, found: Mapping[str, Content], *, what: str = "") -> Iterator[Finding]:
    """A finding for every node: FAIL where the path is missing, cannot be read or is not what most nodes have.

    Where no content is that of most, every node fails: nobody can say which one is right.

    Args:
        path: absolute.
        found: what each node has there.
        what: names it for a person, such as ``model_name_or_path``.
    """
    shown = f"{what} {path}" if what else path
    there = {name: each for name, each in found.items() if each.state in {"file", "folder"}}
    groups = _groups(there)
    right = groups[0] if len(groups) == 1 or (groups and 2 * len(groups[0]) > len(found)) else ()
    for name, each in found.items():
        if each.state == "missing":
            said = f"{shown} is missing; it exists on {fold(there)} only" if there else f"{shown} is missing"
            fix = _COPY.format(path=path, nodes=name) if there else "correct the path, or put it there"
            yield _fail(name, said, fix)
        elif name not in there:
            yield _fail(name, f"{shown}: {each.error}", "see ls -la, and whether its file system answers")
        elif right and name in right:
            said = f"{shown}: {many(each.files, 'file')}"
            yield Finding(CHECK, name, "OK", f"{said}, compared by name and size" if each.partial else said)
        elif right:
            how = each.unlike(found[right[0]]) or "is another"
            yield _fail(name, f"{shown} {how}, compared with {fold(right)}", _COPY.format(path=path, nodes=name))
        else:
            others = next(group for group in groups if name not in group)
            how = each.unlike(found[others[0]]) or "is another"
            yield _fail(name, f"{shown} {how}, compared with {fold(others)}", _COPY.format(path=path, nodes="NODES"))


def _groups(found: Mapping[str, Content]) -> list[tuple[str, ...]]:
    """The nodes by what they have, the largest group first."""
    groups: list[list[str]] = []
    for name, each in found.items():
        group = next((one for one in groups if each.unlike(found[one[0]]) is None), None)
        if group is None:
            groups.append([name])
        else:
            group.append(name)
    return sorted((tuple(group) for group in groups), key=lambda group: -len(group))


def _unlike(mine: str | None, theirs: str | None) -> str:
    """The word before the name of a file that differs; "" where it does not."""
    if mine is None:
        return "lacks"
    if theirs is None:
        return "has besides"
    (size, digest), (other_size, other_digest) = mine.split(), theirs.split()
    if size != other_size:
        return f"has {size} bytes, not {other_size}, in"
    return "has other content in" if "-" not in {digest, other_digest} and digest != other_digest else ""


def _fail(node: str, observed: str, fix: str) -> Finding:
    return Finding(CHECK, node, "FAIL", observed, _EXPECTED, _WHY, fix)
