"""A sandbox's files: its state on disk, and inventory.yaml, known_hosts and the private key in the user's folder.

The state is saved before anything is created, so that leftovers can always be found. The user's other files are never
replaced.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from provision.errors import ClusterctlError, UsageError
from provision.render import render
from provision.sandbox.host import Process, boot_id

DEFAULT_HOME = Path("/var/lib/clusterctl/sandbox")
_FORMAT = 1


@dataclass(frozen=True)
class NodeState:
    """A node: ``link`` is the machine's end of its cable, ``init`` its first process, if it has started."""

    name: str
    address: str
    link: str
    init: Process | None = None


@dataclass(frozen=True)
class State:
    """A sandbox: the names of all its kernel objects and folders.

    Links are named ``ccTOKEN-…``; ``storage`` has one folder per node; ``files`` maps the files in ``directory`` to
    their sha256, so that ``down`` removes only unchanged ones.
    """

    name: str
    token: str
    made: Literal["starting", "up"]
    boot: str
    creator: Process
    created: str
    rootfs: str
    rate: str | None
    subnet: str
    storage: str
    directory: str
    prefix: str
    user: str
    nodes: tuple[NodeState, ...]
    files: dict[str, str] = field(default_factory=dict)

    @property
    def bridge(self) -> str:
        """The switch to which every cable is connected."""
        return f"cc{self.token}-b"

    @property
    def uplink(self) -> tuple[str, str]:
        """The controller's cable: the end with the address, and the one in the switch."""
        return f"cc{self.token}-c", f"cc{self.token}-u"

    @property
    def links(self) -> tuple[str, ...]:
        """Every network device of the sandbox on this machine."""
        return (self.bridge, *self.uplink, *(node.link for node in self.nodes))

    @property
    def same_boot(self) -> bool:
        """Whether the machine has not been restarted, so that the process ids are valid."""
        return self.boot == boot_id()

    def folder(self, node: NodeState | str) -> Path:
        """The folder of a node's disk, log and start script."""
        return Path(self.storage, node if isinstance(node, str) else node.name)


def home() -> Path:
    """The folder of all states: ``$CLUSTERCTL_SANDBOX_HOME`` or ``/var/lib/clusterctl/sandbox``."""
    return Path(os.environ.get("CLUSTERCTL_SANDBOX_HOME") or DEFAULT_HOME).absolute()


@contextmanager
def locked() -> Iterator[None]:
    """Holds the lock under which one process at a time chooses a name and a subnet."""
    folder = home()
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def save(state: State) -> None:
    """Saves the state atomically."""
    target = _path(state.name)
    fresh = target.with_suffix(".new")
    text = json.dumps({"format": _FORMAT, **asdict(state)}, indent=1)
    fresh.write_text(text, encoding="utf-8", errors="surrogateescape")
    fresh.replace(target)


def load(name: str) -> State:
    """The state of the sandbox ``name``.

    Raises:
        UsageError: there is none.
        ClusterctlError: the state file is damaged or from a newer version.
    """
    path = _path(name)
    try:
        data = json.loads(path.read_text(encoding="utf-8", errors="surrogateescape"))
    except FileNotFoundError:
        known = ", ".join(names()) or "none"
        raise UsageError(f"there is no sandbox {name} (existing: {known})", hint="clusterctl sandbox list") from None
    except ValueError as error:
        raise ClusterctlError(f"{path} is damaged: {error}", hint=f"inspect it, then remove {path}") from error
    return _parse(path, data)


def names() -> list[str]:
    """The names of all sandboxes, sorted."""
    folder = home()
    return sorted(path.stem for path in folder.glob("*.json")) if folder.is_dir() else []


def load_all() -> list[State]:
    """The states of all sandboxes, by name."""
    states = []
    for name in names():
        with suppress(UsageError):  # it was removed after the listing
            states.append(load(name))
    return states


def forget(state: State) -> None:
    """Removes the state file, as the last step."""
    _path(state.name).unlink(missing_ok=True)


def _path(name: str) -> Path:
    return home() / f"{name}.json"


def _parse(path: Path, data: dict[str, Any]) -> State:
    if data.pop("format", None) != _FORMAT:
        raise ClusterctlError(
            f"{path} was written by another version of clusterctl", hint="remove the sandbox with that version"
        )
    try:
        nodes = tuple(
            NodeState(**{**node, "init": Process(**node["init"]) if node["init"] else None}) for node in data["nodes"]
        )
        return State(**{**data, "creator": Process(**data["creator"]), "nodes": nodes})
    except (KeyError, TypeError) as error:
        raise ClusterctlError(f"{path} is damaged: {error!r}", hint=f"inspect it, then remove {path}") from error


# --- the files in the user's folder ---------------------------------------------------------------

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
        if (path.exists() or path.is_symlink()) and not _is_ours(path):
            raise UsageError(f"{path} exists and is not a sandbox's file", hint="use an empty folder")


def file_texts(state: State, key: str, host_keys: Mapping[str, str]) -> dict[str, str]:
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


def file_digests(contents: Mapping[str, str]) -> dict[str, str]:
    """The sha256 of each content."""
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in contents.items()}


def write_files(state: State, contents: Mapping[str, str]) -> None:
    """Writes the files with the folder's owner: under sudo that is the user, not root."""
    directory = Path(state.directory)
    owner = directory.stat()
    for name, text in contents.items():
        fresh = _temporary_path(state, name)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600 if name == KEY else 0o644)
            os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            file.write(text)
        fresh.replace(directory / name)


def remove_files(state: State) -> list[Path]:
    """Removes the files of ``write_files`` that are unchanged.

    Returns:
        The changed files, which stay.
    """
    directory = Path(state.directory)
    changed_files = []
    for name, digest in state.files.items():
        _temporary_path(state, name).unlink(missing_ok=True)  # exists if ``write_files`` was killed
        path = directory / name
        if path.is_file():
            if hashlib.sha256(path.read_bytes()).hexdigest() == digest:
                path.unlink()
            else:
                changed_files.append(path)
    return changed_files


def _temporary_path(state: State, name: str) -> Path:
    return Path(state.directory, f".{name}.{state.token}")


def _is_ours(path: Path) -> bool:
    try:
        return path.read_text(encoding="utf-8", errors="replace").startswith(_HEADER)
    except OSError:
        return False


def _scalar(text: str) -> str:
    """A YAML scalar: plain if that is unambiguous, else quoted as JSON, which is valid YAML."""
    plain = re.fullmatch(r"[A-Za-z0-9/][A-Za-z0-9/._-]*", text) and yaml.safe_load(text) == text
    return text if plain else json.dumps(text)
