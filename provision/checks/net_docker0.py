"""net.docker0: Whether a bridge inside the node has a subnet that holds another node's address.

Docker gives docker0 172.17.0.0/16 by default, and further networks the next ones (Docker's documentation,
"default-address-pools"); libvirt takes 192.168.122.0/24.
"""

from provision.checks.kit import Answers, Judgement, Judgements, Plan, fail, ok
from provision.checks.kit.network import Address, Network, as_address, each, facts, read

TITLE = "no bridge inside the node covers another node's address"
WHY = "What the node sends to those nodes goes to its own containers: they cannot be reached from it."

probe = facts


def judge(seen: Plan, answers: Answers) -> Judgements:
    """FAIL where a subnet of a bridge without devices overlaps."""
    members: dict[Address, str] = {}
    for node in seen.nodes:
        answer = answers.get(node.name)
        own = read(answer) if answer else None
        for address in (as_address(node.address), as_address(node.data_address or ""), own.own if own else None):
            if address:
                members.setdefault(address, node.name)

    def one(name: str, net: Network) -> Judgement:
        inner = [
            (link, interface)
            for on, interface in net.addresses
            if (link := net.links.get(on)) and link.kind == "bridge" and not net.devices(link)
        ]
        for link, interface in inner:
            hit = sorted({other for address, other in members.items() if address in interface.network} - {name})
            if hit:
                observed = f"{link.name} has {interface.network}, which holds the address of {', '.join(hit)}"
                fix = '"bip" or "default-address-pools" in /etc/docker/daemon.json (libvirt: virsh net-edit default)'
                return fail(observed, fix=fix)
        return ok(f"{len(inner)} inner bridges, none overlaps" if inner else "no inner bridge with an address")

    yield from each(answers, one)
