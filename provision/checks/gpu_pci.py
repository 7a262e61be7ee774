"""gpu.pci: the driver has taken every GPU that is on the PCI bus, and none has fallen off it.

From sysfs and ``/proc/driver/nvidia/gpus``, without nvidia-smi, which leaves out what the driver could not start.
"""

import re

from provision.checks.kit import Answers, Judgements, fail, not_here, odd, unread
from provision.checks.kit.gpu import PCI, devices

TITLE = "every GPU on the PCI bus belongs to NVIDIA's driver"
PROBE = f"""\
{PCI}\
for gpu in /proc/driver/nvidia/gpus/*; do [ ! -d "$gpu" ] || echo "driven ${{gpu##*/}}"; done
echo looked
"""
WHY = "A GPU that is lost or taken by another driver is missing from the run: its rank fails, and the job with it."


def judge(answers: Answers) -> Judgements:
    """FAIL for a GPU that is lost or not driven, and for a number that is not that of most nodes."""
    counts = {}
    for node, answer in answers.items():
        found = [device for device in devices(answer) if device.is_gpu]
        lost_gpus = [device.address for device in found if device.is_lost]
        driven = set(re.findall(r"^driven (\S+)", answer.out, flags=re.MULTILINE))
        foreign = [device for device in found if device.driver != "nvidia" or device.address not in driven]
        if "looked" not in answer.lines:
            yield node, unread(answer)
        elif lost_gpus:
            observed = f"{', '.join(lost_gpus)} does not answer on the PCI bus"
            fix = "power cycle the node (a reboot may not do); then reseat or replace the GPU"
            yield node, fail(observed, expected=f"{len(found)} GPUs that answer", fix=fix)
        elif foreign:
            observed = "; ".join(f"{device.address} {_driver_text(device.driver)}" for device in foreign)
            fix = "modprobe nvidia (nouveau: blacklist it and reboot); dmesg | grep NVRM says why a GPU was not started"
            yield node, fail(observed, expected=f"{len(found)} GPUs with the driver nvidia", fix=fix)
        else:
            counts[node] = len(found)
    if not any(counts.values()):
        yield from ((node, not_here(_gpus(0))) for node in counts)
        return
    fix = "look for the missing GPU with lspci -d 10de:; power cycle the node, then reseat the GPU"
    yield from odd(counts, show=_gpus, fix=fix, verdict="FAIL")


def _driver_text(driver: str) -> str:
    if driver == "nvidia":
        return "was not started by the driver"
    return "has no driver" if driver == "none" else f"belongs to {driver}"


def _gpus(count: int) -> str:
    return f"{count or 'no'} GPU{'' if count == 1 else 's'} on the PCI bus"
