"""net.route: Whether a node's data address is on one of its interfaces, and is the one that its packets carry.

PyTorch's rendezvous compares MASTER_ADDR with the machine's own addresses and waits 60 to 900 s when none matches
(pytorch#79388).
"""

from provision.checks.kit import Answers, Judgement, Judgements, Plan, fail, ok, warn
from provision.checks.kit.network import Network, each, facts

TITLE = "the data address is on an interface of the node, and is what others see"
WHY = (
    "Rank 0 cannot listen at an address that it does not have, and nodes that answer from another network use the slow "
    "one or are not let through."
)

probe = facts


def judge(seen: Plan, answers: Answers) -> Judgements:
    """FAIL where no interface has the address; WARN where packets to rank 0 carry another one."""
    written = {node.name: node.train_address for node in seen.nodes}

    def one(name: str, net: Network) -> Judgement:
        address = written[name]
        if net.own is None:
            fix = f"getent hosts {address}; write an IP address into the inventory"
            return fail(f"{address} has no address there", fix=fix)
        if net.owner is None:
            has = sorted({str(each.ip) for _, each in net.addresses if not (each.is_loopback or each.is_link_local)})
            observed = f"no interface has {net.own}; it has {', '.join(has) or 'no address'}"
            return fail(observed, fix=f"correct data_address of {name} in the inventory")
        source = net.way[1] if net.way else None
        if source and source != net.own and net.way and net.way[0] != "lo":
            observed = (
                f"packets to {net.peer} leave over {net.way[0]} with {source}, not with {net.own} of {net.owner.name}"
            )
            return warn(observed, fix=f"ip route get {net.peer}; give it a route over the fast net")
        return ok(f"{net.own} on {net.owner.name}")

    yield from each(answers, one)
