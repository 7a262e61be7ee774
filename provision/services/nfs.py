"""nfs: folders of one node, mounted by all other nodes at the same path.

The server exports them to the addresses of the other nodes. Clients mount them hard: with a soft mount, a slow server
becomes an I/O error of the process that writes a checkpoint (nfs(5)). They use several connections, since one carries
1 to 2 GB/s. ``nofail`` with ``bg`` lets a node boot without its server. systemd then retries indefinitely (it reads
``bg`` as ``x-systemd.mount-timeout=infinity,retry=10000``, systemd.mount(5)), so nodes may boot in any order.

Every access to a mount has a time limit. Whether a path is mounted is read from /proc/mounts, which needs no server.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from provision.inventory.document import shown
from provision.inventory.schema import Section, Text, as_text
from provision.model import Step
from provision.render import quote, render
from provision.services.kit.changes import Sh, make_folder, start_unit, write_block, write_file
from provision.services.kit.plans import NodeSteps

if TYPE_CHECKING:
    from provision.model import Inventory, Node

ABOUT = "folders of the head, mounted by every other node"
AFTER = ("hosts", "os_packages", "sysctl")
UNIT = "nfs-server.service"  # Debian's nfs-kernel-server.service is an alias
EXPORTS = "/etc/exports.d/clusterctl.exports"
THREADS = "/etc/nfs.conf.d/clusterctl.conf"
OLD_THREADS = "/etc/default/nfs-kernel-server"  # Debian 11 and Ubuntu 20.04 read this file instead
_NAME = 255  # bytes of a file's name, and of a unit's
TOKENS = ".clusterctl"  # the folder in each exported folder where verify writes and reads tokens

# A mount on one of these folders, or below one of the first ones, would break the system.
_SYSTEM_TREES = frozenset(("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys"))
_SYSTEM_FOLDERS = frozenset(("root", "tmp", "usr", "var"))


def _folder(value: object) -> str:
    text = as_text(value)
    if not text.startswith("/"):
        raise ValueError(f"{text} is not an absolute path: it must begin with /, such as /data")
    if ".." in text.split("/"):
        raise ValueError(f"{text} contains `..`: write the path without it")
    if not re.fullmatch(r"[A-Za-z0-9/._+@-]+", text):
        raise ValueError(
            f"{shown(text)} cannot be written to both exports(5) and fstab(5); use letters, digits and ._+@-"
        )
    path = posixpath.normpath("/" + text.lstrip("/"))
    top, _, below = path[1:].partition("/")
    if not top or top in _SYSTEM_TREES or (top in _SYSTEM_FOLDERS and not below):
        raise ValueError(f"{path} belongs to the system: export another folder, such as /data")
    # systemd derives a unit's name from the path and escapes most special characters with 4 (systemd.unit(5)).
    unit = sum(1 if re.match(r"[A-Za-z0-9/_.]", letter) else 4 for letter in path[1:]) + len(".automount")
    if unit > _NAME or any(len(part) > _NAME for part in path.split("/")):
        raise ValueError(f"{shown(path)} is too long: the name of its systemd unit has more than {_NAME} characters")
    return path


def _check_separate(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Check that no folder is listed twice or inside another one: that would be a mount in a mount."""
    if not paths:
        raise ValueError("is empty: list at least one folder, such as [/data], or remove the key")
    for number, path in enumerate(paths):
        for other in paths[:number]:
            if path == other:
                raise ValueError(f"{path} is listed twice")
            outer, inner = sorted((path, other), key=len)
            if PurePosixPath(inner).is_relative_to(outer):
                raise ValueError(f"{inner} is in {outer}, which is exported too: remove {inner}")
    return paths


class Options(Section):
    """``services: nfs:``."""

    server: Text | None = None  # the node with the folders; None: the first
    exports: Annotated[tuple[Annotated[str, BeforeValidator(_folder)], ...], AfterValidator(_check_separate)] = (
        "/srv/share",
    )
    automount: bool = False  # mount on first use
    root_squash: bool = True  # root on a client becomes the user nobody on the server
    threads: int = Field(default=64, ge=1, le=4096, strict=True)  # on the server; its default of 8 suits few clients
    connections: int = Field(default=8, ge=1, le=16, strict=True)  # nconnect; nfs(5): at most 16


def problems(options: Options, inventory: Inventory) -> Iterator[tuple[str, str]]:
    """A server that is not a node."""
    if options.server is not None and options.server not in {node.name for node in inventory.nodes}:
        yield "server", f"no node is called {options.server}"


def plan(options: Options, inventory: Inventory) -> Iterator[NodeSteps]:
    """The steps of the server in stage ``serve``, of the clients in ``follow``."""
    server = _server(options, inventory)
    clients = [node for node in inventory.nodes if node is not server]
    yield NodeSteps(server.name, "serve", tuple(_server_steps(options, server, clients)))
    for node in clients:
        yield NodeSteps(node.name, "follow", tuple(_client_steps(options, server)))


def verify(options: Options, inventory: Inventory) -> Iterator[NodeSteps]:
    """Check that the server exports the folders, and that clients see the server's current files.

    A client writes a token as the login user (``SUDO_USER``), whom ``root_squash`` does not change. It reads the token
    through a second mount, which shares no cache with the first. It also reads the server's token.
    """
    server = _server(options, inventory)
    clients = [node for node in inventory.nodes if node is not server]
    test = _test_exported(options, clients)
    yield NodeSteps(server.name, "serve", (Step("serves", unless=test, do=test),))
    for node in clients:
        yield NodeSteps(node.name, "follow", tuple(_check_fresh(path, server) for path in options.exports))


