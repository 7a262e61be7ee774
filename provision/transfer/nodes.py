"""The nodes of a transfer: their targets, surveyed facts and state. Opens no connections."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING, cast

from provision.env.text import size
from provision.errors import ClusterctlError
from provision.model import Node, Wire
from provision.render import render
from provision.ssh.wire import RemoteError
from provision.transfer.keys import LoginTarget, is_quotable, leftover_values, scope_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from provision.model import Inventory, Part
    from provision.transfer.chain import Digest, Outcome


@dataclass(frozen=True)
class Target:
    """A node that needs parts.

    Attributes:
        node: the node.
        folder: the transfer's folder there, absolute; it exists with mode 0700 and belongs to the user. It contains
            ``have`` (keys, one per line, some perhaps from the caller), units that are not unpacked, and scripts. Its
            parent is the transfer's scope; see ``keys``.
        into: the folder where parts are unpacked, absolute; it exists.
        wire: ``zstd`` if the node has zstd.
        has_ssh: whether the node has an ssh client.
    """

    node: Node
    folder: str
    into: str
    wire: Wire
    has_ssh: bool


@dataclass(frozen=True)
class Transferred:
    """The result of a transfer.

    Attributes:
        errors: by node name, None, or why the node is incomplete.
        sent: bytes that this machine sent to all nodes together, headers included.
    """

    errors: Mapping[str, ClusterctlError | None]
    sent: int


_NO_SPACE = "no space left on the device"
_NO_INODES = "no inodes left on the device"
# Messages of programs (in the C locale) about a full disk, which only the user can fix.
_FULL = (
    ("No space left on device", _NO_SPACE),
    ("quota exceeded", "the disk quota is used up"),
    ("Read-only file system", "the file system is read-only"),
)


@dataclass(frozen=True)
class Facts:
    """The result of a node's survey."""

    have: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()  # digests of units that were verified and not unpacked
    digest: Digest = "sha256sum"  # the fastest one on the node
    user: str = ""
    reached: tuple[str, int] | None = None  # the address and port of its sshd in our connection
    sshd: tuple[int, int] | None = None  # its OpenSSH version
    memory: str = ""  # a writable folder in memory
    left: bool = False  # a killed relay has left keys there
    refused: str = field(default="")  # why the node cannot receive anything


def survey_script(inventory: Inventory, target: Target) -> str:
    """The script for ``read_facts``. It ends processes that an earlier stream has left there."""
    return render("transfer/survey.sh.j2", folder=target.folder, **leftover_values(inventory, scope_of(target.folder)))


def read_facts(out: str) -> Facts:
    """Facts from the output of ``survey_script``.

    Raises:
        ClusterctlError: the output is incomplete.
    """
    head, _, keys = out.partition("\nkeys\n")
    facts: dict[str, list[str]] = {}
    for line in head.splitlines():
        name, _, value = line.partition(" ")
        facts.setdefault(name, []).append(value)
    if "refused" in facts:
        return Facts(refused=facts["refused"][0])
    have = keys.splitlines()
    if have[-1:] != ["end"]:
        raise ClusterctlError("its answer is incomplete")
    version = re.search(r"OpenSSH_(\d{1,9})\.(\d{1,9})", facts["sshd"][0])
    return Facts(
        have=frozenset(have[:-1]),
        kept=frozenset(facts.get("kept", ())),
        digest=cast("Digest", facts["digest"][0]),
        user=facts["user"][0],
        reached=_server_address(facts["reached"][0]),
        sshd=(int(version[1]), int(version[2])) if version else None,
        memory=facts.get("memory", [""])[0],
        left="left" in facts,
    )


def login_target(
    inventory: Inventory, target: Target, facts: Facts, alias: str, host_key: tuple[str, bytes]
) -> LoginTarget:
    """How other nodes log in to a surveyed node: over the fast network first, then as this machine does."""
    node = target.node
    addresses = [node.data_address] if node.data_address else []
    if facts.reached:
        addresses.append(facts.reached[0])
    addresses.append(node.address)
    port = facts.reached[1] if facts.reached else node.port or inventory.ssh.port or 22
    return LoginTarget(alias, facts.user, port, tuple(dict.fromkeys(addresses)), host_key)


def can_pass(target: Target, facts: Facts) -> bool:
    """Whether a node can pass bytes on."""
    return target.has_ssh and (bool(facts.memory) or is_quotable(target.folder))


def explain_failure(free: tuple[int, int], words: str, into: str) -> tuple[str, bool]:
    """Why a node failed, for the user, and whether another attempt would fail as well.

    Args:
        free: free blocks and inodes of the file system.
        words: the failed program's message.
        into: the folder that it wrote to.
    """
    for theirs, ours in _FULL:
        if theirs in words:
            what = _NO_INODES if ours == _NO_SPACE and free[0] and not free[1] else ours
            return f"{what} ({into})", True
    if not all(free):  # a shell's own printf says "I/O error"
        return f"{_NO_INODES if free[0] else _NO_SPACE} ({into})", True
    return words or "a transfer process was killed", False


