"""A node's network interfaces, addresses and routes: the sh that lists them, and what it listed. Pure.

Nothing but sh is needed on a node: interfaces are read from ``/sys/class/net`` (kernel, ABI/testing/sysfs-class-net),
addresses and routes from ``ip -o`` where there is one, else from ``/proc/net``: ``fib_trie``, ``route`` (proc(5)) and
``if_inet6``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, ip_address, ip_interface
from typing import Any

from provision.checks import Answer, Answers, Check, Judgement, Judgements, Plan, call, unknown
from provision.model import Node
from provision.render import quote

Address = IPv4Address | IPv6Address
Interface = IPv4Interface | IPv6Interface
Routes = list[tuple[int, int, str, IPv4Network]]  # less the prefix length, metric, interface, network


@lru_cache(maxsize=4096)
def as_address(text: str) -> Address | None:
    """An IP address, None for what is none."""
    try:
        return ip_address(text.partition("%")[0])
    except ValueError:
        return None


def addresses(lines: Sequence[str]) -> list[tuple[str, Interface]]:
    """Each with its interface, "" where only the address is known."""
    found: list[tuple[str, str]] = []
    leaf = ""
    for line in lines:
        words = line.split()
        if match := re.match(r"\d+: (\S+)\s+inet6? (\S+)", line):  # ip -o addr
            found.append((match[1].partition("@")[0], match[2]))
        elif match := re.fullmatch(r"\|-- ([0-9.]+)", line):  # fib_trie: an address, then what it is
            leaf = match[1]
        elif line == "/32 host LOCAL" and leaf:
            found.append(("", leaf))
        elif words[0] == "inet6" and len(words) == 7:  # if_inet6: 32 digits, index, prefix length, scope, flags, name
            digits = ":".join(re.findall("....", words[1]))
            found.append((words[6], f"{digits}/{int(words[3], 16)}" if re.fullmatch("[0-9a-f]+", words[3]) else ""))
    return [(name, interface) for name, text in found if (interface := _interface(text))]


def _interface(text: str) -> Interface | None:
    try:
        return ip_interface(text)
    except ValueError:
        return None


def routes_of(lines: Sequence[str]) -> Routes:
    """/proc/net/route, the most specific first, and of equal ones that with the lowest metric."""
    found = []
    for line in lines:
        words = line.split()
        if (
            len(words) != 11
            or not words[6].isdecimal()
            or not re.fullmatch("[0-9A-F]{8} [0-9A-F]{8}", f"{words[1]} {words[7]}")
        ):
            continue
        mask = _kernels(words[7]).bit_count()
        network = IPv4Network((_kernels(words[1]) & _kernels(words[7]), mask), strict=False)
        found.append((-network.prefixlen, int(words[6]), words[0], network))
    return sorted(found)


def _kernels(digits: str) -> int:
    """A word of /proc/net/route: an address in the machine's byte order, little-endian wherever there are GPUs."""
    return int.from_bytes(bytes.fromhex(digits), "little")


def _on(address: Address, routes: Routes) -> str:
    """The interface of the most specific route, "" without one."""
    loop = "lo" if address.is_loopback else ""
    return loop or next((name for _, _, name, network in routes if address in network), "")


def placed(name: str, interface: Interface, routes: Routes) -> tuple[str, Interface]:
    """An address of which only itself is known, with the interface and the network of the route that holds it."""
    if name or not isinstance(interface, IPv4Interface):
        return name, interface
    for _, _, device, net in routes:
        if interface.ip in net and net.prefixlen:
            return device, IPv4Interface(f"{interface.ip}/{net.prefixlen}")
    return ("lo" if interface.ip.is_loopback else ""), interface


def way_to(
    lines: Sequence[str], peer: Address | None, known: Sequence[tuple[str, Interface]], routes: Routes
) -> tuple[str, Address | None] | None:
    """The interface and source address of what the node sends to ``peer``."""
    for line in lines:
        if match := re.search(r"(?:^| )dev (\S+)", line):  # ip -o route get
            source = re.search(r" src (\S+)", line)
            return match[1], as_address(source[1]) if source else None
    name = _on(peer, routes) if peer else ""
    if not name:
        return None
    return name, next((each.ip for on, each in known if on == name and each.version == 4), None)


# cc_resolve NAME: its address as programs of the node get it, IPv4 first.
RESOLVE = """\
cc_resolve() {
  case $1 in
    *:*) echo "$1" ;;
    *[!0-9.]*)
      { getent ahostsv4 "$1" || getent ahosts "$1"; } 2>/dev/null | { read -r cc_first _ && echo "$cc_first"; } ;;
    *) echo "$1" ;;
  esac
}
"""

