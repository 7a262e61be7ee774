"""gpu.driver: nvidia-smi answers, and every node has the same driver.

nvidia-smi's exit codes (its manual page, "RETURN VALUE", and nvml.h): 9 the kernel module is not loaded, 12 the NVML
library is missing, 15 a GPU has fallen off the bus, 17 the system forbids it, 18 library and kernel module differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, not_here, unknown
from provision.checks._judging import odd
from provision.checks._nvidia import GPUS, SMI, rows, trouble
from provision.model import Finding

ID = "gpu.driver"
LEVEL = 0
TITLE = "nvidia-smi answers, and all nodes have one driver"
TOOL = SMI
TIMEOUT = 20.0
PROBE = GPUS
WHY = "Without a driver that answers no rank starts there; drivers that differ fail as if the program were wrong."
HUNG = "FAIL"
HUNG_FIX = "a GPU or its driver hangs: look for Xid in dmesg, then reboot the node"

_KEEP = "keep one version: apt-mark hold 'nvidia-*' 'libnvidia-*', and no unattended upgrades"
_CODES = {
    9: "load the module: modprobe nvidia; after a kernel update rebuild it: dkms autoinstall",
    12: "install the driver's libraries of the module's version (libnvidia-compute-*)",
    17: "the user may not use the GPUs: see the check gpu.nodes, or the container's devices",
    15: "a GPU has fallen off the bus: power cycle the node, then reseat the GPU",
    18: f"reboot the node, or reload the module, so that module and libraries agree; {_KEEP}",
}


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """FAIL where nvidia-smi fails, and where the version is not the one that most nodes have."""
    versions = {}
    for node, answer in answers.items():
        found = rows(answer)
        if isinstance(found, str):
            broken = bool(answer.rc) and "does not know" not in found
            fix = _CODES.get(answer.rc, f"run nvidia-smi on {node} and look for NVRM in dmesg")
            yield (fail if broken else unknown)(ID, node, trouble(answer), expected="an answer", fix=fix)
        elif found:
            versions[node] = found[0]["driver_version"]
        else:
            yield not_here(ID, node, "no GPU")
    yield from odd(ID, versions, what="driver", fix=f"install the same driver on all nodes; {_KEEP}", verdict="FAIL")
