"""Parses Ansible's files: inventories as INI, YAML and JSON, and the files of variables next to an inventory.

An INI inventory has ``[group]``, ``[group:vars]``, ``[group:children]``, and hosts before any of them. A YAML inventory
has groups with ``hosts``, ``vars`` and ``children``. ``ansible-inventory --list`` and Ansible's inventory scripts print
JSON: groups and ``_meta.hostvars``.

``group_vars/`` and ``host_vars/`` are found like in Ansible's ``DataLoader.find_vars_files``: the first existing
candidate of a name counts, in the order no suffix, ``.yml``, ``.yaml``, ``.json``. A folder means all files in and
below it, in the order of their names.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from provision.inventory.document import Document, NotYamlError, read, shown
from provision.inventory.foreign.ansible import AnsibleInventory, Var
from trainer.agent.contract.untrusted import UntrustedError, parse_object

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

MAX_BYTES = 4 << 20  # of an inventory, and of all variable files next to it
MAX_FILES = 5000
_SUFFIXES = ("", ".yml", ".yaml", ".json")
_FOLDERS: dict[str, Literal["group", "host"]] = {"group_vars": "group", "host_vars": "host"}


@dataclass(frozen=True)
class VarsFile:
    """A file of variables of a group or a host.

    Attributes:
        kind: of the owner.
        owner: the name of the group or host.
        name: the file's path, relative to the inventory's folder.
        text: the content; None if the file is not read.
        why: the reason why the file is not read.
    """

    kind: Literal["group", "host"]
    owner: str
    name: str
    text: str | None = None
    why: str = ""


def vars_files(inventory: Path) -> tuple[VarsFile, ...]:
    """The variable files next to an inventory; a later file overrides an earlier one."""
    return tuple(_read_files(inventory.parent, _find_files(inventory.parent)))


def _find_files(folder: Path) -> Iterator[tuple[Literal["group", "host"], str, Path, str]]:
    for name, kind in _FOLDERS.items():
        owners: dict[str, list[Path]] = {}
        for path in _list_folder(folder / name):
            owners.setdefault(path.name.removesuffix(_suffix(path)), []).append(path)
        for owner, paths in owners.items():
            first, *others = sorted(paths, key=lambda path: _SUFFIXES.index(_suffix(path)))
            for path in _below(first):
                yield kind, owner, path, ""
            for path in others:
                yield kind, owner, path, f"Ansible reads {first.relative_to(folder)} in its place"


def _read_files(folder: Path, found: Iterator[tuple[Literal["group", "host"], str, Path, str]]) -> Iterator[VarsFile]:
    left = MAX_BYTES
    for number, (kind, owner, path, reason) in enumerate(found):
        name = str(path.relative_to(folder))
        if reason or number >= MAX_FILES:
            yield VarsFile(kind, owner, name, why=reason or f"there are more than {MAX_FILES:,} files")
            continue
        try:
            if not path.is_file():
                raise OSError(0, "it is not a file")  # noqa: TRY301
            with path.open("rb") as file:
                raw = file.read(left + 1)
            text = raw.decode("utf-8-sig")
        except (OSError, ValueError) as error:
            why = (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8"
            yield VarsFile(kind, owner, name, why=why)
            continue
        if len(raw) > left:
            yield VarsFile(kind, owner, name, why=f"the files have more than {MAX_BYTES >> 20} MiB")
            continue
        left -= len(raw)
        if text.startswith("$ANSIBLE_VAULT"):
            yield VarsFile(kind, owner, name, why="it is encrypted with Ansible Vault")
        else:
            yield VarsFile(kind, owner, name, text)


def _suffix(path: Path) -> str:
    return path.suffix if path.suffix in _SUFFIXES else ""


def _below(path: Path, *, levels: int = 10) -> Iterator[Path]:
    """The file, or the files of a folder."""
    if not path.is_dir():
        yield path
    elif levels:
        for each in _list_folder(path):
            if (each.is_dir() and not each.suffix) or (not each.is_dir() and each.suffix in _SUFFIXES):
                yield from _below(each, levels=levels - 1)


def _list_folder(folder: Path) -> list[Path]:
    """A folder's entries, sorted, without hidden files and editors' backups; empty if it cannot be read."""
    try:
        return sorted(each for each in folder.iterdir() if not each.name.startswith(".") and each.name[-1] != "~")
    except OSError:
        return []


# --- INI ------------------------------------------------------------------------------------------

_SECTION = re.compile(r"\[(?P<group>[^\[\]:]+)(?::(?P<kind>[^\[\]]*))?\]\s*([#;].*)?")
IPV6 = re.compile(r"\[(?P<host>[0-9A-Fa-f]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)\](?::(?P<port>[0-9]+))?")
_WITH_PORT = re.compile(r"(?P<host>[^:\[\]]*(?:\[[^\]]*\][^:\[\]]*)*):(?P<port>[0-9]+)")


def parse_ini(text: str) -> AnsibleInventory:
    """The groups, hosts and variables of the file, as written."""
    parsed = AnsibleInventory()
    group, kind = "ungrouped", ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith(("#", ";")):
            continue
        if line.startswith("[") and not IPV6.match(line):
            found = _SECTION.fullmatch(line)
            if not found or (found["kind"] or "") not in {"", "vars", "children"}:
                parsed.problems.append(
                    (number, f"{shown(line)} is not a section: [GROUP], [GROUP:vars] or [GROUP:children]")
                )
                group, kind = "", ""
                continue
            group, kind = found["group"].strip(), found["kind"] or ""
            parsed.group(group)
        elif not group:
            continue  # the section's mistake has been recorded
        elif kind == "vars":
            key, equals, value = line.partition("=")
            if equals:
                parsed.group(group).vars[key.strip()] = Var(_ini_value(value), number)
            else:
                parsed.problems.append((number, f"{shown(line)} is not NAME=VALUE"))
        elif kind == "children":
            parsed.group(group).children.setdefault(line.partition("#")[0].strip(), number)
        else:
            _host_line(parsed, group, line, number)
    return parsed


def _host_line(parsed: AnsibleInventory, group: str, line: str, number: int) -> None:
    try:
        pattern, *words = shlex.split(line, comments=True)
    except ValueError as error:
        parsed.problems.append((number, f"{shown(line)}: {str(error).lower()}"))
        return
    variables: dict[str, Var] = {}
    if found := IPV6.fullmatch(pattern):
        pattern = found["host"]
        if found["port"]:
            variables["ansible_port"] = Var(found["port"], number)
    elif found := _WITH_PORT.fullmatch(pattern):
        pattern = found["host"]
        variables["ansible_port"] = Var(found["port"], number)
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            parsed.problems.append((number, f"{shown(word)} is not NAME=VALUE"))
        variables[key] = Var(value, number)
    if "=" in pattern:
        parsed.problems.append((number, f"{shown(pattern)} is not a host"))
        return
    parsed.add(group, pattern, variables, number)


def _ini_value(text: str) -> str:
    """A group's variable, which Ansible reads as a Python literal, or else as text."""
    text = re.sub(r"\s[#;].*", "", f" {text}").strip()
    with suppress(ValueError, SyntaxError):
        literal = ast.literal_eval(text)
        if isinstance(literal, str):
            return literal
    return text


