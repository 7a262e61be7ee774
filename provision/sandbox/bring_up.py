"""Making a sandbox: the stages of ``up``, in order. Whatever stops it, nothing of it stays."""

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
from provision.sandbox import disk, files, host, network, node
from provision.sandbox.accounts import TRAINER
from provision.sandbox.cluster import Sandbox
from provision.sandbox.process import boot_id, environment, identify
from provision.sandbox.rootfs import cached, minimal
from provision.sandbox.rootfs import recipe as minimal_recipe
from provision.sandbox.signals import interruptible, uninterrupted
from provision.sandbox.state import NodeState, State, home, load_all, locked, save
from provision.sandbox.take_down import remove
from provision.stages import stage

STAGE = "nodes"
MOST_NODES = 250
Rootfs = Literal["minimal", "host"]
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")


def up(
    *,
    nodes: int | Sequence[str] = 3,
    name: str | None = None,
    rootfs: Rootfs = "minimal",
    packages: Sequence[str] = (),
    link: str | None = None,
    directory: Path = Path(),
    storage: Path | None = None,
    prefix: str = "/opt/llm/current",
    user: str = "root",
    password: str | None = None,
    emit: Emit = ignore,
) -> Sandbox:
    """Starts a rehearsal cluster and writes ``inventory.yaml``, ``known_hosts`` and ``id_ed25519`` for it.

    SIGINT, SIGTERM and errors undo everything. After SIGKILL ``list_all`` shows a broken sandbox, which ``down`` ends.

    Args:
        nodes: how many (1 to 250, named node01, node02, …), or their names.
        name: of the sandbox; None takes ``sandbox`` or the next free ``sandbox-2``.
        rootfs: ``minimal``: Debian with sshd and tar, without Python, zstd or rsync; ``host``: this machine's own root.
        packages: further Debian packages of a minimal root, such as ``tcsh``; every selection is made once and kept.
        link: rate of every cable in both directions, such as ``100mbit``; None for what the machine can do.
        directory: where the three files go; it must hold none of them.
        storage: where the nodes' disks go, on a local disk; None for the folder of the states.
        prefix: the inventory's prefix.
        user: the inventory's user, ``root`` or ``trainer``.
        password: of root and trainer; None allows keys only. A password is for tests: keys work anyway.
        emit: told of the stages ``rootfs`` (only when it is made), and ``nodes``.

    Raises:
        UsageError: a wrong argument, not root, or a program is missing; nothing was changed.
        NodesFailedError: nodes did not come up.
        ClusterctlError: ``ip``, ``debootstrap`` or another program failed.
        InterruptedByUser: SIGINT, SIGTERM or SIGHUP.
    """
    hostnames = _hostnames(nodes)
    _check_name(name)
    _check_root(rootfs, packages)
    if link:
        network.check_rate(link)
    if user not in {"root", TRAINER}:
        raise UsageError(f"a sandbox's nodes have no user {user}", hint=f"root or {TRAINER}")
    if not prefix.startswith("/"):
        raise UsageError(f"prefix {prefix!r} is not absolute", hint="/opt/llm/current")
    require(rootfs=rootfs, packages=packages, link=link, password=password)
    recipe = minimal_recipe(packages) if rootfs == "minimal" else None
    token = secrets.token_hex(4)
    with interruptible():
        try:
            wish = _Wish(name, token, rootfs, link, directory.absolute(), storage, prefix, user, hostnames)
            state = _reserve(wish)
            lower = minimal(recipe, emit) if recipe else Path("/")
            with stage(emit, STAGE, f"Starting {len(hostnames)} nodes", len(hostnames)) as shown:
                key, host_keys = _make_disks(state, lower, password)
                state = node.start(state, save)
                node.wait_ready(state, shown.progress)
                contents = files.texts(state, key, host_keys)
                state = replace(state, files=files.digests(contents))
                save(state)
                files.write(state, contents)
                state = replace(state, made="up")
                save(state)
                shown.states = dict.fromkeys(hostnames, "up")
                shown.summary = f"sandbox {state.name}, {state.subnet}"
        except BaseException:
            with uninterrupted():
                _undo(token)
            raise
    return Sandbox(state)


def require(
    *, rootfs: Rootfs = "minimal", packages: Sequence[str] = (), link: str | None = None, password: str | None = None
) -> None:
    """Checks that this machine can make such a sandbox; the arguments are those of ``up``.

    Raises:
        UsageError: not root, or programs are missing; the message names all of them, and the hint installs them.
    """
    host.require_root("clusterctl sandbox up")
    host.require_programs(
        host.FOR_LINK if link else {},
        host.FOR_PASSWORD if password else {},
        host.FOR_HOST if rootfs == "host" else {},
        host.FOR_MINIMAL if rootfs == "minimal" and not cached(minimal_recipe(packages)) else {},
    )


