"""Ansible's INI inventories: ``[group]``, ``[group:vars]``, ``[group:children]``, and hosts before any of them."""

from __future__ import annotations

import ast
import re
import shlex
from contextlib import suppress

from provision.inventory.document import shown
from provision.inventory.foreign.ansible import Parsed, Var

_SECTION = re.compile(r"\[(?P<group>[^\[\]:]+)(?::(?P<kind>[^\[\]]*))?\]\s*([#;].*)?")
IPV6 = re.compile(r"\[(?P<host>[0-9A-Fa-f]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)\](?::(?P<port>[0-9]+))?")
_WITH_PORT = re.compile(r"(?P<host>[^:\[\]]*(?:\[[^\]]*\][^:\[\]]*)*):(?P<port>[0-9]+)")


def parse(text: str) -> Parsed:
    """The groups, hosts and variables of the file, as they were written."""
    parsed = Parsed()
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
            continue  # its section was no section, which has been said
        elif kind == "vars":
            key, equals, value = line.partition("=")
            if equals:
                parsed.group(group).vars[key.strip()] = Var(_value(value), number)
            else:
                parsed.problems.append((number, f"{shown(line)} is not NAME=VALUE"))
        elif kind == "children":
            parsed.group(group).children.setdefault(line.partition("#")[0].strip(), number)
        else:
            _host_line(parsed, group, line, number)
    return parsed


def _host_line(parsed: Parsed, group: str, line: str, number: int) -> None:
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


def _value(text: str) -> str:
    """A variable of a group, which Ansible reads as a literal of Python's, and as text where it is none."""
    text = re.sub(r"\s[#;].*", "", f" {text}").strip()
    with suppress(ValueError, SyntaxError):
        literal = ast.literal_eval(text)
        if isinstance(literal, str):
            return literal
    return text