# --- YAML -----------------------------------------------------------------------------------------


def parse_yaml(text: str) -> AnsibleInventory:
    """The groups, hosts and variables of the file, as written."""
    parsed = AnsibleInventory()
    try:
        document = read(text, typed=frozenset())
    except NotYamlError as error:
        parsed.problems.append((0, str(error)))
        return parsed
    for line, mistake in document.mistakes:
        if "the tag " in mistake:  # !vault and !unsafe: the values are skipped
            parsed.notes.append(f"{mistake}; its value is skipped")
        else:
            parsed.problems.append((line, mistake))
    if not isinstance(document.data, dict):
        parsed.problems.append((1, "is not a mapping of groups"))
        return parsed
    for name, content in document.data.items():
        _yaml_group(parsed, document, name, content, (name,))
    return parsed


def add_files(parsed: AnsibleInventory, files: Sequence[VarsFile]) -> None:
    """Add the variables in ``group_vars/`` and ``host_vars/``, and notes about files that are not used."""
    for file in files:
        known = parsed.groups if file.kind == "group" else parsed.hosts
        if file.owner not in known:
            parsed.notes.append(f"{shown(file.name)} is not used: there is no {file.kind} {shown(file.owner)}")
        elif file.text is None:
            parsed.notes.append(f"{shown(file.name)} is not read: {file.why}")
        else:
            found = _file_vars(parsed, shown(file.name), file.text)
            parsed.beside.setdefault((file.kind, file.owner), {}).update(found)


