"""What a node has and can do, and what its words mean. Pure: the script's text, and facts from its output."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING, cast

from provision.errors import ClusterctlError
from provision.render import render
from provision.transfer.keys import Door, left, place_of, speakable

if TYPE_CHECKING:
    from provision.model import Inventory
    from provision.transfer.target import Target
    from provision.transfer.units import Digest

_NO_SPACE = "no space left on the device"
_NO_INODES = "no inodes left on the device"
# What a program says (in the C locale) when a disk takes no more: nothing helps but a person.
_FULL = (
    ("No space left on device", _NO_SPACE),
    ("quota exceeded", "the disk quota is used up"),
    ("Read-only file system", "the file system is read-only"),
)


@dataclass(frozen=True)
class Facts:
    """What a survey has found."""

    have: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()  # digests of units that were verified and not unpacked
    digest: Digest = "sha256sum"  # the fastest that the node knows
    user: str = ""
    reached: tuple[str, int] | None = None  # address and port at which its sshd sees us
    sshd: tuple[int, int] | None = None  # the version of its OpenSSH
    memory: str = ""  # a folder that is no disk and that the user may write to
    left: bool = False  # keys of a relay that was killed lie around
    refused: str = field(default="")  # why the node can take nothing


def script(inventory: Inventory, target: Target) -> str:
    """The script whose output ``read`` understands. It ends what an earlier stream has left running there."""
    return render("transfer/survey.sh.j2", folder=target.folder, **left(inventory, place_of(target.folder)))


def read(out: str) -> Facts:
    """Facts from the output of ``script``.

    Raises:
        ClusterctlError: the output is not whole.
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
        reached=_reached(facts["reached"][0]),
        sshd=(int(version[1]), int(version[2])) if version else None,
        memory=facts.get("memory", [""])[0],
        left="left" in facts,
    )


def door(inventory: Inventory, target: Target, facts: Facts, alias: str, host_key: tuple[str, bytes]) -> Door:
    """How other nodes log in to a surveyed one: over the fast network where there is one, else as we do."""
    node = target.node
    addresses = [node.data_address] if node.data_address else []
    if facts.reached:
        addresses.append(facts.reached[0])
    addresses.append(node.address)
    port = facts.reached[1] if facts.reached else node.port or inventory.ssh.port or 22
    return Door(alias, facts.user, port, tuple(dict.fromkeys(addresses)), host_key)


def passes(target: Target, facts: Facts) -> bool:
    """Whether a node can hand bytes on."""
    return target.has_ssh and (bool(facts.memory) or speakable(target.folder))


def reason(free: tuple[int, int], words: str, into: str) -> tuple[str, bool]:
    """Why a node could not go on, for people, and whether another attempt is in vain.

    Args:
        free: blocks and inodes of the file system.
        words: of the program that failed.
        into: where it was to write.
    """
    for theirs, ours in _FULL:
        if theirs in words:
            what = _NO_INODES if ours == _NO_SPACE and free[0] and not free[1] else ours
            return f"{what} ({into})", True
    if not all(free):  # a shell's own printf says "I/O error"
        return f"{_NO_INODES if free[0] else _NO_SPACE} ({into})", True
    return words or "a process of the transfer was killed", False


def _reached(connection: str) -> tuple[str, int] | None:
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
