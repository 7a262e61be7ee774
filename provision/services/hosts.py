"""hosts: every node resolves every node's name, its own to an address that other nodes can reach.

Debian's installer writes ``127.0.1.1 NAME`` into /etc/hosts. If rank 0 resolves its own name, it then listens on
loopback, and all other ranks wait for it (pytorch#79388). glibc uses the first matching line, so the block is at the
top.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import TYPE_CHECKING

from provision.inventory.schema import Section
from provision.render import quote, words
from provision.services.kit.changes import Sh, require, write_block
from provision.services.kit.plans import NodeSteps

if TYPE_CHECKING:
    from provision.model import Inventory, Node, Step

ABOUT = "a block in /etc/hosts with every node of the inventory"
AFTER = ("os_packages",)
PATH = "/etc/hosts"
# Names that every machine has for itself or for multicast addresses: the block would redirect them.
RESERVED = frozenset(
    (
        *("localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"),
        *("ip6-localnet", "ip6-mcastprefix", "ip6-allnodes", "ip6-allrouters", "ip6-allhosts", "broadcasthost"),
    )
)


class Options(Section):
    """``services: hosts:`` has no options."""


def problems(_options: Options, inventory: Inventory) -> Iterator[tuple[str, str]]:
    """Nodes whose address is a name, which /etc/hosts cannot contain; names that would resolve to another machine."""
    names: dict[str, str] = {}
    for node in inventory.nodes:
        if node.name.lower() in RESERVED:
            yield "", f"{node.name}: on every node {node.name.lower()} means the node itself; choose another name"
        other = names.setdefault(node.name.lower(), node.name)
        if other != node.name:
            yield "", f"{other} and {node.name} differ only in upper and lower case, which /etc/hosts ignores"
        if not _is_number(node.train_address):
            yield "", f"{node.name}'s address {node.train_address} is not an IP address, as /etc/hosts requires"


def plan(_options: Options, inventory: Inventory) -> Iterator[NodeSteps]:
    """One block for each node, with its own line at the end."""
    for node in inventory.nodes:
        yield NodeSteps(node.name, "base", (_write_names(inventory, node),))


def verify(_options: Options, inventory: Inventory) -> Iterator[NodeSteps]:
    """Check on every node that every name resolves to the inventory's address."""
    pairs = words(f"{node.name}={node.train_address}" for node in inventory.nodes)
    test = (
        f"for cc_p in {pairs}; do\n"
        '  cc_a=$(getent ahosts "${cc_p%%=*}" | sed -n "1s/[[:space:]].*//p")\n'
        '  [ "$cc_a" = "${cc_p#*=}" ] || exit 1\n'
        "done"
    )
    why = (
        f"for cc_p in {pairs}; do\n"
        '  cc_a=$(getent ahosts "${cc_p%%=*}" | sed -n "1s/[[:space:]].*//p")\n'
        '  [ "$cc_a" = "${cc_p#*=}" ] || echo "${cc_p%%=*} resolves to ${cc_a:-nothing}, expected ${cc_p#*=}"\n'
        "done"
    )
    for node in inventory.nodes:
        yield NodeSteps(node.name, "base", (require("names resolve to the nodes", test, why),))


def _write_names(inventory: Inventory, node: Node) -> Step:
    others = "".join(f"{each.train_address} {each.name}\n" for each in inventory.nodes if each is not node)
    names = " ".join(each.name for each in inventory.nodes)
    # The node's host name may differ from its name in the inventory. It is added unless another node has that name.
    before = (
        "read -r cc_host </proc/sys/kernel/hostname\n"
        f"cc_names={quote(f' {names} ')}\n"
        'case $cc_names in *" $cc_host "*) cc_alias= ;; *) cc_alias=" $cc_host" ;; esac\n'
        f"cc_hosts={quote(others + f'{node.train_address} {node.name}')}$cc_alias'\n'"
    )
    return write_block("names of the nodes", PATH, Sh('"$cc_hosts"'), mark="nodes", at="top", before=before)


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True
