"""ClusterShell's group files: lines of ``GROUP: NODES`` (``groups.d/local.cfg``), and ``cluster.yaml``.

A group of ``cluster.yaml`` belongs to a source; a reference without a source means a group of the same source.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from provision.inventory.document import Document, NotYamlError, read, shown
from provision.inventory.foreign.found import Found, host
from provision.inventory.groups import resolve
from provision.inventory.names import MAX_NODES, expand
from provision.inventory.selection import ALL, parts

if TYPE_CHECKING:
    from provision.inventory.new_nodes import Wanted

KIND = "ClusterShell group file"
_LINE = re.compile(r"(?P<group>[^\s:#\[\]{}'\",=]+):(?:[ \t]+(?P<nodes>[^#]*))?(?:#.*)?")
_REFERENCE = re.compile(r"@(?P<name>[^\s,!&@:\[\]]+)(?=[\s,!&^]|$)")


def is_flat(lines: list[str]) -> bool:
    """Whether every line is a group with its nodes, and not YAML."""
    found = [_LINE.fullmatch(line) for line in lines]
    return bool(found) and all(each and _is_nodes(each["nodes"] or "") for each in found)


def _is_nodes(text: str) -> bool:
    return bool(re.fullmatch(r"[\w.,@!&^\[\]/*?: -]+", text)) and not re.search(r":\s|:$", text)


def is_sources(data: Any) -> bool:
    """Whether this is the content of a ``cluster.yaml``: sources with groups, each a text or a list of texts."""
    return (
        isinstance(data, dict)
        and bool(data)
        and all(
            isinstance(groups, dict)
            and bool(groups)
            and not groups.keys() & {"hosts", "vars", "children"}
            and all(isinstance(each, str) or _is_texts(each) for each in groups.values())
            for groups in data.values()
        )
    )


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def read_flat(text: str) -> Found:
    """The nodes and groups of a flat file; a group on several lines has the nodes of all these lines."""
    written: dict[str, str] = {}
    lines: dict[str, int] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if found := _LINE.fullmatch(line) if line and not line.startswith("#") else None:
            name = found["group"]
            nodes = (found["nodes"] or "").strip()
            written[name] = f"{written[name]},{nodes}" if name in written and nodes else written.get(name, nodes)
            lines.setdefault(name, number)
    return _convert_groups(written, lines)


def read_sources(text: str) -> Found:
    """The nodes and groups of a ``cluster.yaml``."""
    try:
        document = read(text, typed=frozenset())
    except NotYamlError as error:
        return Found(KIND, (), problems=(str(error),))
    if document.mistakes:
        return Found(KIND, (), problems=document.problems())
    counts = Counter(name for groups in document.data.values() for name in groups)
    written: dict[str, str] = {}
    lines: dict[str, int] = {}
    names: dict[str, str] = {}
    for source, groups in document.data.items():
        for name, value in groups.items():
            key = f"{source}:{name}"
            nodes = value if isinstance(value, str) else ",".join(value)
            written[key] = _REFERENCE.sub(rf"@{re.escape(source)}:\g<name>", nodes)
            lines[key] = document.lines[source, name]
            names[key] = name if counts[name] == 1 else f"{source}-{name}"
    return _convert_groups(written, lines, names)


def _convert_groups(written: dict[str, str], lines: dict[str, int], names: dict[str, str] | None = None) -> Found:
    """The nodes that the groups name, in the order of the file, and the groups."""
    document = Document(origin=lambda place: f"line {lines[place[-1]]}: {shown(place[-1])}")
    nodes: dict[str, str] = {}  # with the groups that name them
    for name, text in written.items():
        for node in _group_names(document, name, text):
            nodes.setdefault(node, name)
        if len(nodes) > MAX_NODES:
            document.mistake((name,), f"makes more than {MAX_NODES} nodes")
            break
    hosts = [found for node, name in nodes.items() if (found := _host(document, node, name, lines))]
    groups = {} if document.mistakes else resolve(document, written, list(nodes))
    if problems := document.problems():
        return Found(KIND, (), problems=problems)
    places = {node: place for place, node in enumerate(nodes)}
    named = {
        (names or {}).get(name, name): tuple(places[node] for node in inside)
        for name, inside in groups.items()
        if not (name.rpartition(":")[2] == ALL and len(inside) == len(nodes))
    }
    renamed = [
        f"{shown(old)} is called {shown(new)}" for old, new in (names or {}).items() if old.rpartition(":")[2] != new
    ]
    return Found(KIND, tuple(hosts), groups=named, notes=tuple(renamed))


def _group_names(document: Document, group: str, text: str) -> list[str]:
    """The nodes that an expression names directly."""
    try:
        atoms = [part.removeprefix("!") for _, part in parts(text)]
        named = [(atom, expand(atom.removeprefix("@"))) for atom in atoms]
        return [node for atom, nodes in named if not (atom[0] == "@" or set("*?") & set(atom)) for node in nodes]
    except ValueError as error:
        document.mistake((group,), str(error))
        return []


def _host(document: Document, node: str, group: str, lines: dict[str, int]) -> Wanted | None:
    try:
        return host(node, origin=f"line {lines[group]}")
    except ValueError as error:
        document.mistake((group,), str(error))
        return None