def _server(options: Options, inventory: Inventory) -> Node:
    return next(node for node in inventory.nodes if options.server in (None, node.name))


def _source(server: Node, path: str) -> str:
    """The folder's name in fstab; an IPv6 address is in brackets."""
    address = server.train_address
    return f"[{address}]:{path}" if ":" in address else f"{address}:{path}"


def _addresses(clients: list[Node]) -> list[str]:
    """Every address that packets of clients may come from."""
    return list(dict.fromkeys(address for node in clients for address in (node.train_address, node.address)))


def _check_installed(test: str, package: str) -> Step:
    problem = f"{package} is not installed: add it with services: os_packages:, or by hand"
    return Step("installed", unless=test, do=f"cc_say {quote(problem)}\nfalse")


# --- the server ----------------------------------------------------------------------------------


def _server_steps(options: Options, server: Node, clients: list[Node]) -> Iterator[Step]:
    yield _check_installed("command -v exportfs && command -v rpc.nfsd", "nfs-kernel-server")
    yield start_unit("running", UNIT)
    yield _set_threads(options)
    for path in options.exports:
        yield make_folder(f"folder {path}", path, mode=0o1777)
        yield make_folder(f"folder for tokens in {path}", f"{path}/{TOKENS}", mode=0o1777)
        yield write_file(f"token in {path}", f"{path}/{TOKENS}/server", _token(server, path))
    yield _write_exports(options, clients)
    test = _test_exported(options, clients)
    yield Step("exported", unless=test, do=f"exportfs -ra\n{test}")


def _test_exported(options: Options, clients: list[Node]) -> str:
    """Sh that fails with a message if a folder is not exported or the daemon is not running."""
    return render("services/nfs/serving.sh.j2", unit=UNIT, paths=options.exports, clients=len(_addresses(clients)))


def _token(server: Node, path: str) -> str:
    return f"{server.name}:{path}\n"


def _set_threads(options: Options) -> Step:
    """Set the number of threads in the file that the distribution reads, and in the running server."""
    text = f"# Written by clusterctl; `clusterctl services undo nfs` removes it.\n[nfsd]\nthreads={options.threads}\n"
    new = write_file("", THREADS, text)
    old = write_block("", OLD_THREADS, f"RPCNFSDCOUNT={options.threads}\n", mark="nfs")
    now = f'[ "$(cat /proc/fs/nfsd/threads)" = {options.threads} ]'
    which = "if [ -d {folder} ]; then\n{new}\nelse\n{old}\nfi\n"
    where = posixpath.dirname(THREADS)
    return Step(
        "threads",
        unless=which.format(folder=where, new=new.unless, old=old.unless) + now,
        do='cc_journal threads rpc.nfsd "$(cat /proc/fs/nfsd/threads)"\n'
        + which.format(folder=where, new=new.do, old=old.do)
        + f"rpc.nfsd {options.threads}",
    )


def _write_exports(options: Options, clients: list[Node]) -> Step:
    squash = "root_squash" if options.root_squash else "no_root_squash"
    text = render("services/nfs/exports.j2", paths=options.exports, clients=_addresses(clients), squash=squash)
    step = write_file("exports", EXPORTS, text, check=render("services/nfs/check.sh.j2"), then="exportfs -ra")
    # Undo reads the journal backwards: it removes the file first, then exports again without its folders.
    return replace(step, do=f"cc_journal reexport exportfs -ra\n{step.do}")


# --- the clients ---------------------------------------------------------------------------------


def _client_steps(options: Options, server: Node) -> Iterator[Step]:
    yield _check_installed("command -v mount.nfs", "nfs-common")
    for path in options.exports:
        yield _make_mount_point(path, server)
    yield _write_fstab(options, server)
    for path in options.exports:
        yield _mount(options, path, server)


def _look(path: str, server: Node, functions: str) -> str:
    """Sh that sets ``$cc_path``, ``$cc_source`` and ``$cc_mounted``, with the functions of ``alive`` or ``free``."""
    return render("services/nfs/look.sh.j2", path=path, source=_source(server, path)) + render(
        f"services/nfs/{functions}.sh.j2"
    )


def _make_mount_point(path: str, server: Node) -> Step:
    look = _look(path, server, "free")
    return Step(
        f"mount point {path}",
        unless=f"{look}cc_free",
        do=look + render("services/nfs/place.sh.j2", server=server.name),
    )


def _write_fstab(options: Options, server: Node) -> Step:
    """One block with a line for each folder, from which systemd generates units."""
    lines = render(
        "services/nfs/fstab.sh.j2",
        pairs=[(_source(server, path), path) for path in options.exports],
        connections=options.connections,
        automount=options.automount,
    )
    step = write_block(
        "mounts of every boot",
        "/etc/fstab",
        Sh('"$cc_lines"'),
        mark="nfs",
        before=lines,
        then="systemctl daemon-reload",
    )
    return replace(step, do=f"cc_journal daemon-reload systemctl daemon-reload\n{step.do}")


def _mount(options: Options, path: str, server: Node) -> Step:
    look = _look(path, server, "alive")
    undo = render("services/nfs/unmount.sh.j2")
    return Step(
        f"{path} mounted",
        unless=f"{look}cc_alive",
        do=f"{look}cc_undo={quote(undo)}\n"
        + render("services/nfs/mount.sh.j2", server=server.name, automount=options.automount),
    )


def _check_fresh(path: str, server: Node) -> Step:
    look = _look(path, server, "alive")
    fresh = render("services/nfs/fresh.sh.j2", token=_token(server, path))
    why = render("services/nfs/why.sh.j2", server=server.name)
    return Step(f"{path} is fresh", unless=look + fresh, do=f"{look}{why}false")