def _file_vars(parsed: AnsibleInventory, name: str, text: str) -> dict[str, Var]:
    try:
        document = read(text, typed=frozenset())
    except NotYamlError as error:
        parsed.beside_problems.append(f"{name} {error}")
        return {}
    for _, mistake in document.mistakes:
        if "the tag " in mistake:
            parsed.notes.append(f"{name}: {mistake}; its value is skipped")
        else:
            parsed.beside_problems.append(f"{name}: {mistake}")
    if document.data is None:
        return {}
    if not isinstance(document.data, dict):
        parsed.beside_problems.append(f"{name} is not a mapping of variables")
        return {}
    return {
        key: Var(value if isinstance(value, str) else str(value), document.lines.get((key,), 0), name)
        for key, value in document.data.items()
    }


def _yaml_group(parsed: AnsibleInventory, document: Document, name: str, content: Any, place: tuple[str, ...]) -> None:
    group = parsed.group(name)
    for key, values in _mapping(parsed, document, content, place).items():
        inner = (*place, key)
        line = document.lines.get(inner, 0)
        if key == "hosts":
            for host, variables in _mapping(parsed, document, values, inner).items():
                at = (*inner, host)
                parsed.add(name, host, _yaml_vars(parsed, document, variables, at), document.lines.get(at, line))
        elif key == "vars":
            group.vars |= _yaml_vars(parsed, document, values, inner)
        elif key == "children":
            for child, below in _mapping(parsed, document, values, inner).items():
                at = (*inner, child)
                group.children.setdefault(child, document.lines.get(at, line))
                _yaml_group(parsed, document, child, below, at)
        else:
            parsed.problems.append((line, f"{shown(key)} in the group {name}: it may have hosts, vars and children"))


def _yaml_vars(parsed: AnsibleInventory, document: Document, values: Any, place: tuple[str, ...]) -> dict[str, Var]:
    return {
        key: Var(value if isinstance(value, str) else str(value), document.lines.get((*place, key), 0))
        for key, value in _mapping(parsed, document, values, place).items()
    }


def _mapping(parsed: AnsibleInventory, document: Document, values: Any, place: tuple[str, ...]) -> dict[str, Any]:
    if values is None:
        return {}
    if isinstance(values, dict):
        return values
    parsed.problems.append((document.lines.get(place, 0), f"{'.'.join(place)} must be a mapping"))
    return {}


# --- JSON -----------------------------------------------------------------------------------------


def is_listing(text: str) -> bool:
    """Whether the text is JSON whose groups are lists of hosts, or contain such lists."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        data = parse_object(text, limit=MAX_BYTES)
    except UntrustedError:
        return False
    groups = [each for each in data.values() if isinstance(each, dict)]
    return (
        "_meta" in data
        or (bool(data) and len(groups) < len(data))
        or any(isinstance(each.get(key), list) for each in groups for key in ("hosts", "children"))
    )


def parse_listing(text: str) -> AnsibleInventory:
    """The groups, hosts and variables."""
    parsed = AnsibleInventory()
    try:
        data = parse_object(text, limit=MAX_BYTES)
    except UntrustedError as error:
        parsed.problems.append((0, str(error)))
        return parsed
    meta = data.pop("_meta", None)
    for name, content in data.items():
        _listing_group(parsed, name, content)
    variables = meta.get("hostvars") if isinstance(meta, dict) else None
    for host, values in variables.items() if isinstance(variables, dict) else ():
        if isinstance(values, dict):
            _add_host(parsed, "all", host, _listing_vars(values))
    return parsed


def _listing_group(parsed: AnsibleInventory, name: str, content: Any) -> None:
    group = parsed.group(name)
    if isinstance(content, list):
        content = {"hosts": content}
    if not isinstance(content, dict):
        parsed.problems.append((0, f"the group {shown(name)} is neither a list nor an object"))
        return
    for key, values in content.items():
        if key == "vars" and isinstance(values, dict):
            group.vars |= _listing_vars(values)
        elif key in {"hosts", "children"} and all(isinstance(each, str) for each in _items(values)):
            for each in _items(values):
                if key == "hosts":
                    _add_host(parsed, name, each, {})
                else:
                    group.children.setdefault(each, 0)
                    parsed.group(each)  # a group without hosts has no separate entry
        else:
            parsed.problems.append((0, f"{shown(str(key))} in the group {shown(name)} is not understood"))


def _items(values: Any) -> Iterable[Any]:
    return values if isinstance(values, list | dict) else [values]


def _add_host(parsed: AnsibleInventory, group: str, host: str, variables: dict[str, Var]) -> None:
    """Add a host. Names are not patterns in this format."""
    if "[" in host or "]" in host:
        parsed.problems.append((0, f"{shown(host)} is not a host"))
    else:
        parsed.add(group, host, variables, 0)


def _listing_vars(values: dict[str, Any]) -> dict[str, Var]:
    return {
        key: Var(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 0)
        for key, value in values.items()
    }
