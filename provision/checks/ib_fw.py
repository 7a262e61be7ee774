"""ib.fw: InfiniBand adapters of one model have one firmware.

``fw_ver`` and ``board_id`` in sysfs; adapters of one ``board_id`` take the same firmware.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan
from provision.checks._infiniband import PORTS, Fault, fabric, told
from provision.checks._judging import groups, majority
from provision.model import Finding

ID = "ib.fw"
LEVEL = 0
TITLE = "one firmware on InfiniBand adapters of one model"
WHY = "Adapters with different firmware negotiate differently: one node is slower, or its link comes and goes."
PROBE = PORTS

_FIX = "mlxfwmanager (or ofed_info and flint) updates {device}; then restart the node"


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """Name the adapters whose firmware differs from most of their model."""
    cluster, others = fabric(ID, answers)
    yield from others
    every: dict[str, dict[tuple[str, str], str]] = {}
    for name, ports in cluster.items():
        for port in ports:
            every.setdefault(port.values.get("board_id", ""), {})[name, port.device] = port.values.get("fw_ver", "")
    for name, ports in cluster.items():
        faults = []
        for port in ports:
            alike = every[port.values.get("board_id", "")]
            version = alike[name, port.device]
            common = majority({f"{node} {device}": each for (node, device), each in alike.items()})
            fix = _FIX.format(device=port.device)
            if not version:
                faults.append(Fault("UNKNOWN", f"{port.device} does not tell its firmware", "fw_ver", "ibv_devinfo"))
                continue
            if common is None:
                said = ", ".join(f"{each} on {len(at)}" for each, at in groups(_texts(alike)).items())
                faults.append(Fault("WARN", f"{port.device} has {version}; its model has {said}", "one version", fix))
            elif version != common:
                said = f"{port.device} has {version}, most of its model have {common}"
                faults.append(Fault("WARN", said, common, fix))
        yield told(ID, name, faults, ", ".join(sorted({port.values.get("fw_ver", "") for port in ports})))


def _texts(alike: Mapping[tuple[str, str], str]) -> dict[str, str]:
    return {f"{node} {device}": version for (node, device), version in alike.items()}
