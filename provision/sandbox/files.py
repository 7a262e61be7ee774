"""The files in the user's folder: inventory.yaml, known_hosts and the private key. Other files are never replaced."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from provision.errors import UsageError
from provision.render import render
from provision.sandbox.state import State

INVENTORY = "inventory.yaml"
KNOWN_HOSTS = "known_hosts"
KEY = "id_ed25519"
_HEADER = "# Made by `clusterctl sandbox`"


def check_free(directory: Path) -> None:
    """Refuses a folder where a file of the user would be overwritten.

    Files of an earlier sandbox may be overwritten; their first line names it.

    Raises:
        UsageError: such a file exists.
    """
    for name in (INVENTORY, KNOWN_HOSTS, KEY):
        path = directory / name
        if (path.exists() or path.is_symlink()) and not _ours(path):
            raise UsageError(f"{path} exists and is not a sandbox's file", hint="use an empty folder")


def texts(state: State, key: str, host_keys: Mapping[str, str]) -> dict[str, str]:
    """The content of each file by its name.

    Args:
        state: the sandbox.
        key: the private key for logins.
        host_keys: the public host key of each node, ``ssh-ed25519 AAAA…``.
    """
    header = f"{_HEADER}: sandbox {state.name}"
    inventory = render(
        "sandbox/inventory.yaml.j2",
        header=header,
        name=state.name,
        prefix=_scalar(state.prefix),
        user=_scalar(state.user),
        nodes=[{"name": _scalar(node.name), "address": node.address} for node in state.nodes],
    )
    pins = "".join(f"{node.address} {host_keys[node.name]}\n" for node in state.nodes)
    return {INVENTORY: inventory, KNOWN_HOSTS: f"{header}\n{pins}", KEY: key}


def digests(contents: Mapping[str, str]) -> dict[str, str]:
    """The sha256 of each content."""
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in contents.items()}


def write(state: State, contents: Mapping[str, str]) -> None:
    """Writes the files with the folder's owner: under sudo that is the user, not root."""
    directory = Path(state.directory)
    owner = directory.stat()
    for name, text in contents.items():
        fresh = _fresh(state, name)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600 if name == KEY else 0o644)
            os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            file.write(text)
        fresh.replace(directory / name)


def remove(state: State) -> list[Path]:
    """Removes the files of ``write`` that are unchanged.

    Returns:
        The changed files, which stay.
    """
    directory = Path(state.directory)
    kept = []
    for name, digest in state.files.items():
        _fresh(state, name).unlink(missing_ok=True)  # exists if ``write`` was killed
        path = directory / name
        if path.is_file():
            if hashlib.sha256(path.read_bytes()).hexdigest() == digest:
                path.unlink()
            else:
                kept.append(path)
    return kept


def _fresh(state: State, name: str) -> Path:
    return Path(state.directory, f".{name}.{state.token}")


def _ours(path: Path) -> bool:
    try:
        return path.read_text(encoding="utf-8", errors="replace").startswith(_HEADER)
    except OSError:
        return False


def _scalar(text: str) -> str:
    """A YAML scalar: plain if that is unambiguous, else quoted as JSON, which is valid YAML."""
    plain = re.fullmatch(r"[A-Za-z0-9/][A-Za-z0-9/._-]*", text) and yaml.safe_load(text) == text
    return text if plain else json.dumps(text)