@dataclass(frozen=True)
class _Wish:
    """What the caller asked for."""

    name: str | None
    token: str
    rootfs: Rootfs
    rate: str | None
    directory: Path
    storage: Path | None
    prefix: str
    user: str
    hostnames: Sequence[str]


def _reserve(wish: _Wish) -> State:
    """Chooses a name and a subnet, and writes them down before anything is made."""
    with locked():
        others = load_all()
        name = wish.name or _free_name({other.name for other in others})
        if name in {other.name for other in others}:
            raise UsageError(f"there is a sandbox {name} already", hint=f"clusterctl sandbox down {name}")
        for other in others:
            if Path(other.directory) == wish.directory:
                raise UsageError(
                    f"{wish.directory} holds the files of sandbox {other.name}",
                    hint=f"use another folder, or: clusterctl sandbox down {other.name}",
                )
        wish.directory.mkdir(parents=True, exist_ok=True)
        files.check_free(wish.directory)
        folder = wish.storage.absolute() / f"clusterctl-sandbox-{name}" if wish.storage else home() / name
        host.require_upper(folder)
        if folder.exists():
            raise UsageError(f"{folder} exists and belongs to no sandbox", hint=f"look at it, then remove {folder}")
        subnet = network.choose_subnet([*network.taken_subnets(), *(IPv4Network(other.subnet) for other in others)])
        addresses = network.addresses(subnet, len(wish.hostnames))
        creator = identify(os.getpid())
        assert creator is not None, "we run"
        state = State(
            name=name,
            token=wish.token,
            made="starting",
            boot=boot_id(),
            creator=creator,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            rootfs=wish.rootfs,
            rate=wish.rate,
            subnet=str(subnet),
            storage=str(folder),
            directory=str(wish.directory),
            prefix=wish.prefix,
            user=wish.user,
            nodes=tuple(
                NodeState(hostname, address, f"cc{wish.token}-{number:03}")
                for number, (hostname, address) in enumerate(zip(wish.hostnames, addresses, strict=True), 1)
            ),
        )
        save(state)
    return state


def _make_disks(state: State, lower: Path, password: str | None) -> tuple[str, dict[str, str]]:
    """Fills the nodes' disks. Returns the private key that logs in, and each node's public host key."""
    host.check_mountable(lower)
    storage = Path(state.storage)
    storage.mkdir(parents=True, mode=0o700)
    disk.make_key(storage / files.KEY, f"clusterctl sandbox {state.name}")
    public = (storage / f"{files.KEY}.pub").read_text(encoding="ascii").strip()
    shared = disk.common(lower, public, password, (home(), storage))
    sshd = "/usr/sbin/sshd" if state.rootfs == "minimal" else shutil.which("sshd", path=environment()["PATH"])
    assert sshd, "host.require_programs found it"
    host_keys = {}
    for each in state.nodes:
        state.folder(each).mkdir()
        host_keys[each.name] = disk.fill(state.folder(each), each, shared)
        node.write_script(state, each, lower, sshd)
    return (storage / files.KEY).read_text(encoding="ascii"), host_keys


def _undo(token: str) -> None:
    """Removes what ``up`` has made so far; nothing when it had not begun."""
    for state in load_all():
        if state.token == token:
            remove(state)


def _check_name(name: str | None) -> None:
    if name is not None and not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be the name of a sandbox", hint="up to 32 of a-z, 0-9 and -")


def _check_root(rootfs: str, packages: Sequence[str]) -> None:
    if rootfs not in {"minimal", "host"}:
        raise UsageError(f"there is no root {rootfs!r}", hint="minimal or host")
    if packages and rootfs == "host":
        raise UsageError("packages are for a minimal root", hint="nodes with this machine's root have what it has")


def _hostnames(nodes: int | Sequence[str]) -> list[str]:
    if isinstance(nodes, int):
        width = max(2, len(str(nodes)))
        nodes = [f"node{number:0{width}}" for number in range(1, nodes + 1)]
    if not 1 <= len(nodes) <= MOST_NODES:
        raise UsageError(f"{len(nodes)} nodes cannot be made", hint=f"1 to {MOST_NODES}")
    wrong = [each for each in nodes if not _NAME.fullmatch(each)]
    if wrong or len(set(nodes)) < len(nodes):
        raise UsageError(f"{wrong[0]!r} is no host name" if wrong else "two nodes have the same name")
    return list(nodes)


def _free_name(used: set[str]) -> str:
    return next(each for each in ("sandbox", *(f"sandbox-{n}" for n in range(2, 1000))) if each not in used)
