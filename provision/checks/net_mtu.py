"""net.mtu: Whether the interfaces that carry the training have the same MTU on all nodes."""

from provision.checks.kit import Answers, Judgements, odd
from provision.checks.kit.network import carriers, facts

TITLE = "the same MTU on every node's data interface"
WHY = "Large packets vanish between nodes whose MTU differs: connections open, then hang with the first tensor."

probe = facts


def judge(answers: Answers) -> Judgements:
    """FAIL on the nodes that differ."""
    found, lost = carriers(answers)
    yield from lost
    values = {name: link.mtu for name, (_, link) in found.items()}
    interface = {link.name for _, link in found.values()}
    fix = f"ip link set {interface.pop() if len(interface) == 1 else 'INTERFACE'} mtu N, and on the switch"
    yield from odd(values, noun="MTU", fix=fix, verdict="FAIL")
