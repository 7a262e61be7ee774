"""Which nodes a transfer is for, and what became of it. What is sent are ``model.Leg``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from provision.model import Node, Wire

if TYPE_CHECKING:
    from provision.errors import ClusterctlError


@dataclass(frozen=True)
class Target:
    """A node that needs legs.

    Attributes:
        node: the node.
        folder: the transfer's own folder there, absolute; exists, mode 0700, belongs to the user. It holds ``have``
            (keys, one a line; the caller may have written some), what has arrived and is not unpacked, and scripts.
            The folder around it is the transfer's place: whoever holds that alone may remove the keys of its relays.
        into: where legs are unpacked, absolute; exists.
        wire: ``zstd`` where the node has zstd.
        has_ssh: whether the node has an ssh client.
    """

    node: Node
    folder: str
    into: str
    wire: Wire
    has_ssh: bool


@dataclass(frozen=True)
class Transferred:
    """What became of a transfer.

    Attributes:
        errors: by node name, None, or why the node does not have everything.
        sent: bytes that this machine has sent to all nodes together, headers included.
    """

    errors: Mapping[str, ClusterctlError | None]
    sent: int
