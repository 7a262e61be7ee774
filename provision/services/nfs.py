"""nfs: folders of one node that every other node has under the same path.

The server exports them to the addresses of the other nodes; these mount them hard, since a soft mount hands a slow
server's error to whoever writes a checkpoint (nfs(5)), and with several connections, since one carries 1 to 2 GB/s.
``nofail`` with ``bg`` lets a node boot without its server: systemd then tries on for as long as it takes (it reads
``bg`` as ``x-systemd.mount-timeout=infinity,retry=10000``, systemd.mount(5)), so that machines may start in any order.

Nothing here looks into a mount without a time limit, and whether one is there is read from /proc/mounts, which asks no
server.
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
from provision.services.kit.changes import Sh, block, file, folder, running
from provision.services.kit.plans import Duty

if TYPE_CHECKING:
    from provision.model import Inventory, Node

ABOUT = "folders of the head, mounted by every other node"
AFTER = ("hosts", "os_packages", "sysctl")
UNIT = "nfs-server.service"  # Debian's nfs-kernel-server.service is another name of it
EXPORTS = "/etc/exports.d/clusterctl.exports"
THREADS = "/etc/nfs.conf.d/clusterctl.conf"
OLD_THREADS = "/etc/default/nfs-kernel-server"  # what Debian 11 and Ubuntu 20.04 read instead
_NAME = 255  # bytes of a file's name, and of a unit's
TOKENS = ".clusterctl"  # a folder in each exported one, where verify writes and reads

# A mount over one of these, or anywhere in the first ones, would take the system from under itself.
_WHOLLY = frozenset(("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys"))
_ITSELF = frozenset(("root", "tmp", "usr", "var"))


def _folder(value: object) -> str:
    text = as_text(value)
    if not text.startswith("/"):
        raise ValueError(f"{text} is not an absolute path: it must begin with /, such as /data")
    if ".." in text.split("/"):
        raise ValueError(f"{text} holds `..`: write the path it stands for")
    if not re.fullmatch(r"[A-Za-z0-9/._+@-]+", text):
        raise ValueError(
            f"{shown(text)}: exports(5) and fstab(5) do not both take such a path; letters, digits and ._+@- do"
        )
    path = posixpath.normpath("/" + text.lstrip("/"))
    top, _, below = path[1:].partition("/")
    if not top or top in _WHOLLY or (top in _ITSELF and not below):
        raise ValueError(f"{path} belongs to the system: export a folder of its own, such as /data")
    # systemd makes the name of a unit of the path: 4 characters of most signs (systemd.unit(5)).
    unit = sum(1 if re.match(r"[A-Za-z0-9/_.]", letter) else 4 for letter in path[1:]) + len(".automount")
    if unit > _NAME or any(len(part) > _NAME for part in path.split("/")):
        raise ValueError(f"{shown(path)} is longer than a unit of systemd can be named ({_NAME} characters)")
    return path


def _apart(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Neither the same twice nor one in another: the inner one would be a mount in a mount."""
    if not paths:
        raise ValueError("names no folder: write at least one, such as [/data], or take the key out")
    for number, path in enumerate(paths):
        for other in paths[:number]:
            if path == other:
                raise ValueError(f"{path} is there twice")
            outer, inner = sorted((path, other), key=len)
            if PurePosixPath(inner).is_relative_to(outer):
                raise ValueError(f"{inner} lies in {outer}, which is exported as a whole: leave it out")
    return paths


class Options(Section):
    """``services: nfs:``."""

    server: Text | None = None  # the node that has the folders; None: the first
    exports: Annotated[tuple[Annotated[str, BeforeValidator(_folder)], ...], AfterValidator(_apart)] = ("/srv/share",)
    automount: bool = False  # mount on first use
    root_squash: bool = True  # root of a client is nobody on the server
    threads: int = Field(
        default=64, ge=1, le=4096, strict=True
    )  # of the server; its own default of 8 is for a handful of clients
    connections: int = Field(default=8, ge=1, le=16, strict=True)  # nconnect; nfs(5): at most 16


def problems(options: Options, inventory: Inventory) -> Iterator[tuple[str, str]]:
    """A server that is no node."""
    if options.server is not None and options.server not in {node.name for node in inventory.nodes}:
        yield "server", f"no node is called {options.server}"


def plan(options: Options, inventory: Inventory) -> Iterator[Duty]:
    """The server's steps in stage ``serve``, the others' in ``follow``."""
    server = _server(options, inventory)
    clients = [node for node in inventory.nodes if node is not server]
    yield Duty(server.name, "serve", tuple(_serving(options, server, clients)))
    for node in clients:
        yield Duty(node.name, "follow", tuple(_mounting(options, server)))


def verify(options: Options, inventory: Inventory) -> Iterator[Duty]:
    """Whether the server exports and the mounts are fresh: what is written there is what the server has.

    A client writes a token as the user who logs in (``SUDO_USER``), whom ``root_squash`` leaves as he is, and reads it
    through a second mount of its own, which shares no cache with the first; and it reads the server's own token.
    """
    server = _server(options, inventory)
    clients = [node for node in inventory.nodes if node is not server]
    serving = _served(options, clients)
    yield Duty(server.name, "serve", (Step("serves", unless=serving, do=serving),))
    for node in clients:
        yield Duty(node.name, "follow", tuple(_fresh(path, server) for path in options.exports))