# No program is started for an interface: a node may have hundreds of them.
LIST = """\
cc_get() { # cc_get FILE: its first line; of a number below /proc/sys dash gets one digit only, and no end of line
  cc_value=
  IFS= read -r cc_value <"$1"
  [ -n "$cc_value" ]
} 2>/dev/null
for cc_path in /sys/class/net/*; do
  [ -d "$cc_path" ] || continue
  cc_line="link ${cc_path##*/}"
  for cc_file in operstate mtu flags speed duplex; do
    cc_get "$cc_path/$cc_file"
    cc_line="$cc_line ${cc_value:--}"
  done
  cc_count="count ${cc_path##*/}"
  for cc_file in carrier_down_count statistics/rx_packets statistics/tx_packets statistics/rx_errors \\
    statistics/tx_errors statistics/rx_crc_errors; do
    cc_get "$cc_path/$cc_file"
    cc_count="$cc_count ${cc_value:-0}"
  done
  cc_kind=-
  while IFS='=' read -r cc_key cc_value; do
    [ "$cc_key" != DEVTYPE ] || cc_kind=$cc_value
  done <"$cc_path/uevent"
  [ ! -e "$cc_path/tun_flags" ] || cc_kind=tun
  if [ -e "$cc_path/device" ]; then
    cc_kind="$cc_kind,device"
    cc_get "$cc_path/address" && echo "mac $cc_value"
  fi
  cc_under=-
  for cc_lower in "$cc_path"/lower_*; do
    [ ! -e "$cc_lower" ] || cc_under="$cc_under,${cc_lower##*/lower_}"
  done
  echo "$cc_line $cc_kind $cc_under"
  echo "$cc_count"
  cc_get "/proc/sys/net/ipv4/conf/${cc_path##*/}/rp_filter" && echo "rpf ${cc_path##*/} $cc_value"
done
cc_get /proc/sys/net/ipv4/conf/all/rp_filter && echo "rpf all $cc_value"
cc_get /proc/sys/kernel/random/boot_id && echo "boot $cc_value"
cc_get /etc/machine-id && echo "machine $cc_value"
echo "host $(uname -n)"
if command -v ip >/dev/null 2>&1; then
  ip -o addr show
  [ -z "$cc_peer" ] || ip -o route get "$cc_peer" 2>/dev/null || echo noroute
else
  cat /proc/net/fib_trie /proc/net/route
  sed 's/^/inet6 /' /proc/net/if_inet6 2>/dev/null || :
fi
"""


@dataclass(frozen=True)
class Link:
    """One network interface, as sysfs shows it.

    Attributes:
        name: of the interface.
        state: operstate: ``up``, ``down``, ``unknown`` (loopback and other drivers that do not say), …
        mtu: bytes.
        up: whether it is set up (IFF_UP).
        speed: megabits a second; None where the driver does not say.
        duplex: ``full``, ``half`` or ``unknown``.
        kind: DEVTYPE of its uevent (``bridge``, ``vlan``, ``wlan``, …), ``tun``, or "" for plain ones.
        device: whether it stands for a device, real or of a virtual machine.
        under: the interfaces that it stands on: a bond's, a bridge's, a VLAN's.
    """

    name: str
    state: str = "up"
    mtu: int = 1500
    up: bool = True
    speed: int | None = None
    duplex: str = "unknown"
    kind: str = ""
    device: bool = False
    under: tuple[str, ...] = ()


@dataclass(frozen=True)
class Network:
    """A node's interfaces, and its way to the training's other nodes.

    Attributes:
        own: the address at which others reach it during training; None when its name has none.
        peer: the address of rank 0, or on rank 0 that of the second node; None for a single node or an unknown name.
        links: by name.
        addresses: of its interfaces, each with the interface's name ("" where only the address is known).
        connected: the networks that are reached without a gateway, each with an interface to it.
        way: interface and source address of what it sends to ``peer``; None: no route, or no peer.
    """

    own: Address | None = None
    peer: Address | None = None
    links: Mapping[str, Link] = field(default_factory=dict)
    addresses: tuple[tuple[str, Interface], ...] = ()
    connected: tuple[tuple[str, IPv4Network], ...] = ()
    way: tuple[str, Address | None] | None = None

    @property
    def owner(self) -> Link | None:
        """The interface that has the data address."""
        return next((self.links.get(name) for name, each in self.addresses if name and each.ip == self.own), None)

    @property
    def data(self) -> Link | None:
        """The interface that training uses: the one with the data address, else the one that leads to the others."""
        return self.owner or (self.links.get(self.way[0]) if self.way else None)

    def devices(self, link: Link, depth: int = 4) -> tuple[Link, ...]:
        """The devices below an interface: a bond's ports, a VLAN's, or itself."""
        if link.device or not depth:
            return (link,) if link.device else ()
        lower = [self.links[name] for name in link.under if name in self.links]
        return tuple(found for each in lower for found in self.devices(each, depth - 1))


