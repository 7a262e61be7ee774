"""Loads ``inventory.yaml`` into an ``Inventory``. Reports all mistakes at once, each with its path and line.

``inventory.example.yaml`` shows every key, ``docs/inventory.md`` explains them.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from provision import services as registry
from provision.checks import problems
from provision.errors import InventoryError
from provision.inventory.document import MAX_BYTES, MAX_SHOWN, NotYamlError, read, shown
from provision.inventory.groups import read_groups
from provision.inventory.names import MAX_NODES, check_address, check_name, expand, likely_typos, split_target
from provision.inventory.schema import (
    NodeSection,
    Section,
    ServicesSection,
    SshSection,
    TopSection,
    TrainSection,
    as_port,
    as_text,
    as_user,
    validate,
)
from provision.model import CheckOptions, Inventory, Node, Ssh, TrainDefaults

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from provision.inventory.document import Document, Place

_SHEBANG_LIMIT = 127  # bytes of a `#!` line that every Linux accepts (BINPRM_BUF_SIZE was 128 before 5.1)
_ADDRESSES = ("address", "data_address")
_HINT = "correct the file and run the command again; inventory.example.yaml shows every key"


# --- load ----------------------------------------------------------------------------------------


def load(path: Path) -> Inventory:
    """Read an inventory file.

    Raises:
        InventoryError: the file cannot be read or has mistakes; ``problems`` lists all of them.
    """
    return parse(_read_text(path), path)


def parse(text: str, path: Path, *, origin: Callable[[Place], str] | None = None) -> Inventory:
    """The inventory with this text.

    Args:
        text: the file's content.
        path: the file; for generated text it need not exist.
        origin: the source of the value at a place, for generated text; shown instead of a line.

    Raises:
        InventoryError: the text has mistakes; ``problems`` lists all of them.
    """
    try:
        document = read(text, typed=frozenset({"services", "checks"}))
        document.origin = origin
    except NotYamlError as error:
        raise InventoryError(f"{path} is not YAML", problems=[str(error)], hint=_hint(text, path)) from error
    if document.data is None and not document.mistakes:
        raise InventoryError(f"{path} is empty", hint="write at least prefix: and nodes:, as in inventory.example.yaml")
    inventory = _build(document, path.absolute())
    problems = document.problems()
    if problems or inventory is None:
        count = "a mistake" if len(document.mistakes) == 1 else f"{len(document.mistakes):,} mistakes"
        raise InventoryError(f"{path} has {count}", problems=problems, hint=_hint(text, path))
    return replace(inventory, warnings=_warnings(inventory))


def _hint(text: str, path: Path) -> str:
    """The next step. For a file without an inventory's keys it is the command that reads other tools' files."""
    if re.search(r"""(?m)^["']?(prefix|nodes)["']?\s*:|^\s*\{""", text) or not path.exists():
        return _HINT
    command = f"clusterctl init --from {shlex.quote(str(path))}"
    return f"if it is an Ansible inventory, a hostfile or a list of groups: {command}"


def _read_text(path: Path) -> str:
    hint = "name the file with --inventory FILE, or write one: clusterctl init gpu01=192.168.20.14 gpu02=192.168.20.15"
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise InventoryError(f"{path} does not exist", hint=hint) from None
    except IsADirectoryError:
        raise InventoryError(f"{path} is a folder, not an inventory file", hint=hint) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InventoryError(f"{shown(str(path), limit=4096)} cannot be read: {reason}", hint=hint) from error
    if len(raw) > MAX_BYTES:
        raise InventoryError(
            f"{path} is larger than {MAX_BYTES >> 20} MiB: it is not an inventory",
            hint="name the file with --inventory FILE; ranges keep an inventory short: gpu[01-04]: 10.0.0.[1-4]",
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InventoryError(
            f"{path} is not UTF-8: byte {raw[error.start]:#04x} in line {line}", hint="save the file as UTF-8"
        ) from error


def _build(document: Document, path: Path) -> Inventory | None:
    top = validate(document, TopSection, document.data, ())
    data = document.data if isinstance(document.data, dict) else {}
    ssh = validate(document, SshSection, data.get("ssh"), ("ssh",))
    train = validate(document, TrainSection, data.get("train"), ("train",))
    services = data.get("services")
    if isinstance(services, dict):  # `hosts:` without a value means the service's defaults
        services = {name: {} if options is None else options for name, options in services.items()}
    chosen = validate(document, ServicesSection, services, ("services",))
    options = _services(document, chosen) if chosen else {}
    checks = check_options(document, data.get("checks"))
    nodes = _nodes(document, data.get("nodes"), (ssh and ssh.port) or 22) if "nodes" in data else ()
    groups = read_groups(document, data.get("groups"), [node.name for node in nodes])
    jump_hosts = _jump_hosts(document, ssh.jump_hosts, nodes) if ssh else ()
    if not (top and ssh and train and chosen and nodes):
        return None
    inventory = Inventory(
        path=path,
        prefix=top.prefix,
        nodes=nodes,
        ssh=Ssh(
            user=ssh.user,
            port=ssh.port,
            key=_file(path, ssh.key) if ssh.key else None,
            known_hosts=_file(path, ssh.known_hosts),
            timeout=ssh.timeout,
            jump_hosts=jump_hosts,
        ),
        train=TrainDefaults(
            config=_file(path, train.config) if train.config else None,
            port=train.port,
            env=train.env,
        ),
        services=options,
        checks=checks,
        groups=groups,
        textfile=top.textfile,
        notify=top.notify,
    )
    for name, value in options.items():
        for key, sentence in registry.get(name).problems(value, inventory):
            document.mistake(("services", name, key) if key else ("services", name), sentence)
    return inventory


def _services(document: Document, chosen: Section) -> dict[str, Section]:
    """The options of every service in the inventory, validated by the service."""
    found = {}
    for name, data in chosen:
        if data is not None:
            options = validate(document, registry.get(name).Options, data, ("services", name))
            if options is not None:
                found[name] = options
    return found


def _file(inventory: Path, text: str) -> Path:
    """A relative path is relative to the inventory."""
    return Path(os.path.normpath(inventory.parent / text))


def _jump_hosts(document: Document, texts: Sequence[str], nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The jump hosts: nodes of the inventory by name or address, and other machines."""
    place: Place = ("ssh", "jump_hosts")
    named = {node.name: node for node in nodes}
    reached = {(node.address, node.user, node.port): node for node in nodes}
    found: dict[str, Node] = {}
    count = 0
    for text in texts:
        user, pattern, port = _target(document, place, text, None)
        addresses = [address for address in _addresses(document, place, [], pattern) if address is not None]
        count += len(addresses)
        if count > MAX_NODES:
            document.mistake(place, f"has more than {MAX_NODES} hosts")
            break
        for address in addresses:
            other = Node(f"{address}:{port}" if port else address, address, user=user, port=port)
            host = named.get(address) or reached.get((address, user, port)) or other
            if host.is_local:
                document.mistake(place, f"{shown(text)} is this machine, which needs no jump host")
            if address in named and (user or port):
                document.mistake(place, f"{shown(text)} is a node: its user and its port are set in nodes")
            found.setdefault(host.name, host)
    return tuple(found.values())


# --- nodes ---------------------------------------------------------------------------------------


def _nodes(document: Document, data: object, default_port: int) -> tuple[Node, ...]:
    if not isinstance(data, dict) or not data:
        document.mistake(("nodes",), "names no node: write at least one line such as `gpu01: 192.168.20.14`")
        return ()
    nodes: list[Node] = []
    first: dict[str, str] = {}
    for pattern, entry in data.items():
        place = ("nodes", pattern)
        try:
            names = expand(pattern)
            for name in names:
                check_name(name)
        except ValueError as error:
            document.mistake(place, str(error))
            names = []
        if len(first) + len(names) > MAX_NODES:
            document.mistake(place, f"makes more than {MAX_NODES} nodes")
            break
        if len(document.mistakes) > 2 * MAX_SHOWN:  # each may have taken as long as a range
            break
        for name in names:
            if name in first:
                line = document.lines["nodes", first[name]]
                document.mistake(place, f"{name} is listed twice, first in line {line} ({shown(first[name])})")
            first.setdefault(name, pattern)
        nodes += _expand_nodes(document, pattern, names, entry)
    _check_unique(document, nodes, first, default_port)
    return tuple(nodes)


def _expand_nodes(document: Document, pattern: str, names: list[str], entry: object) -> list[Node]:
    place: Place = ("nodes", pattern)
    inner = place
    if entry is not None and not isinstance(entry, dict | list):  # gpu03: 192.168.20.16
        try:
            given = as_text(entry)
        except ValueError as error:
            document.mistake(place, str(error))
            return []
        entry = {"address": given}
    else:
        inner = (*place, "address")
    section = validate(document, NodeSection, entry, place)
    if section is None:  # validate the addresses all the same, to report every mistake
        values = entry if isinstance(entry, dict) else {}
        address, data_address = (text if isinstance(text := values.get(key), str) else None for key in _ADDRESSES)
    else:
        address, data_address = section.address, section.data_address
    user, address, port = _target(document, inner, address, section)
    addresses = _addresses(document, inner, names, address)
    data = _addresses(document, (*place, "data_address"), names, data_address)
    return [
        Node(name, at, data_at, section.user or user, section.port or port, section.gpus)
        for name, at, data_at in zip(names, addresses, data, strict=False)
        if section is not None and at is not None
    ]


def _target(
    document: Document, place: Place, text: str | None, section: NodeSection | None
) -> tuple[str | None, str | None, int | None]:
    """The login name, the address and the port of ``[USER@]ADDRESS[:PORT]``."""
    if text is None:
        return None, None, None
    user, address, port = split_target(text.strip())
    number = None
    for key, value, read_value in (("user", user, as_user), ("port", port, as_port)):
        if value is None:
            continue
        try:
            found = read_value(value)
        except ValueError as error:
            document.mistake(place, f"{shown(text)}: {error}")
            continue
        if key == "port":
            number = int(found)
        other = getattr(section, key, None)
        if other not in {None, found}:
            document.mistake(place, f"{shown(text)} has the {key} {found}, but {key}: says {shown(str(other))}")
    return user, address, number


def _addresses(document: Document, place: Place, names: list[str], pattern: str | None) -> list[str] | list[None]:
    if pattern is None:
        return [None] * len(names)
    try:
        addresses = expand(pattern)
        for address in addresses:
            check_address(address)
    except ValueError as error:
        document.mistake(place, str(error))
        return []
    if names and len(names) != len(addresses):
        text = f"{_count(len(names), 'name')}, but {_count(len(addresses), 'address')} in {shown(pattern)}"
        document.mistake(place, f"{text}: a range of names needs a range of as many addresses")
        return []
    return addresses


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def _check_unique(document: Document, nodes: list[Node], written: dict[str, str], default_port: int) -> None:
    """Report nodes with the same address. ``written`` maps a node's name to the key that contains it."""
    reached: dict[tuple[str, int], str] = {}
    at: dict[str, str] = {}
    for node in nodes:
        port = node.port or default_port
        owner = reached.setdefault((_same(node.address), port), node.name)
        at.setdefault(_same(node.address), node.name)
        if owner != node.name:
            text = f"{node.name} has the address of {owner}: {node.address} port {port}"
            document.mistake(("nodes", written[node.name]), text)
    data: dict[str, str] = {}
    for node in nodes:
        if node.data_address is None:
            continue
        address = _same(node.data_address)
        owner = data.setdefault(address, node.name)
        if owner != node.name:
            text = f"{node.name} has the data_address of {owner}: {node.data_address}"
            document.mistake(("nodes", written[node.name]), text)
        elif at.get(address, node.name) != node.name:
            text = f"{node.name}'s data_address is the address of {at[address]}: {node.data_address}"
            document.mistake(("nodes", written[node.name]), text)


def _same(address: str) -> str:
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return address.lower()


def _warnings(inventory: Inventory) -> tuple[str, ...]:
    warnings = list(likely_typos(inventory, inventory.nodes))
    python = f"{inventory.root / 'releases' / ('0' * 12)}/bin/python"
    length = len(f"#!{python}".encode())
    if length > _SHEBANG_LIMIT or " " in python:
        why = "contains a space" if " " in python else f"makes a first line of {length} bytes, over {_SHEBANG_LIMIT}"
        warnings.append(
            f"prefix: {inventory.prefix} {why}; the environment's scripts start through /bin/sh instead of `#!…/python`"
        )
    return tuple(warnings)


_MAX_CHECKS = 1000


def check_options(document: Document, data: object) -> CheckOptions:
    """The section's options. Records mistakes in ``document``."""
    if data is None:
        return CheckOptions()
    if not isinstance(data, dict):
        document.mistake(("checks",), "must be a mapping: check ids with their thresholds, and off: [ids]")
        return CheckOptions()
    off = _off(document, data.get("off"))
    if max(len(data), len(off)) > _MAX_CHECKS:
        document.mistake(("checks",), f"has more than {_MAX_CHECKS:,} checks")
        return CheckOptions()
    limits: dict[str, dict[str, float]] = {}
    for check, values in data.items():
        if check == "off":
            continue
        if isinstance(values, dict):
            limits[check] = values
        elif values is not None:
            wish = f"must be a mapping of thresholds, not {shown(str(values))}; to skip it: off: [{check}]"
            document.mistake(("checks", check), wish)
    for place, sentence in problems(off, limits):
        document.mistake(("checks", *place), sentence)
    return CheckOptions(limits, tuple(off))


def _off(document: Document, off: object) -> list[str]:
    """The checks to skip."""
    if off is None:
        return []
    if isinstance(off, list) and all(isinstance(each, str) for each in off):
        return off
    document.mistake(("checks", "off"), "must be a list of check ids, such as [gpu.persist, net.proxy]")
    return []
