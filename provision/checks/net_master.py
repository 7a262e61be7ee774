"""net.master: Whether every node reaches rank 0 on MASTER_PORT.

Measured with a listener of our own on rank 0 (``tasks/measures/ports.py``): what is refused there, a firewall refuses.
"""

from provision.checks.kit import Answers, Judgement, Judgements, Plan, fail, ok, unknown, warn
from provision.checks.kit.measures import Heard, detail, heard
from provision.checks.net_ports import DEFAULT

LEVEL = 1
MEASURE = "ports"
TITLE = "every node reaches rank 0 on MASTER_PORT"
WHY = "Nodes that cannot reach rank 0 wait for the rendezvous until its timeout of many minutes, and so do all others."


def judge(plan: Plan, answers: Answers) -> Judgements:
    """FAIL where the port is taken or not reached; rank 0 is named when no node reaches it."""
    master = next((node for node in plan.nodes if node.name in answers), plan.nodes[0])
    found = {name: heard(answer) for name, answer in answers.items()}
    port = plan.inventory.train.port or DEFAULT
    tried = {name: each.to(master.name, "master") for name, each in found.items() if name != master.name}
    good = {"open", "foreign"} if found.get(master.name, Heard()).master == "busy" else {"open"}
    failed = [name for name, one in tried.items() if one and one.state not in good]
    unreachable = len(failed) > 1 and len(failed) == sum(one is not None for one in tried.values())
    for name, each in found.items():
        one = tried.get(name)
        if name == master.name:
            yield name, _of_master(plan, name, each, failed if unreachable else [])
        elif one is None:
            observed = each.problem or "the port was not tried"
            yield name, unknown(observed, fix=f"install python3 or perl on {name}" if each.problem else "")
        elif name in failed and not unreachable:
            observed, fix = detail(one, master, port)
            yield name, fail(observed, fix=fix)
        elif name in failed:
            yield name, ok(f"no node reaches {master.name}: see its finding")
        else:
            yield name, ok(f"reaches port {port} of {master.name}")


def _of_master(plan: Plan, name: str, mine: Heard, failed: list[str]) -> Judgement:
    port = plan.inventory.train.port or DEFAULT
    if mine.master == "busy":
        by = f" by {mine.owner}" if mine.owner else ""
        fix = f"ss -Hltnp 'sport = :{port}' on {name}; end that program, or choose another train.port"
        if plan.inventory.train.port:
            return fail(f"port {port} is taken{by}", expected="a free MASTER_PORT", fix=fix)
        observed = f"port {port} is taken{by}; train finds a free one"
        return warn(observed, expected="a free MASTER_PORT", fix=fix)
    if failed:
        fix = f"let the training network in on {name}: firewall-cmd --zone=trusted --add-source=SUBNET, or ufw, or nft"
        return fail(f"none of {len(failed)} nodes reaches port {port}", fix=fix)
    if mine.master != "open":
        observed = mine.problem or f"no listener on port {port}: {mine.master or 'no answer'}"
        return unknown(observed, fix=f"install python3 or perl on {name}")
    return ok(f"port {port} is free, and reached")
