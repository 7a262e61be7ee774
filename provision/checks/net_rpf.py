"""net.rpf: Whether packets that come in over one of two interfaces in the same network are let through.

With rp_filter 1 the kernel drops packets whose answer would leave over another interface (kernel, ip-sysctl; RFC 3704).
The value in force is the larger of ``all`` and the interface's own.
"""

from provision.checks.kit import Answers, Judgement, Judgements, number, ok, unknown, warn
from provision.checks.kit.network import Network, each, facts, table

TITLE = "reverse path filtering drops nothing between interfaces of one network"
WHY = "NCCL uses every network card; packets that arrive on the second one are dropped, and connections hang."

probe = facts


def judge(answers: Answers) -> Judgements:
    """WARN where two interfaces share a network and one of them filters strictly."""

    def one(name: str, net: Network) -> Judgement:
        filters = {each: row[0] for each, row in table(answers[name], "rpf").items() if row}
        twins = _twins(net)
        if not twins:
            return ok("every interface has its own network")
        if not filters.get("all", "").isdecimal():
            return unknown("net.ipv4.conf.all.rp_filter cannot be read")
        values = {each: max(int(filters["all"]), number(filters.get(each)) or 0) for each in twins}
        strict = [each for each, value in values.items() if value == 1]
        if strict:
            observed = f"{' and '.join(twins)} are in one network, and rp_filter of {strict[0]} is 1"
            fix = f"sysctl -w net.ipv4.conf.all.rp_filter=2 net.ipv4.conf.{strict[0]}.rp_filter=2, and in /etc/sysctl.d"
            return warn(observed, expected="0 or 2", fix=fix)
        return ok(f"{' and '.join(twins)} are in one network, rp_filter is {max(values.values())}")

    yield from each(answers, one)


def _twins(net: Network) -> tuple[str, ...]:
    """Interfaces with an IPv4 address in the same network, the first such group."""
    shared: dict[object, set[str]] = {}
    for name, network in net.connected:
        if name and not network.is_loopback and network.prefixlen < 32:
            shared.setdefault(network, set()).add(name)
    return next((tuple(sorted(names)) for names in shared.values() if len(names) > 1), ())
