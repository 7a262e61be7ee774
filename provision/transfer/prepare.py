"""Prepares nodes for a stream: surveys them, installs receiver and zstd, tests their logins, and forms chains.

zstd for nodes that lack it is this machine's own ``zstd`` with its dynamic loader and its libraries, so the node's
libraries do not matter. It is in the transfer's folder and is deleted with it. A node uses it only after it has
decompressed a sample.
"""

from __future__ import annotations

import functools
import io
import itertools
import re
import secrets
import shutil
import subprocess
import tarfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import zstandard

from provision.errors import ClusterctlError
from provision.render import render
from provision.ssh.fanout import fan_out
from provision.ssh.wire import RemoteError, reading
from provision.tool.libraries import dynamic, reader
from provision.transfer.chain import DIGESTS, Digest
from provision.transfer.keys import PATIENCE, RelayKey, is_quotable, leftover_values, options, scope_of
from provision.transfer.nodes import Member, can_pass, explain_failure, login_target, read_facts, survey_script

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from provision.model import Inventory, Node, Result
    from provision.ssh.remote import Connections

AHEAD = 64  # units that may wait on a node for its unpacker
SPARE = 16  # units that may wait on a node for the next one, and must be sent again if the node dies
ABREAST = 4  # parts that a node unpacks at the same time at most
SETTLE = 128 << 20  # bytes after which unpacked files are synced to disk, so that a reboot does not lose them
_ROUNDS = 3  # rounds of testing hops: a failed one changes the chains
PING = 15.0  # seconds; the command's lock depends on the connection, and is lost after as long a silence
_DEADLINE = 120.0  # seconds for a survey, which may have to hash kept units

T = TypeVar("T")
N = TypeVar("N", "Node", Member)


