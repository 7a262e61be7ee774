"""net.rpf: Whether packets that come in over one of two interfaces in the same network are let through.

With rp_filter 1 the kernel drops packets whose answer would leave over another interface (kernel, ip-sysctl; RFC 3704).
The value in force is the larger of ``all`` and the interface's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, unknown, warn
from provision.checks._host import number
from provision.checks._interfaces import Network
from provision.checks._net import each, facts, table
from provision.model import Finding

ID = "net.rpf"
LEVEL = 0
TITLE = "reverse path filtering drops nothing between interfaces of one network"
WHY = "NCCL uses every network card; packets that arrive on the second one are dropped, and connections hang."

probe = facts


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """WARN where two interfaces share a network and one of them filters strictly."""

    def one(name: str, net: Network) -> Finding:
        filters = {each: row[0] for each, row in table(answers[name], "rpf").items() if row}
        twins = _twins(net)
        if not twins:
            return ok(ID, name, "every interface has a network of its own")
        if not filters.get("all", "").isdecimal():
            return unknown(ID, name, "net.ipv4.conf.all.rp_filter cannot be read")
        values = {each: max(int(filters["all"]), number(filters.get(each)) or 0) for each in twins}
        strict = [each for each, value in values.items() if value == 1]
        if strict:
            said = f"{' and '.join(twins)} are in one network, and rp_filter of {strict[0]} is 1"
            fix = f"sysctl -w net.ipv4.conf.all.rp_filter=2 net.ipv4.conf.{strict[0]}.rp_filter=2, and in /etc/sysctl.d"
            return warn(ID, name, said, expected="0 or 2", fix=fix)
        return ok(ID, name, f"{' and '.join(twins)} are in one network, rp_filter is {max(values.values())}")

    yield from each(ID, answers, one)


def _twins(net: Network) -> tuple[str, ...]:
    """Interfaces with an IPv4 address in the same network, the first such group."""
    shared: dict[object, set[str]] = {}
    for name, network in net.connected:
        if name and not network.is_loopback and network.prefixlen < 32:
            shared.setdefault(network, set()).add(name)
    return next((tuple(sorted(names)) for names in shared.values() if len(names) > 1), ())