def network(lines: Sequence[str]) -> Network | None:
    """The network from the lines of ``self``, ``peer`` and ``LIST``; None when they are not whole."""
    links = {link.name: link for line in lines if line.startswith("link ") and (link := _link(line.split()[1:]))}
    own, peer = (_read_address(lines, word) for word in ("self", "peer"))
    if not links or not any(line.startswith("self ") for line in lines):
        return None
    routes = routes_of(lines)
    known = [placed(name, each, routes) for name, each in dict.fromkeys(addresses(lines))]
    connected = [(name, each.network) for name, each in known if isinstance(each, IPv4Interface)]
    connected += [(name, net) for _, _, name, net in routes if net.prefixlen]
    return Network(own, peer, links, tuple(known), tuple(connected), way_to(lines, peer, known, routes))


def _read_address(lines: Sequence[str], word: str) -> Address | None:
    return next((as_address(line.removeprefix(word).strip()) for line in lines if line.startswith(f"{word} ")), None)


def _link(words: list[str]) -> Link | None:
    if len(words) != 8:
        return None
    name, state, mtu, flags, speed, duplex, kinds, under = words
    kind, _, device = kinds.partition(",")
    return Link(
        name,
        state,
        int(mtu) if mtu.isdecimal() else 0,
        bool(int(flags, 16) & 1) if re.fullmatch("0x[0-9a-f]+", flags) else False,
        int(speed) if speed.isdecimal() and 0 < int(speed) < 2**31 else None,  # -1, also as 2^32 - 1: not known
        duplex,
        "" if kind == "-" else kind,
        bool(device),
        tuple(word for word in under.split(",") if word != "-"),
    )


NO_CARRIER = "not known which interface carries its data address (see net.route)"


def facts(plan: Plan, node: Node) -> str:
    """The probe whose output ``read`` understands: interfaces, addresses, the way to rank 0 (its own: to the next).

    Besides, for single checks: ``count NAME`` and six counters, ``rpf NAME FILTER``, ``mac ADDRESS``, and ``boot``,
    ``machine`` and ``host`` with what names the machine. All of them are one probe, which runs once.
    """
    other = next((each.train_address for each in plan.nodes if each.name != node.name), "")
    return (
        f"cc_self={quote(node.train_address)}\ncc_peer={quote(other) if other else ''}\n{RESOLVE}"
        'cc_self=$(cc_resolve "$cc_self")\n[ -z "$cc_peer" ] || cc_peer=$(cc_resolve "$cc_peer")\n'
        'echo "self ${cc_self:--}"\necho "peer ${cc_peer:--}"\n' + LIST
    )


def read(answer: Answer) -> Network | None:
    """What ``facts`` brought back; None when it is not whole."""
    return _read(answer.out)


@lru_cache(maxsize=256)  # several checks read the same answer
def _read(out: str) -> Network | None:
    return network(Answer(out).lines)


def each(answers: Answers, judge: Callable[[str, Network], Judgement]) -> Judgements:
    """``judge`` for every node whose answer is whole, UNKNOWN for the others."""
    for name, answer in answers.items():
        found = read(answer)
        if found is None:
            yield name, unknown(f"its interfaces cannot be read: {answer.err or 'no list of interfaces'}")
        else:
            yield name, judge(name, found)


def carriers(answers: Answers) -> tuple[dict[str, tuple[Network, Link]], list[tuple[str, Judgement]]]:
    """The interface that training uses on every node, and UNKNOWN for nodes where it is not known which that is."""
    found, lost = {}, []
    for name, answer in answers.items():
        net = read(answer)
        link = net.data if net else None
        if net and link:
            found[name] = (net, link)
        else:
            lost.append((name, unknown(NO_CARRIER)))
    return found, lost


def carrier_nodes(check: str, title: str, **options: Any) -> Callable[[Callable[..., Judgements]], Check]:
    """A check whose function judges the interfaces that training uses, of all nodes.

    The function names the arguments it needs: ``found`` (see ``carriers``), ``answers``, ``limits``.

    Args:
        check: the id.
        title: what is true of a healthy node.
        options: further fields of ``Check``. The docstring's text below its first line is ``about``.
    """

    def declare(function: Callable[..., Judgements]) -> Check:
        def judge(plan: Plan, answers: Answers) -> Judgements:
            found, lost = carriers(answers)
            yield from lost
            yield from call(function, found=found, answers=answers, limits=plan.limits)

        about = (function.__doc__ or "").partition("\n")[2]
        return Check(check, title, judge=judge, probe=facts, about=about, **options)

    return declare


def table(answer: Answer, word: str) -> dict[str, list[str]]:
    """The lines of ``facts`` that begin with ``word``: by their second word what follows it."""
    rows = (line.split() for line in answer.lines)
    return {row[1]: row[2:] for row in rows if row[0] == word and len(row) > 1}
