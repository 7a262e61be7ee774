"""The private network: a bridge, a cable to each node and one to the controller, and an unused subnet."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from ipaddress import IPv4Network
from pathlib import Path

from provision.errors import ClusterctlError, UsageError
from provision.sandbox.host import run
from provision.sandbox.state import State

_FIRST_NODE = 11  # node01 is x.y.0.11, as in many real clusters; x.y.0.1 is the controller
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_BURST_SECONDS = 0.004  # one tick at HZ=250: tc-tbf(8) wants at least rate/HZ


def choose_subnet(taken: Iterable[IPv4Network]) -> IPv4Network:
    """The first private /16 that overlaps none of ``taken``.

    Raises:
        ClusterctlError: all of them are in use.
    """
    used = list(taken)
    for subnet in _candidates():
        if not any(subnet.overlaps(other) for other in used):
            return subnet
    raise ClusterctlError(
        "no private /16 subnet is free on this machine", hint="ip route show table all; clusterctl sandbox list"
    )


def taken_subnets() -> list[IPv4Network]:
    """The networks of this machine's addresses, routes and name servers, and of the ssh client."""
    found: list[str] = []
    for link in json.loads(run("ip", "-json", "-4", "address", "show") or "[]"):
        found += [f"{a['local']}/{a['prefixlen']}" for a in link.get("addr_info", ()) if "local" in a]
    found += [r["dst"] for r in json.loads(run("ip", "-json", "-4", "route", "show", "table", "all") or "[]")]
    with suppress(OSError):
        text = Path("/etc/resolv.conf").read_text(encoding="utf-8", errors="replace")
        found += re.findall(r"^nameserver\s+(\S+)", text, re.MULTILINE)
    found += os.environ.get("SSH_CONNECTION", "").split()[0:1]
    return list(_networks(found))


def addresses(subnet: IPv4Network, count: int) -> list[str]:
    """The addresses of ``count`` nodes."""
    return [str(subnet.network_address + _FIRST_NODE + index) for index in range(count)]


def check_rate(rate: str) -> None:
    """Raises UsageError for an invalid rate; a valid one is ``100mbit``."""
    rate_in_bits(rate)


def rate_in_bits(rate: str) -> float:
    """The bits per second of a rate in tc's format: ``1gbit``, ``100mbit``, ``2.5gbit``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate.lower())
    bits = float(match[1]) * _UNITS[match[2]] if match else 0
    if bits < 1000:
        raise UsageError(f"{rate!r} is not a valid link rate", hint="write it like 100mbit or 1gbit")
    return bits


def burst(rate: str) -> int:
    """The bucket's size in bytes: enough for the full rate on a kernel that ticks 250 times a second."""
    return max(64 * 1024, int(rate_in_bits(rate) / 8 * _BURST_SECONDS))


def plug(state: State) -> None:
    """Creates the switch and every cable; the nodes' first processes must be running.

    Raises:
        ClusterctlError: ``ip`` or ``tc`` failed.
    """
    controller, socket_ = state.uplink
    subnet = IPv4Network(state.subnet)
    lines = [
        f"link add {state.bridge} up type bridge",
        f'link set {state.bridge} alias "clusterctl sandbox {state.name}"',
        # The controller has its own cable, so that its link can be limited in both directions like the nodes'.
        f"link add {socket_} master {state.bridge} up type veth peer name {controller}",
        f"address add {subnet.network_address + 1}/{subnet.prefixlen} dev {controller}",
        f"link set {controller} up",
    ]
    run("ip", "-batch", "-", stdin="\n".join([*lines, *_cables(state)]) + "\n")
    _shape(state, [*state.uplink, *(node.link for node in state.nodes)])


def replug(state: State) -> None:
    """Creates the cables of nodes that were off, after removing the old ones; the switch exists."""
    with suppress(ClusterctlError):  # a cable is deleted with its node, but not at once
        run("ip", "-force", "-batch", "-", stdin="".join(f"link delete {node.link}\n" for node in state.nodes))
    run("ip", "-batch", "-", stdin="\n".join(_cables(state)) + "\n")
    _shape(state, [node.link for node in state.nodes])


def unplug(state: State) -> None:
    """Removes the existing cables and the switch. Their names contain the sandbox's random token.

    Raises:
        ClusterctlError: some could not be removed.
    """
    there = existing_links(state)
    if there:
        # -force: the kernel may delete the cable of a dead node at the same time.
        with suppress(ClusterctlError):
            run("ip", "-force", "-batch", "-", stdin="".join(f"link delete {name}\n" for name in there))
    left = existing_links(state)
    if left:
        raise ClusterctlError(f"network devices {', '.join(left)} cannot be removed", hint=f"ip link delete {left[0]}")


def existing_links(state: State) -> list[str]:
    """The existing network devices of the sandbox."""
    known = {name for _, name in socket.if_nameindex()}
    return [name for name in state.links if name in known]


def set_cable(state: State, link: str, *, connected: bool) -> None:
    """Connects or disconnects the cable of a node."""
    assert link in state.links, link
    run("ip", "link", "set", link, "up" if connected else "down")


def _cables(state: State) -> list[str]:
    """The commands for ip that create every node's cable."""
    lines = []
    for node in state.nodes:
        assert node.init is not None, f"{node.name} has no process yet"
        # A machine keeps its hardware address after a restart, because other machines have cached it.
        hardware = ipaddress.ip_address(node.address).packed.hex(":")
        peer = f"peer name eth0 address 02:cc:{hardware} netns {node.init.pid}"
        lines.append(f"link add {node.link} master {state.bridge} up type veth {peer}")
    return lines


def _shape(state: State, ends: Iterable[str]) -> None:
    if state.rate:
        shape = f"root tbf rate {state.rate} burst {burst(state.rate)} latency 50ms"
        run("tc", "-batch", "-", stdin="".join(f"qdisc add dev {end} {shape}\n" for end in ends))


def _candidates() -> Iterator[IPv4Network]:
    for second in range(77, 255):
        yield IPv4Network(f"10.{second}.0.0/16")
    for second in range(16, 32):
        yield IPv4Network(f"172.{second}.0.0/16")
    yield from (IPv4Network("198.18.0.0/16"), IPv4Network("198.19.0.0/16"))  # RFC 2544, for tests of networks


def _networks(texts: Iterable[str]) -> Iterator[IPv4Network]:
    for text in texts:
        with suppress(ValueError):  # "default", IPv6
            network = ipaddress.ip_network(text, strict=False)
            # 0.0.0.0/1 and the like are default routes and do not use their addresses.
            if isinstance(network, IPv4Network) and network.prefixlen >= 8:
                yield network