def _server_address(connection: str) -> tuple[str, int] | None:
    """Address and port from ``SSH_CONNECTION``: client address and port, then the server's."""
    words = connection.split()
    if len(words) != 4 or not re.fullmatch("[0-9]{1,5}", words[3]):
        return None
    try:
        address = ip_address(words[2].partition("%")[0])
    except ValueError:
        return None
    if address.is_loopback or address.is_link_local or address.is_unspecified:
        return None
    return words[2], int(words[3])


STRIKES = 3  # attempts without any progress until a node fails
MOST_STRIKES = 20  # attempts in all
HOPS = 2  # failed hops from or to a node until it no longer relays


@dataclass
class Member:
    """A node of a transfer. Only the thread of its chain changes it."""

    target: Target
    number: int
    facts: Facts = field(default_factory=Facts)
    login: LoginTarget | None = None
    lacking: frozenset[str] = frozenset()
    needed: int | None = None  # bytes that it lacked at first
    arrived: int = 0  # bytes of these that arrived
    passes: bool = False
    receives: bool = False
    error: ClusterctlError | None = None  # why it failed
    authorized: bool = False  # it may have keys of the relay
    _hops_out: int = 0
    _hops_in: int = 0
    _strikes: int = 0
    _all_strikes: int = 0
    _struck_at: int = -1

    @property
    def name(self) -> str:
        """The node's name."""
        return self.target.node.name

    def update(self, parts: Sequence[Part]) -> None:
        """Compute the missing parts from the facts."""
        have = self.facts.have
        lacking = [part for part in parts if part.key not in have and (not part.group or part.group not in have)]
        self.lacking = frozenset(part.key for part in lacking)
        owing = sum(part.size for part in lacking)
        if self.needed is None:
            self.needed = owing
        self.arrived = max(0, self.needed - owing)

    def give_up(self, why: str) -> None:
        """Mark the node as failed; nothing more is sent to it."""
        self.error = self.error or RemoteError(self.target.node, why)

    def strike(self, why: str) -> None:
        """Count a failed attempt that this node caused."""
        self._strikes = 1 if len(self.lacking) < self._struck_at else self._strikes + 1
        self._struck_at = len(self.lacking)
        self._all_strikes += 1
        if self._strikes >= STRIKES or self._all_strikes >= MOST_STRIKES:
            self.give_up(why)

    def failed_to_pass(self) -> None:
        """Count a failed hop from this node."""
        self._hops_out += 1
        self.passes = self.passes and self._hops_out < HOPS

    def failed_to_receive(self) -> None:
        """Count a failed hop to this node."""
        self._hops_in += 1
        self.receives = self.receives and self._hops_in < HOPS

    @property
    def may_pass(self) -> bool:
        """Whether few enough hops from this node have failed."""
        return self._hops_out < HOPS

    @property
    def may_receive(self) -> bool:
        """Whether few enough hops to this node have failed."""
        return self._hops_in < HOPS


def assign_blame(members: Sequence[Member], outcome: Outcome, refused: set[tuple[str, str]], stall: float) -> list[str]:
    """Find out which nodes caused a chain to end early, and count it against them.

    Args:
        members: the chain's nodes, in order.
        outcome: how the chain ended.
        refused: hops that are not tried again; failed ones are added.
        stall: seconds after which a node counts as stalled.

    Returns:
        A sentence for the user about each failure.
    """
    sentences: list[str] = []
    for before, member in zip((None, *members), members, strict=False):
        why, is_hop = _failure_of(before, member, outcome, stall)
        if not why:
            continue
        if before and is_hop:
            refused.add((before.name, member.name))
            before.failed_to_pass()
            member.failed_to_receive()
        sentences.append(f"{member.name}: {why}" + ("" if member.error else "; trying another route"))
    if sentences:
        return sentences
    head, error = members[0], outcome.error
    why = error.reason if isinstance(error, RemoteError) else str(error or "")
    why = why or f"its transfer process was killed (exit code {outcome.code})"
    head.strike(why)
    return [f"{head.name}: {why}; trying again"]


def _failure_of(before: Member | None, member: Member, outcome: Outcome, stall: float) -> tuple[str, bool]:
    """Why a node failed, if it did, and whether the hop to it may be the cause."""
    if failure := outcome.failed.get(member.name):
        why, is_final = explain_failure(failure.free, failure.words, failure.where)
        if is_final:
            why += f"; at least {size(member.needed)} were needed, and a rerun continues" if member.needed else ""
            member.give_up(why)
        else:
            member.strike(why)
        return why, False
    if member.name in outcome.bad or outcome.stalled == member.name:
        why = "a unit arrived damaged" if member.name in outcome.bad else f"it sent no report for {stall:g} s"
        member.strike(why)
        return why, True
    if before and before.name in outcome.lost:
        return f"the connection from {before.name} was lost: {outcome.lost[before.name]}", True
    return "", False