class Preparation:
    """Surveys nodes and forms chains of them."""

    def __init__(self, inventory: Inventory, connections: Connections, warn: Callable[[str], None]) -> None:
        self.refused: set[tuple[str, str]] = set()  # hops that do not work
        self._inventory = inventory
        self._connections = connections
        self._warn = warn
        self._key = RelayKey.new()

    def survey(self, members: Sequence[Member]) -> None:
        """Set every member's facts, or its error. Ends streams that are still running there."""

        def survey_member(member: Member) -> None:
            target = member.target
            script = survey_script(self._inventory, target)
            result = ask(self._connections, target.node, script, fresh=member.login is None)
            if result.rc and not result.out:
                raise RemoteError(target.node, result.err.strip() or f"its folder {target.folder} cannot be entered")
            with reading(target.node):
                member.facts = read_facts(result.out)
            if member.facts.refused:
                raise RemoteError(target.node, member.facts.refused)
            key = self._connections[target.node].host_key
            member.login = login_target(self._inventory, target, member.facts, f"clusterctl-{member.number}", key)
            member.passes = member.may_pass and can_pass(target, member.facts)
            member.receives = member.may_receive and is_quotable(target.folder)

        _keep_errors(members, survey_member)

    def form(self, members: Sequence[Member], *, relay: bool) -> tuple[str, Digest, list[list[Member]]]:
        """Install the receiver on members and form chains; a member that fails gets its error.

        Returns:
            The name of these streams, the program that verifies their units, and the chains.
        """
        stream = secrets.token_hex(8)
        digest: Digest = "b2sum" if all(member.facts.digest == "b2sum" for member in members) else "sha256sum"
        relay = relay and any(len(chain) > 1 for chain in self._chains(members, relay=True))
        _keep_errors(members, lambda member: self._install(member, stream, digest, relay=relay))
        ready = [member for member in members if not member.error]
        by_name = {member.name: member for member in ready}
        chains = self._chains(ready, relay=relay)
        tested: dict[str, str] = {}  # each node's next one, if the login works
        for _ in range(_ROUNDS):
            untested = {before: after for before, after in hops(chains) if tested.get(before) != after}
            if not untested:
                break
            for before, why in self._test_hops(untested, by_name).items():
                if why is None:
                    tested[before] = untested[before]
                else:
                    self.refused.add((before, untested[before]))
                    self._warn(f"{before} cannot pass bytes on to {untested[before]}: {why or 'no reason given'}")
            chains = self._chains(ready, relay=relay)
        parts = [part for chain in chains for part in _split_untested(chain, tested)]
        return stream, digest, [[by_name[name] for name in part] for part in parts]

    def _chains(self, members: Sequence[Member], *, relay: bool) -> list[list[str]]:
        nodes = [RelayNode(member.name, member.passes, member.receives) for member in members]
        return form_chains(nodes, self.refused, relay=relay)

    def _install(self, member: Member, stream: str, digest: Digest, *, relay: bool) -> None:
        target, facts, inventory = member.target, member.facts, self._inventory
        scope = scope_of(target.folder)
        receive = render(
            "transfer/receive.sh.j2",
            folder=target.folder,
            into=target.into,
            me=member.number,
            wire=target.wire,
            digest=DIGESTS[digest],
            ahead=AHEAD,
            spare=SPARE,
            abreast=ABREAST,
            settle=SETTLE,
        )
        before_key, expires = options(target.folder, facts.sshd)
        receives = relay and member.receives
        member.authorized = member.authorized or relay
        script = render(
            "transfer/prepare.sh.j2",
            folder=target.folder,
            stream=stream,
            receive=receive,
            line=self._key.line(inventory, scope) if receives else "",
            options=before_key,
            expires=expires,
            patience=PATIENCE,
            **leftover_values(inventory, scope),
        )
        result = ask(self._connections, target.node, script)
        words = result.out.split()
        if words[-1:] != ["ready"]:
            with reading(target.node):
                free = (int(words[1]), int(words[2])) if words[:1] == ["failed"] else (1, 1)
            raise RemoteError(target.node, explain_failure(free, result.err.strip(), target.folder)[0])
        if receives and "authorized" not in words:
            member.receives = False
            self._warn(f"{member.name} cannot receive from other nodes: its authorized_keys cannot be written")

    def _test_hops(self, untested: dict[str, str], members: dict[str, Member]) -> dict[str, str | None]:
        """For every node that is to pass bytes on: None, or why it cannot log in to the next one."""

        def test_hop(member: Member) -> str:
            after = members[untested[member.name]]
            assert after.login
            folder = member.target.folder
            secret = f"{member.facts.memory or folder}/{self._key.secret(self._inventory, scope_of(folder))}"
            script = render(
                "transfer/probe.sh.j2",
                folder=folder,
                secret=secret,
                private=self._key.private,
                known=after.login.known,
                logins=after.login.commands(secret),
            )
            return self._connections[member.target.node].run(script, deadline=_DEADLINE).out.strip()

        answers = on_each([members[name] for name in untested], test_hop)
        return {
            name: None if answer == "open" else str(answer).removeprefix("failed").strip()
            for name, answer in answers.items()
        }


def on_each(nodes: Sequence[N], work: Callable[[N], T]) -> dict[str, T | ClusterctlError]:
    """Call ``work`` for all nodes or members at once. Returns its results and errors by node name."""
    by_name = {node.name: node for node in nodes}
    machines = [node.target.node if isinstance(node, Member) else node for node in nodes]
    return fan_out(machines, lambda machine: work(by_name[machine.name]))


def _keep_errors(members: Sequence[Member], work: Callable[[Member], None]) -> None:
    """Call ``work`` for every member; one that fails keeps its error."""
    answers = on_each(members, work)
    for member in members:
        if isinstance(error := answers[member.name], ClusterctlError):
            member.error = error


def ask(
    connections: Connections, node: Node, script: str, *, fresh: bool = True, deadline: float = _DEADLINE
) -> Result:
    """Run a script over a connection that may have died since its last use; ``fresh``: it was just used."""
    remote = connections[node]
    if fresh:
        with suppress(RemoteError):
            return remote.run(script, deadline=deadline)
    try:
        remote.run(":", deadline=PING)
    except RemoteError:
        remote.close()
    return connections[node].run(script, deadline=deadline)


def _split_untested(chain: Sequence[str], tested: dict[str, str]) -> list[list[str]]:
    """A chain, split at the hops that were not tested."""
    parts: list[list[str]] = []
    for name in chain:
        if parts and tested.get(parts[-1][-1]) == name:
            parts[-1].append(name)
        else:
            parts.append([name])
    return parts


