"""Chooses NCCL's network from the ports of all nodes.

All nodes must use the same one: InfiniBand if each node has an active port, else RoCE if each has an active Ethernet
port with an address for RoCE v2, else TCP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from provision.model import Notice
from provision.run import RunSpec, Worker

Port = Mapping[str, Any]

# Two H200 nodes moved 4 GB/s over TCP at NCCL's defaults; an HDR port carries 25 GB/s, an NDR port 50.
SLOW = "TCP moves a few GB/s at NCCL's defaults, one HDR or NDR port 20 to 40"


@dataclass(frozen=True)
class Network:
    """The network of a run: by rank, its ports (``mlx5_0:1``), and for RoCE the index of their address."""

    kind: Literal["infiniband", "roce", "tcp"]
    ports: tuple[tuple[str, ...], ...] = ()
    gids: tuple[int | None, ...] = ()
    notices: tuple[Notice, ...] = ()


def network(spec: RunSpec) -> Network:
    """The fastest network that all nodes share."""
    ib = [[port for port in _active(worker) if port.get("link_layer") != "Ethernet"] for worker in spec.workers]
    if all(ib):
        return Network("infiniband", tuple(map(_names, map(_fastest, ib))))
    roce = [
        [port for port in _active(worker) if port.get("link_layer") == "Ethernet" and port.get("gid_index") is not None]
        for worker in spec.workers
    ]
    if all(roce):
        chosen = [_fastest(ports) for ports in roce]
        gids = tuple(_one_gid(ports) for ports in chosen)
        several = [worker.node.name for worker, gid in zip(spec.workers, gids, strict=True) if gid is None]
        notices: tuple[Notice, ...] = ()
        if several and len(spec.workers) > 1:
            text = f"{', '.join(several)}: the RoCE ports have their addresses at different GID indexes; NCCL chooses"
            notices = (Notice(f"{text} (since 2.21; an older one needs NCCL_IB_HCA with one port)", "warning"),)
        return Network("roce", tuple(map(_names, chosen)), gids, notices)
    return Network("tcp", notices=_why_tcp(spec, ib, roce))


def variables(spec: RunSpec, rank: int) -> dict[str, str]:
    """NCCL's variables on one node."""
    found = network(spec)
    if found.kind == "tcp":
        return {"NCCL_IB_DISABLE": "1"}
    env = {"NCCL_IB_HCA": "=" + ",".join(found.ports[rank])}  # =: exactly these ports, not prefixes
    if found.kind == "roce" and found.gids[rank] is not None:
        env["NCCL_IB_GID_INDEX"] = str(found.gids[rank])
    return env


def _active(worker: Worker) -> list[Port]:
    return [port for port in worker.facts.infiniband if port.get("state") == "ACTIVE"]


def _fastest(ports: Sequence[Port]) -> list[Port]:
    """The ports with the highest rate: a slower port is often for storage, and would slow down every ring."""
    best = max(port.get("rate") or 0 for port in ports)
    return [port for port in ports if (port.get("rate") or 0) == best]


def _names(ports: Sequence[Port]) -> tuple[str, ...]:
    return tuple(f"{port['device']}:{port['port']}" for port in ports)


def _one_gid(ports: Sequence[Port]) -> int | None:
    """NCCL has one index for all ports of a node."""
    indexes = {int(port["gid_index"]) for port in ports}
    return indexes.pop() if len(indexes) == 1 else None


def _why_tcp(spec: RunSpec, ib: Sequence[Sequence[Port]], roce: Sequence[Sequence[Port]]) -> tuple[Notice, ...]:
    workers = spec.workers
    if len(workers) == 1 or not any(worker.has_gpus for worker in workers):
        return ()
    interfaces = ", ".join(dict.fromkeys(str(worker.facts.interface) for worker in workers))
    over = f"NCCL uses TCP over {interfaces}"
    if not any(worker.facts.infiniband for worker in workers):
        return (Notice(f"no node has InfiniBand: {over}. {SLOW}"),)
    if any(ib):
        kind, without = "InfiniBand", [worker.node.name for worker, ports in zip(workers, ib, strict=True) if not ports]
        fix = "ibstat there says why; for the fix: clusterctl check"
    elif any(_active(worker) for worker in workers):
        kind, without = "RoCE", [worker.node.name for worker, ports in zip(workers, roce, strict=True) if not ports]
        fix = "its interface needs an IPv4 address"
    else:
        kind, without, fix = "InfiniBand", [worker.node.name for worker in workers], "ibstat there says why"
    text = f"no active {kind} port on {', '.join(without)}: {over} on all nodes. {SLOW}; {fix}"
    return (Notice(text, "warning"),)
