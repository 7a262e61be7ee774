"""gpu.aer: the PCIe links of the GPUs count no errors.

Linux counts them in sysfs (Documentation/ABI/testing/sysfs-bus-pci-devices-aer): what was corrected is sent again, the
others lose data. Virtual machines often have no such counters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, not_here, ok, warn
from provision.checks._gpu import PCI, devices
from provision.checks._host import unread
from provision.model import Finding

ID = "gpu.aer"
LEVEL = 0
TITLE = "the PCIe links of the GPUs count no errors"
PROBE = f"""\
{PCI}\
for file in /sys/bus/pci/drivers/nvidia/0*/aer_dev_*; do
    [ -r "$file" ] || continue
    while read -r name count; do
        case $name in TOTAL_ERR_*) echo "aer $file ${{name#TOTAL_ERR_}} $count" ;; esac
    done <"$file"
done
echo looked
"""
LIMITS = {"corrected": 1000}  # since boot
WHY = "A link that sends much twice is slow; one that loses data ends the run with Xid 79 sooner or later."

_COUNT = re.compile(r"^aer \S*/(\S+)/aer_dev_\S+ (COR|FATAL|NONFATAL) (\d+)$", re.MULTILINE)
_FIX = "reseat the GPU and its riser; then look at the server vendor's firmware; dmesg | grep AER tells the port"


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """FAIL for fatal ones, WARN for other uncorrected ones and for many corrected ones."""
    for node, answer in answers.items():
        counts = [(address, kind, int(count)) for address, kind, count in _COUNT.findall(answer.out)]
        if "looked" not in answer.lines:
            yield unread(ID, node, answer)
            continue
        if not counts:
            gpus = any(device.is_gpu for device in devices(answer))
            yield ok(ID, node, "PCIe errors are not counted here") if gpus else not_here(ID, node, "no GPU")
            continue
        allowed = {"COR": seen.limits["corrected"], "FATAL": 0, "NONFATAL": 0}
        bad = [each for each in counts if each[2] > allowed[each[1]]]
        words = {"COR": "corrected", "FATAL": "fatal", "NONFATAL": "uncorrected"}
        said = "; ".join(f"{address}: {count} {words[kind]} errors" for address, kind, count in bad)
        if not bad:
            yield ok(ID, node, f"at most {max(count for *_, count in counts)} corrected errors")
        elif any(kind == "FATAL" for _, kind, _ in bad):
            yield fail(ID, node, said, expected="none", fix=_FIX)
        else:
            yield warn(ID, node, said, expected=f"at most {allowed['COR']:.0f} corrected ones since boot", fix=_FIX)