@dataclass(frozen=True)
class RelayNode:
    """A node's part in a relay.

    Attributes:
        name: the node's name.
        passes: whether it can pass bytes on.
        receives: whether other nodes can log in to it.
    """

    name: str
    passes: bool
    receives: bool


def form_chains(nodes: Sequence[RelayNode], refused: Collection[tuple[str, str]], *, relay: bool) -> list[list[str]]:
    """The chains: lists of names. This machine sends to the first node, and each node to the next.

    Args:
        nodes: the nodes that need the same wire form, in the order of the inventory.
        refused: pairs ``(from, to)`` between which the login fails.
        relay: whether nodes may pass bytes on at all.

    Returns:
        As few chains as a greedy search finds; a node that cannot pass bytes on is the last of its chain.
    """
    if not relay:
        return [[node.name] for node in nodes]
    by_name = {node.name: node for node in nodes}

    def connects(before: str, after: str) -> bool:
        return by_name[before].passes and by_name[after].receives and (before, after) not in refused

    chains: list[list[str]] = []
    for node in sorted(nodes, key=lambda node: not node.passes):  # stable: keeps the inventory's order otherwise
        joined = next((chain for chain in chains if connects(chain[-1], node.name)), None)
        if joined:
            joined.append(node.name)
        else:
            chains.append([node.name])
    # A node that could not follow an earlier node may follow a later one.
    while pair := next(((a, b) for a, b in itertools.permutations(chains, 2) if connects(a[-1], b[0])), None):
        pair[0].extend(pair[1])
        chains.remove(pair[1])
    return chains


def hops(chains: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """Every pair of neighbours in the chains."""
    return [pair for chain in chains for pair in itertools.pairwise(chain)]


# --- zstd for nodes that lack it ------------------------------------------------------------------

BRING_FROM = 64 << 20  # unpacked bytes that a node lacks; for fewer, zstd's own 2 MB are not worth it
_SAMPLE = "zstd works"
_ZSTD_DEADLINE = 120.0
_LIBRARY = re.compile(r"=> (/.+) \(0x[0-9a-f]+\)$", re.MULTILINE)


def bring_zstd(connections: Connections, nodes: Sequence[Node], folder: str) -> tuple[frozenset[str], int]:
    """Put zstd into a transfer's folder on nodes.

    Args:
        connections: the connections to the nodes.
        nodes: nodes without zstd.
        folder: the transfer's own folder there, see ``Target.folder``.

    Returns:
        The names of the nodes on which it works, and the bytes sent to all of them together. It works nowhere if this
        machine has no zstd, or has another architecture.
    """
    archive = pack_zstd(shutil.which("zstd")) if nodes else b""
    if not archive:
        return frozenset(), 0
    script = render("transfer/bring_zstd.sh.j2", folder=folder, sample=_SAMPLE)

    def put(node: Node) -> bool:
        return connections[node].run(script, stdin=[archive], deadline=_ZSTD_DEADLINE).rc == 0

    working = frozenset(name for name, works in fan_out(nodes, put).items() if works is True)
    return working, len(archive) * len(nodes)


@functools.cache
def pack_zstd(program: str | None) -> bytes:
    """A tar.gz of zstd, its loader and libraries, a script ``run`` that starts it, and a sample; empty without zstd."""
    if program is None:
        return b""
    found = dynamic(reader(Path(program)))
    if found is None:  # a script, or a program of another kind of system
        return b""
    start = '"${0%/*}/zstd"'
    paths = {"zstd": Path(program)}
    if found.loader:
        start = f'"${{0%/*}}/loader" --library-path "${{0%/*}}" {start}'
        listed = subprocess.run([found.loader, "--list", program], capture_output=True, text=True, check=False)
        paths |= {Path(path).name: Path(path) for path in _LIBRARY.findall(listed.stdout)}
        paths["loader"] = Path(found.loader)
    files = {name: path.read_bytes() for name, path in paths.items()}
    files["run"] = f'#!/bin/sh\nexec {start} "$@"\n'.encode()
    files["sample"] = zstandard.compress(_SAMPLE.encode())
    return _archive(files)


def _archive(files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.mode, member.size = 0o700, len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()
