"""Which network NCCL has really used, from its own log (``NCCL_DEBUG=INFO``, subsystems INIT and NET; 2.4 to 2.28).

Three kinds of lines tell. What NCCL found::

    NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB ib0:192.168.11.1<0>
    NCCL INFO NET/Socket : Using [0]eth0:10.77.0.10<0>

what it chose (``Using network IB``), and by which device each channel leaves the node::

    NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_FOUND_IB = re.compile(r"NCCL INFO NET/IB ?: Using (.+?)(?:; OOB ([^:\s]+):.*)?$", re.MULTILINE)
_FOUND_SOCKET = re.compile(r"NCCL INFO NET/Socket ?: Using (.+)$", re.MULTILINE)
_IB_DEVICE = re.compile(r"\[(\d+)\](?:\{\d+\} )?([^\s:]+:\d+)/(IB|RoCE)")
_SOCKET_DEVICE = re.compile(r"\[(\d+)\]([^\s:]+):")
_CHOSEN = re.compile(r"NCCL INFO Using network (.+?)\s*$", re.MULTILINE)
_CHANNEL = re.compile(r"NCCL INFO Channel \d+(?:/\d+)? : .* via ([A-Z]\w*)(?:/(\w+))?(?:/(\d+))?(/GDRDMA)?")


@dataclass(frozen=True)
class Used:
    """A network that was used.

    Attributes:
        kind: ``InfiniBand``, ``RoCE``, ``TCP``, ``inside the node``, or the name of NCCL's plugin.
        device: the devices, as ``mlx5_0:1, mlx5_1:1``; empty where there are none.
        interface: that carries TCP, or over which the connections of InfiniBand are made.
        direct: whether data goes from GPU to GPU past the memory of the host; None: no channel left the node.
    """

    kind: str
    device: str = ""
    interface: str = ""
    direct: bool | None = None

    def __str__(self) -> str:
        """For people: ``InfiniBand, mlx5_0:1, GPUDirect``."""
        parts = [self.kind, self.device or self.interface]
        if self.direct is not None and self.kind != "TCP":
            parts.append("GPUDirect" if self.direct else "without GPUDirect")
        return ", ".join(filter(None, parts))


def read(text: str) -> Used | None:
    """What a log of one process, or several of one node, says; None when it says nothing about it."""
    devices: dict[str, tuple[str, str]] = {}
    sockets: dict[str, str] = {}
    interface = ""
    for match in _FOUND_IB.finditer(text):
        interface = match[2] or interface
        devices |= {number: (name, layer) for number, name, layer in _IB_DEVICE.findall(match[1])}
    for match in _FOUND_SOCKET.finditer(text):
        sockets |= dict(_SOCKET_DEVICE.findall(match[1]))
    channels = _CHANNEL.findall(text)
    leaving = [(net, number, bool(direct)) for way, net, number, direct in channels if way == "NET"]
    chosen = _CHOSEN.findall(text)
    if not leaving and channels:
        return Used("inside the node")
    if leaving:
        net = leaving[-1][0]
    elif chosen:
        net = chosen[-1]
    else:
        return None
    numbers = {number for name, number, _ in leaving if name == net}
    if net == "Socket":
        names = _chosen(sockets, numbers)
        return Used("TCP", interface=", ".join(names) or interface)
    used = [devices[number] for number in sorted(numbers, key=int) if number in devices] or list(devices.values())
    direct = all(way for name, _, way in leaving if name == net) if leaving else None
    if not net.startswith("IB") or not used:
        return Used("InfiniBand" if net.startswith("IB") else net, direct=direct, interface=interface)
    kind = "RoCE" if any(layer == "RoCE" for _, layer in used) else "InfiniBand"
    return Used(kind, ", ".join(dict.fromkeys(name for name, _ in used)), interface, direct)


def _chosen(found: dict[str, str], numbers: Iterable[str]) -> list[str]:
    names = [found[number] for number in sorted(numbers, key=int) if number in found]
    return list(dict.fromkeys(names or found.values()))
