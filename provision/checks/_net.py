"""What network checks share: which interface carries a node's data address, and which leads to the others. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from provision.checks import Answer, Plan, unknown
from provision.checks._interfaces import LIST, RESOLVE, Link, Network, network
from provision.model import Finding, Node
from provision.render import quote

NO_CARRIER = "not known which interface carries its data address (see net.route)"


def facts(seen: Plan, node: Node) -> str:
    """The probe whose output ``read`` understands: interfaces, addresses, the way to rank 0 (its own: to the next).

    Besides, for single checks: ``count NAME`` and six counters, ``rpf NAME FILTER``, ``mac ADDRESS``, and ``boot``,
    ``machine`` and ``host`` with what names the machine. All of them are one probe, which runs once.
    """
    others = [each.train_address for each in seen.nodes if each.name != node.name]
    return (
        f"cc_self={quote(node.train_address)}\ncc_peer={quote(others[0]) if others else ''}\n{RESOLVE}"
        'cc_self=$(cc_resolve "$cc_self")\n[ -z "$cc_peer" ] || cc_peer=$(cc_resolve "$cc_peer")\n'
        'echo "self ${cc_self:--}"\necho "peer ${cc_peer:--}"\n' + LIST
    )


def read(answer: Answer) -> Network | None:
    """What ``facts`` brought back; None when it is not whole."""
    return network(answer.lines)


def each(check: str, answers: Mapping[str, Answer], judge: Callable[[str, Network], Finding]) -> Iterator[Finding]:
    """``judge`` for every node whose answer is whole, UNKNOWN for the others."""
    for name, answer in answers.items():
        found = read(answer)
        if found is None:
            yield unknown(check, name, f"its interfaces cannot be read: {answer.err or 'there is no list of them'}")
        else:
            yield judge(name, found)


def carriers(check: str, answers: Mapping[str, Answer]) -> tuple[dict[str, tuple[Network, Link]], list[Finding]]:
    """The interface that training uses on every node, and UNKNOWN for nodes where it is not known which that is."""
    found, lost = {}, []
    for name, answer in answers.items():
        net = read(answer)
        link = net.data if net else None
        if net and link:
            found[name] = (net, link)
        else:
            lost.append(unknown(check, name, NO_CARRIER))
    return found, lost


def table(answer: Answer, word: str) -> dict[str, list[str]]:
    """The lines of ``facts`` that begin with ``word``: by their second word what follows it."""
    rows = (line.split() for line in answer.lines)
    return {row[1]: row[2:] for row in rows if row[0] == word and len(row) > 1}
