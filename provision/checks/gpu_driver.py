"""gpu.driver: nvidia-smi answers, and every node has the same driver.

nvidia-smi's exit codes (its manual page, "RETURN VALUE", and nvml.h): 9 the kernel module is not loaded, 12 the NVML
library is missing, 15 a GPU has fallen off the bus, 17 the system forbids it, 18 library and kernel module differ.
"""

from provision.checks.kit import Answers, Judgements, fail, not_here, odd, unknown
from provision.checks.kit.gpu import GPUS, SMI, rows, trouble

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


def judge(answers: Answers) -> Judgements:
    """FAIL where nvidia-smi fails, and where the version is not the one that most nodes have."""
    versions = {}
    for node, answer in answers.items():
        found = rows(answer)
        if isinstance(found, str):
            broken = bool(answer.rc) and "does not know" not in found
            fix = _CODES.get(answer.rc, f"run nvidia-smi on {node} and look for NVRM in dmesg")
            yield node, (fail if broken else unknown)(trouble(answer), expected="an answer", fix=fix)
        elif found:
            versions[node] = found[0]["driver_version"]
        else:
            yield node, not_here("no GPU")
    yield from odd(versions, noun="driver", fix=f"install the same driver on all nodes; {_KEEP}", verdict="FAIL")
