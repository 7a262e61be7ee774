"""net.iface: Whether a node reaches rank 0 over a real network interface that is up.

NCCL and Gloo take the first interface that they find unless a variable names one; it may be docker0 or lo
(NCCL's documentation, NCCL_SOCKET_IFNAME). ``train`` names the interface of this route to them: it must be a real one.
An interface that the inventory's ``train: env:`` names must exist on every node and be up.
Kinds of interfaces are DEVTYPE in their uevent (the kernel's SET_NETDEV_DEVTYPE) and names that container networks use.
"""

import re
from collections.abc import Iterable, Mapping

from provision.checks.kit import Answers, Judgement, Judgements, Plan, fail, ok, warn
from provision.checks.kit.network import Link, Network, each, facts

TITLE = "rank 0 is reached over a real interface that is up"
WHY = (
    "NCCL and Gloo would talk over an interface that leads to no other node: the training hangs before its first step."
)

_CONTAINERS = re.compile(r"docker|br-|veth|virbr|cni|flannel|cali|lxc|podman|kube|cilium|vnet")
_VPN = {"tun": "a VPN", "wireguard": "a VPN", "wlan": "wireless", "wwan": "wireless"}
_NAMED = "remove it from train: env: in the inventory, because train names each node's interface; or see ip -br addr"
_FIX = "give the node a data_address on the training network in the inventory, or correct its routes: ip route get"


def judge(plan: Plan, answers: Answers) -> Judgements:
    """FAIL without a way, or over what leads nowhere; WARN over a VPN or wireless."""
    names = {node.name: node.train_address for node in plan.nodes}

    def one(name: str, net: Network) -> Judgement:
        target = next((address for other, address in names.items() if other != name), "")
        if not target:
            return ok("the only node")
        if net.peer is None:
            return fail(f"{target} has no address there", fix=f"getent hosts {target}")
        if net.way is None:
            return fail(f"no route to {net.peer}", fix=f"ip route get {net.peer}")
        if missing := _missing(plan.inventory.train.env, net):
            return fail(f"{missing}; the node has {', '.join(sorted(net.links))}", fix=_NAMED)
        link = net.links.get(net.way[0], Link(net.way[0]))
        return _of(net, link)

    yield from each(answers, one)


probe = facts


def _of(net: Network, link: Link) -> Judgement:
    to = f"{net.peer} is reached over {link.name}"
    fix = f"{_FIX} {net.peer}"
    if link.name == "lo":
        return fail(f"{to}: it takes that address for its own", fix=fix)
    if not link.up or link.state not in {"up", "unknown"}:
        return fail(f"{to}, which is {link.state}", fix=f"ip link show {link.name}")
    if link.kind in _VPN:
        return warn(f"{to}, which is {_VPN[link.kind]}", fix=fix)
    if not net.devices(link) and (_CONTAINERS.match(link.name) or link.kind == "bridge"):
        return fail(f"{to}, a bridge for containers or machines inside the node", fix=fix)
    return ok(to)


def _missing(env: Mapping[str, str], net: Network) -> str:
    """The variable that names no interface of the node that is up; "" if there is none.

    NCCL matches the starts of names, a name after ``=`` exactly, and takes none of those after ``^`` (NCCL's
    documentation, NCCL_SOCKET_IFNAME). Gloo takes whole names (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp).
    """
    up = [name for name, link in net.links.items() if link.up]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = env.get(variable, "")
        exact = value.startswith("=") or variable.startswith("GLOO")
        names = [name for name in value.removeprefix("=").split(",") if name]
        if names and not value.startswith("^") and not any(_is_named(name, names, exact=exact) for name in up):
            return f"{variable}={value} names no interface that is up"
    return ""


def _is_named(name: str, names: Iterable[str], *, exact: bool) -> bool:
    return any(name == each if exact else name.startswith(each) for each in names)
