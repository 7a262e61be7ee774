"""net.ephemeral: Whether nodes reach one another on random ports, in both directions, from the addresses they should.

Measured with listeners of our own on two ports of ip_local_port_range (``tasks/measures/ports.py``): what gets no
answer is dropped, what is refused is rejected by a firewall, and a listener says from which address it was reached.
"""

from provision.checks.kit import Answers, Judgements, Plan, fail, ok, unknown, warn
from provision.checks.kit.measures import Attempt, blamed, detail, heard
from provision.inventory import fold

LEVEL = 1
MEASURE = "ports"
TITLE = "nodes reach one another on random ports, over the training network"
WHY = "NCCL and Gloo listen on random ports: ranks that cannot connect wait for a timeout of 10 to 30 minutes."

_OWN = {"Permission denied", "Network is unreachable", "Operation not permitted"}  # EACCES, ENETUNREACH, EPERM


def judge(plan: Plan, answers: Answers) -> Judgements:
    """FAIL on the node at which connections break off; WARN where they come from another address than they should."""
    nodes = {node.name: node for node in plan.nodes}
    found = {name: heard(answer) for name, answer in answers.items()}
    tried: dict[tuple[str, str], Attempt] = {}
    for name, each in found.items():
        for one in each.tried:
            if one.kind == "random" and one.peer in nodes:
                worst = tried.get((name, one.peer))
                tried[name, one.peer] = one if worst is None or worst.state == "open" else worst
    failed = [pair for pair, one in tried.items() if one.state != "open"]
    # What a node's own kernel refuses is its own, and what it cannot answer too.
    own = {pair: pair[0] for pair in failed if tried[pair].text in _OWN}
    own |= {pair: pair[1] for pair in failed if pair[::-1] in own}
    blame = blamed(tried, [pair for pair in failed if pair not in own])
    for pair, name in own.items():
        blame.setdefault(name, []).append(pair)
    for name, each in found.items():
        detour = [one for (source, _), one in tried.items() if source == name and one.detour]
        if name in blame:
            source, target = blame[name][0]
            observed, fix = detail(tried[source, target], nodes[target], tried[source, target].port)
            who = fold([pair[0] if pair[1] == name else pair[1] for pair in blame[name]])
            way = f"{who} {'does' if len(blame[name]) == 1 else 'do'} not reach it"
            observed = f"{way if target == name else f'it does not reach {who}'}: {observed}"
            yield name, fail(observed, fix=fix)
        elif detour:
            one = detour[0]
            observed = f"{one.peer} is reached from {one.source}, not from {each.own}"
            fix = (
                f"ip route get {nodes[one.peer].train_address} on {name}: route the training network over its interface"
            )
            yield name, warn(observed, fix=fix)
        elif (count := sum(name in pair for pair in tried)) or (len(answers) == 1 and not each.problem):
            yield name, ok(f"{count} connections to and from other nodes")
        else:
            observed = each.problem or "no port was tried"
            yield name, unknown(observed, fix=f"install python3 or perl on {name}")