def _server(options: Options, inventory: Inventory) -> Node:
    return next(node for node in inventory.nodes if options.server in (None, node.name))


def _source(server: Node, path: str) -> str:
    """What fstab calls it; an IPv6 address stands in brackets."""
    address = server.train_address
    return f"[{address}]:{path}" if ":" in address else f"{address}:{path}"


def _names(clients: list[Node]) -> list[str]:
    """Every address that a client's packets may come from."""
    return list(dict.fromkeys(address for node in clients for address in (node.train_address, node.address)))


def _installed(test: str, package: str) -> Step:
    otherwise = f"{package} is not installed: add it with services: os_packages:, or by hand"
    return Step("installed", unless=test, do=f"cc_say {quote(otherwise)}\nfalse")


# --- the server ----------------------------------------------------------------------------------


def _serving(options: Options, server: Node, clients: list[Node]) -> Iterator[Step]:
    yield _installed("command -v exportfs && command -v rpc.nfsd", "nfs-kernel-server")
    yield running("running", UNIT)
    yield _threads(options)
    for path in options.exports:
        yield folder(f"folder {path}", path, mode=0o1777)
        yield folder(f"folder for tokens in {path}", f"{path}/{TOKENS}", mode=0o1777)
        yield file(f"token in {path}", f"{path}/{TOKENS}/server", _token(server, path))
    yield _exports(options, clients)
    serving = _served(options, clients)
    yield Step("exported", unless=serving, do=f"exportfs -ra\n{serving}")


def _served(options: Options, clients: list[Node]) -> str:
    """Fails, and says so, where a folder is not exported or the daemon does not run."""
    return render("services/nfs/serving.sh.j2", unit=UNIT, paths=options.exports, clients=len(_names(clients)))


def _token(server: Node, path: str) -> str:
    return f"{server.name}:{path}\n"


def _threads(options: Options) -> Step:
    """By the file that the distribution reads, and at once: the running server takes a new number without a restart."""
    text = f"# Written by clusterctl; `clusterctl services undo nfs` removes it.\n[nfsd]\nthreads={options.threads}\n"
    new = file("", THREADS, text)
    old = block("", OLD_THREADS, f"RPCNFSDCOUNT={options.threads}\n", mark="nfs")
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


def _exports(options: Options, clients: list[Node]) -> Step:
    squash = "root_squash" if options.root_squash else "no_root_squash"
    text = render("services/nfs/exports.j2", paths=options.exports, clients=_names(clients), squash=squash)
    step = file("exports", EXPORTS, text, check=render("services/nfs/check.sh.j2"), then="exportfs -ra")
    # Undone after the file, since the journal is read backwards: what is exported no longer is then forgotten.
    return replace(step, do=f"cc_journal reexport exportfs -ra\n{step.do}")


# --- the clients ---------------------------------------------------------------------------------


def _mounting(options: Options, server: Node) -> Iterator[Step]:
    yield _installed("command -v mount.nfs", "nfs-common")
    for path in options.exports:
        yield _place(path, server)
    yield _fstab(options, server)
    for path in options.exports:
        yield _mounted(options, path, server)


def _looking(path: str, server: Node, functions: str) -> str:
    """Sets ``$cc_path``, ``$cc_source`` and ``$cc_mounted``; the functions are of ``alive`` or ``free``."""
    return render("services/nfs/look.sh.j2", path=path, source=_source(server, path)) + render(
        f"services/nfs/{functions}.sh.j2"
    )


def _place(path: str, server: Node) -> Step:
    look = _looking(path, server, "free")
    return Step(
        f"place for {path}",
        unless=f"{look}cc_free",
        do=look + render("services/nfs/place.sh.j2", server=server.name),
    )


def _fstab(options: Options, server: Node) -> Step:
    """One block with a line for each folder; systemd makes its units from it."""
    lines = render(
        "services/nfs/fstab.sh.j2",
        pairs=[(_source(server, path), path) for path in options.exports],
        connections=options.connections,
        automount=options.automount,
    )
    step = block(
        "mounts of every boot",
        "/etc/fstab",
        Sh('"$cc_lines"'),
        mark="nfs",
        before=lines,
        then="systemctl daemon-reload",
    )
    return replace(step, do=f"cc_journal daemon-reload systemctl daemon-reload\n{step.do}")


def _mounted(options: Options, path: str, server: Node) -> Step:
    look = _looking(path, server, "alive")
    undo = render("services/nfs/unmount.sh.j2")
    return Step(
        f"{path} mounted",
        unless=f"{look}cc_alive",
        do=f"{look}cc_undo={quote(undo)}\n"
        + render("services/nfs/mount.sh.j2", server=server.name, automount=options.automount),
    )


def _fresh(path: str, server: Node) -> Step:
    look = _looking(path, server, "alive")
    fresh = render("services/nfs/fresh.sh.j2", token=_token(server, path))
    why = render("services/nfs/why.sh.j2", server=server.name)
    return Step(f"{path} is fresh", unless=look + fresh, do=f"{look}{why}false")
