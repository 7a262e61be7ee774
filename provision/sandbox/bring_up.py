"""Creates a sandbox. If a stage fails or is interrupted, everything is removed."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from ipaddress import IPv4Network
from pathlib import Path
from typing import Literal

from provision.errors import UsageError
from provision.model import Emit, ignore
from provision.sandbox import disk, host, network, node
from provision.sandbox.cluster import Sandbox, remove
from provision.sandbox.disk import TRAINER
from provision.sandbox.host import boot_id, environment, identify, interruptible, uninterrupted
from provision.sandbox.rootfs import find_cached, minimal
from provision.sandbox.rootfs import recipe as minimal_recipe
from provision.sandbox.state import (
    KEY,
    NodeState,
    State,
    check_free,
    file_digests,
    file_texts,
    home,
    load_all,
    locked,
    save,
    write_files,
)
from provision.stages import stage

STAGE = "nodes"
MOST_NODES = 250
Rootfs = Literal["minimal", "host"]
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Options:
    """A sandbox to create.

    Attributes:
        nodes: their number (1 to 250, named node01, node02, …), or their names.
        name: the sandbox's name; None: ``sandbox``, or the next free ``sandbox-2``.
        rootfs: ``minimal``: Debian with sshd and tar, without Python, zstd or rsync; ``host``: this machine's root.
        packages: further Debian packages of a minimal root, such as ``tcsh``; each selection is built once and cached.
        link: the rate of every cable in both directions, such as ``100mbit``; None: not limited.
        directory: the folder for the three files; it must not contain them.
        storage: the folder for the nodes' disks, on a local disk; None: the folder of the states.
        prefix: the inventory's prefix.
        user: the inventory's user, ``root`` or ``trainer``.
        password: the password of root and trainer; None allows keys only. Keys always work.
    """

    nodes: int | Sequence[str] = 3
    name: str | None = None
    rootfs: Rootfs = "minimal"
    packages: Sequence[str] = ()
    link: str | None = None
    directory: Path = Path()
    storage: Path | None = None
    prefix: str = "/opt/llm/current"
    user: str = "root"
    password: str | None = None


def up(options: Options, emit: Emit = ignore) -> Sandbox:
    """Starts a rehearsal cluster and writes ``inventory.yaml``, ``known_hosts`` and ``id_ed25519`` for it.

    SIGINT, SIGTERM and errors undo everything. After SIGKILL ``list_all`` shows a broken sandbox, which ``down``
    removes.

    Args:
        options: the sandbox.
        emit: receives the stages ``rootfs`` (only if one is built) and ``nodes``.

    Raises:
        UsageError: a wrong option, not root, or a program is missing; nothing was changed.
        NodesFailedError: nodes did not come up.
        ClusterctlError: ``ip``, ``debootstrap`` or another program failed.
        InterruptedByUser: SIGINT, SIGTERM or SIGHUP.
    """
    hostnames = _hostnames(options.nodes)
    _check_name(options.name)
    _check_root(options.rootfs, options.packages)
    if options.link:
        network.check_rate(options.link)
    if options.user not in {"root", TRAINER}:
        raise UsageError(f"a sandbox's nodes have no user {options.user}", hint=f"root or {TRAINER}")
    if not options.prefix.startswith("/"):
        raise UsageError(f"prefix {options.prefix!r} is not absolute", hint="/opt/llm/current")
    require(options)
    recipe = minimal_recipe(options.packages) if options.rootfs == "minimal" else None
    token = secrets.token_hex(4)
    with interruptible():
        try:
            state = _reserve(options, token, hostnames)
            lower = minimal(recipe, emit) if recipe else Path("/")
            with stage(emit, STAGE, f"Starting {len(hostnames)} nodes", len(hostnames)) as shown:
                key, host_keys = _make_disks(state, lower, options.password)
                state = node.start(state, save)
                node.wait_ready(state, shown.progress)
                contents = file_texts(state, key, host_keys)
                state = replace(state, files=file_digests(contents))
                save(state)
                write_files(state, contents)
                state = replace(state, made="up")
                save(state)
                shown.states = dict.fromkeys(hostnames, "up")
                shown.summary = f"sandbox {state.name}, {state.subnet}"
        except BaseException:
            with uninterrupted():
                _undo(token)
            raise
    return Sandbox(state)


def require(options: Options) -> None:
    """Checks that this machine can create such a sandbox.

    Raises:
        UsageError: not root, or programs are missing; the message names all of them, and the hint installs them.
    """
    host.require_root("clusterctl sandbox up")
    host.require_programs(
        host.FOR_LINK if options.link else {},
        host.FOR_PASSWORD if options.password else {},
        host.FOR_HOST if options.rootfs == "host" else {},
        host.FOR_MINIMAL if options.rootfs == "minimal" and not find_cached(minimal_recipe(options.packages)) else {},
    )


def _reserve(options: Options, token: str, hostnames: Sequence[str]) -> State:
    """Chooses a name and a subnet, and saves them before anything is created."""
    directory, storage = options.directory.absolute(), options.storage
    with locked():
        others = load_all()
        name = options.name or next(
            name
            for name in ("sandbox", *(f"sandbox-{number}" for number in range(2, 1000)))
            if name not in {other.name for other in others}
        )
        if name in {other.name for other in others}:
            raise UsageError(f"sandbox {name} already exists", hint=f"clusterctl sandbox down {name}")
        for other in others:
            if Path(other.directory) == directory:
                raise UsageError(
                    f"{directory} contains the files of sandbox {other.name}",
                    hint=f"use another folder, or: clusterctl sandbox down {other.name}",
                )
        directory.mkdir(parents=True, exist_ok=True)
        check_free(directory)
        folder = storage.absolute() / f"clusterctl-sandbox-{name}" if storage else home() / name
        host.require_upper(folder)
        if folder.exists():
            raise UsageError(f"{folder} exists and belongs to no sandbox", hint=f"inspect it, then remove {folder}")
        subnet = network.choose_subnet([*network.taken_subnets(), *(IPv4Network(other.subnet) for other in others)])
        addresses = network.addresses(subnet, len(hostnames))
        creator = identify(os.getpid())
        assert creator is not None, "this process is running"
        state = State(
            name=name,
            token=token,
            made="starting",
            boot=boot_id(),
            creator=creator,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            rootfs=options.rootfs,
            rate=options.link,
            subnet=str(subnet),
            storage=str(folder),
            directory=str(directory),
            prefix=options.prefix,
            user=options.user,
            nodes=tuple(
                NodeState(hostname, address, f"cc{token}-{number:03}")
                for number, (hostname, address) in enumerate(zip(hostnames, addresses, strict=True), 1)
            ),
        )
        save(state)
    return state


def _make_disks(state: State, lower: Path, password: str | None) -> tuple[str, dict[str, str]]:
    """Fills the nodes' disks. Returns the private key for logins, and each node's public host key."""
    host.check_mountable(lower)
    storage = Path(state.storage)
    storage.mkdir(parents=True, mode=0o700)
    disk.make_key(storage / KEY, f"clusterctl sandbox {state.name}")
    public = (storage / f"{KEY}.pub").read_text(encoding="ascii").strip()
    shared = disk.common(lower, public, password, (home(), storage))
    sshd = "/usr/sbin/sshd" if state.rootfs == "minimal" else shutil.which("sshd", path=environment()["PATH"])
    assert sshd, "host.require_programs found it"
    host_keys = {}
    for each in state.nodes:
        state.folder(each).mkdir()
        host_keys[each.name] = disk.fill(state.folder(each), each, shared)
        node.write_script(state, each, lower, sshd)
    return (storage / KEY).read_text(encoding="ascii"), host_keys


def _undo(token: str) -> None:
    """Removes everything that ``up`` has created so far."""
    for state in load_all():
        if state.token == token:
            remove(state)


def _check_name(name: str | None) -> None:
    if name is not None and not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a valid sandbox name", hint="use up to 32 of a-z, 0-9 and -")


def _check_root(rootfs: str, packages: Sequence[str]) -> None:
    if rootfs not in {"minimal", "host"}:
        raise UsageError(f"unknown root file system {rootfs!r}", hint="minimal or host")
    if packages and rootfs == "host":
        raise UsageError(
            "packages are for a minimal root only", hint="nodes with this machine's root have its packages"
        )


def _hostnames(nodes: int | Sequence[str]) -> list[str]:
    if isinstance(nodes, int):
        width = max(2, len(str(nodes)))
        nodes = [f"node{number:0{width}}" for number in range(1, nodes + 1)]
    if not 1 <= len(nodes) <= MOST_NODES:
        raise UsageError(f"a sandbox cannot have {len(nodes)} nodes", hint=f"1 to {MOST_NODES}")
    wrong = [each for each in nodes if not _NAME.fullmatch(each)]
    if wrong or len(set(nodes)) < len(nodes):
        raise UsageError(f"{wrong[0]!r} is not a valid host name" if wrong else "two nodes have the same name")
    return list(nodes)
