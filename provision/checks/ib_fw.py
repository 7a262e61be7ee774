"""ib.fw: InfiniBand adapters of one model have one firmware.

``fw_ver`` and ``board_id`` in sysfs; adapters of one ``board_id`` take the same firmware.
"""

from collections.abc import Mapping

from provision.checks.kit import Answers, Judgements, groups, majority
from provision.checks.kit.infiniband import PORTS, Fault, fabric, worst

TITLE = "one firmware on InfiniBand adapters of one model"
WHY = "Adapters with different firmware negotiate differently: one node is slower, or its link comes and goes."
PROBE = PORTS

_FIX = "mlxfwmanager (or ofed_info and flint) updates {device}; then restart the node"


def judge(answers: Answers) -> Judgements:
    """Name the adapters whose firmware differs from most of their model."""
    cluster, others = fabric(answers)
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
                observed = ", ".join(f"{each} on {len(at)}" for each, at in groups(_texts(alike)).items())
                faults.append(
                    Fault("WARN", f"{port.device} has {version}; its model has {observed}", "one version", fix)
                )
            elif version != common:
                observed = f"{port.device} has {version}, most of its model have {common}"
                faults.append(Fault("WARN", observed, common, fix))
        yield name, worst(faults, ", ".join(sorted({port.values.get("fw_ver", "") for port in ports})))


def _texts(alike: Mapping[tuple[str, str], str]) -> dict[str, str]:
    return {f"{node} {device}": version for (node, device), version in alike.items()}
