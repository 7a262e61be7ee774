"""hosts: every node knows every node by name, itself by an address that others can reach.

Debian's installer writes ``127.0.1.1 NAME`` into /etc/hosts. A rank 0 that looks itself up then listens on loopback,
and all others wait for it (pytorch#79388). glibc takes the first line that matches, so the block stands at the top.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import TYPE_CHECKING

from provision.inventory.schema import Section
from provision.render import quote, words
from provision.services.kit.changes import Sh, block, must
from provision.services.kit.plans import Duty

if TYPE_CHECKING:
    from provision.model import Inventory, Node, Step

ABOUT = "a block in /etc/hosts with every node of the inventory"
AFTER = ("os_packages",)
PATH = "/etc/hosts"
# What every machine calls itself, or a multicast address: a block at the top of the file would redirect them.
OWN = frozenset(
    (
        *("localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"),
        *("ip6-localnet", "ip6-mcastprefix", "ip6-allnodes", "ip6-allrouters", "ip6-allhosts", "broadcasthost"),
    )
)


class Options(Section):
    """``services: hosts:`` has no options."""


def problems(_options: Options, inventory: Inventory) -> Iterator[tuple[str, str]]:
    """Nodes whose address is a name: /etc/hosts needs numbers; and names that would lead to another machine."""
    names: dict[str, str] = {}
    for node in inventory.nodes:
        if node.name.lower() in OWN:
            yield "", f"{node.name}: every node calls itself {node.name.lower()}; give the node another name"
        other = names.setdefault(node.name.lower(), node.name)
        if other != node.name:
            yield "", f"{other} and {node.name} differ in upper and lower case only, which /etc/hosts ignores"
        if not _number(node.train_address):
            yield "", f"{node.name}'s address {node.train_address} is no IP address, which /etc/hosts needs"


def plan(_options: Options, inventory: Inventory) -> Iterator[Duty]:
    """One block for each node, its own line last."""
    for node in inventory.nodes:
        yield Duty(node.name, "base", (_step(inventory, node),))


def verify(_options: Options, inventory: Inventory) -> Iterator[Duty]:
    """Every name leads to the address that the inventory has, on every node."""
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
        '  [ "$cc_a" = "${cc_p#*=}" ] || echo "${cc_p%%=*} leads to ${cc_a:-nothing} and not to ${cc_p#*=}"\n'
        "done"
    )
    for node in inventory.nodes:
        yield Duty(node.name, "base", (must("names lead to the nodes", test, why),))


def _step(inventory: Inventory, node: Node) -> Step:
    others = "".join(f"{each.train_address} {each.name}\n" for each in inventory.nodes if each is not node)
    names = " ".join(each.name for each in inventory.nodes)
    # The node's host name may be another than its name here; one that is another node's name is left alone.
    before = (
        "read -r cc_host </proc/sys/kernel/hostname\n"
        f"cc_names={quote(f' {names} ')}\n"
        'case $cc_names in *" $cc_host "*) cc_alias= ;; *) cc_alias=" $cc_host" ;; esac\n'
        f"cc_hosts={quote(others + f'{node.train_address} {node.name}')}$cc_alias'\n'"
    )
    return block("names of the nodes", PATH, Sh('"$cc_hosts"'), mark="nodes", at="top", before=before)


def _number(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True
