"""ib.mtu: network interfaces of RDMA adapters have the same MTU on every node.

``device/net/*/mtu`` in sysfs. IPoIB has 2044 or 4092 in datagram and up to 65520 in connected mode. RoCE carries RDMA
packets of 4096 bytes only where its interface has 4200 or more, which usually means 9000; at the usual 1500 it sends
1024.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from provision.checks.kit import Answers, Judgements, Plan, majority, not_here, number, unknown
from provision.checks.kit.infiniband import PORTS, Fault, Port, ports, sections, worst

TITLE = "the same MTU on every node's RDMA interfaces"
WHY = "Where one node's MTU is larger, its large packets vanish: connections open and the first all-reduce hangs."
LIMITS = {"roce_bytes": 4200}
PROBE = (
    PORTS
    + """\
for net in /sys/class/infiniband/*/device/net/*; do
  device=${net#/sys/class/infiniband/}
  mtu=$(cat "$net/mtu" 2>/dev/null) || continue
  echo "@net ${device%%/*} ${net##*/} $mtu $(cat "$net/operstate" 2>/dev/null)"
done
"""
)


def judge(plan: Plan, answers: Answers) -> Judgements:
    """Name interfaces with another MTU than similar ones, and RoCE with a small one, of those that are up."""
    found: dict[str, list[_Interface]] = {}
    for name, answer in answers.items():
        every = ports(answer.out)
        if every is None:
            yield name, unknown("what the node printed about its ports is not understood")
        elif mine := list(_up(answer.out, every)):
            found[name] = mine
        else:
            yield name, not_here("no network interface on an RDMA adapter is up")
    for name, mine in found.items():
        faults = []
        for at in mine:
            same = {n: other.mtu for n, each in found.items() for other in each if other.device == at.device}
            faults += list(_faults(at, majority(same), sorted(set(same.values())), plan.limits["roce_bytes"]))
        yield name, worst(faults, ", ".join(f"{at.shown} {at.mtu}" for at in mine))


@dataclass(frozen=True)
class _Interface:
    device: str
    net: str
    mtu: int
    roce: bool

    @property
    def shown(self) -> str:
        return f"{self.device} ({self.net})"


def _up(out: str, every: tuple[Port, ...]) -> Iterator[_Interface]:
    layers = {port.device: port.values.get("link_layer") for port in every}
    for (device, net, mtu, *state), _ in sections(out, "net"):
        if "down" not in state and device in layers:
            yield _Interface(device, net, number(mtu) or 0, layers[device] == "Ethernet")


def _faults(at: _Interface, usual: int | None, every: list[int], roce: float) -> Iterator[Fault]:
    if at.mtu != usual:
        theirs = str(usual) if usual else " and ".join(map(str, every))
        observed = f"{at.shown} has MTU {at.mtu}, {'most nodes' if usual else 'the nodes'} have {theirs}"
        fix = f"ip link set {at.net} mtu {usual or every[-1]}, and in its configuration"
        yield Fault("FAIL", observed, str(usual or "the same on every node"), fix)
    elif at.roce and at.mtu < roce:
        observed = f"{at.shown} has MTU {at.mtu}: RoCE sends small packets"
        yield Fault(
            "WARN", observed, f"{roce:g} or more", f"ip link set {at.net} mtu 9000 on every node, and on the switch"
        )
