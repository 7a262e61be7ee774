"""ib.gid: RoCE ports have an address that routes, at the same index on every node.

``gids/*`` and ``gid_attrs/types/*`` in sysfs: NCCL needs an entry of type ``RoCE v2`` made from an IPv4 address
(``::ffff:a.b.c.d``), and NCCL_IB_GID_INDEX names it. Addresses that begin with fe80 do not leave their subnet. On nodes
with InfiniBand, Ethernet ports are taken for management and do not count.
"""

from provision.checks.kit import Answers, Judgements, majority, not_here, number, ok, unknown
from provision.checks.kit.infiniband import ACTIVE, PORTS, Fault, ports, sections, worst

TITLE = "RoCE v2 with an IPv4 address, at the same index on every node"
WHY = "NCCL takes one GID index for all nodes: where that entry is missing or another, connections time out."
PROBE = (
    PORTS
    + """\
for port in /sys/class/infiniband/*/ports/*; do
  case $(cat "$port/link_layer" 2>/dev/null) in Ethernet) ;; *) continue ;; esac
  device=${port%/ports/*}
  echo "@gids ${device##*/} ${port##*/}"
  index=0
  while [ "$index" -lt 16 ]; do
    gid=$(cat "$port/gids/$index" 2>/dev/null) || break
    case $gid in
      0000:0000:0000:0000:0000:0000:0000:0000) ;;
      *) echo "$index $gid $(cat "$port/gid_attrs/types/$index" 2>/dev/null)" ;;
    esac
    index=$((index + 1))
  done
done
"""
)
_IPV4 = "0000:0000:0000:0000:0000:ffff:"


def judge(answers: Answers) -> Judgements:
    """Name RoCE ports that are up without an IPv4 address, and those with another index than similar ports."""
    indexes: dict[str, dict[str, int | None]] = {}
    for name, answer in answers.items():
        every = ports(answer.out)
        if every is None:
            yield name, unknown("what the node printed about its ports is not understood")
        elif any(port.infiniband for port in every):
            yield name, ok("InfiniBand, which needs no RoCE address")
        elif up := [port for port in every if port.values.get("link_layer") == "Ethernet" and port.state == ACTIVE]:
            observed = dict(sections(answer.out, "gids"))
            indexes[name] = {port.name: _index(observed.get((port.device, str(port.number)), "")) for port in up}
        else:
            yield name, not_here("no RoCE port is Active")
    for name, mine in indexes.items():
        faults = []
        for at, index in mine.items():
            common = majority({node: each[at] for node, each in indexes.items() if each.get(at) is not None})
            if index is None:
                fix = f"give the network interface of {at} an IPv4 address; a port for management needs none"
                faults.append(Fault("WARN", f"{at} is Active and has no RoCE v2 address of IPv4", "an address", fix))
            elif index != common:
                expected = f"index {common}" if common is not None else "the same index on every node"
                fix = "restart its interface, so that addresses come in the usual order, or set NCCL_IB_GID_INDEX there"
                faults.append(Fault("WARN", f"{at} has its RoCE v2 address at index {index}", expected, fix))
        yield name, worst(faults, ", ".join(f"{at} index {index}" for at, index in mine.items()))


def _index(text: str) -> int | None:
    for line in text.splitlines():
        index, gid, *kind = line.split(maxsplit=2) or ["", ""]
        if gid.startswith(_IPV4) and kind == ["RoCE v2"]:
            return number(index)
    return None
