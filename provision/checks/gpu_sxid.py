"""gpu.sxid: the NVSwitches have reported no error (SXid) since the node was started.

Format: NVIDIA, "Fabric Manager for NVIDIA NVSwitch Systems", appendix on SXids, and the driver's source.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, not_here, ok, unknown, warn
from provision.checks._gpu import LOG, devices
from provision.checks._host import unread
from provision.model import Finding

ID = "gpu.sxid"
LEVEL = 0
TITLE = "no NVSwitch error (SXid) since the node was started"
PROBE = LOG
ROOT = True
WHY = "After a fatal error of an NVSwitch all its GPUs must be reset: until then NCCL fails or hangs between them."

_SXID = re.compile(r"SXid \(PCI:([0-9a-fA-F:.]+)\): (\d+), (Non-fatal|Fatal)?")
_MANY = 6  # that are named


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """FAIL for a fatal one, WARN for others; UNKNOWN where the kernel's log may not be read."""
    for node, answer in answers.items():
        found = Counter(_SXID.findall(answer.out))
        said = "; ".join(
            f"SXid {number} {word or 'of unknown weight'} {count} x on {switch}"
            for (switch, number, word), count in sorted(found.items(), key=lambda item: item[0][2] != "Fatal")[:_MANY]
        )
        if "looked" not in answer.lines:
            yield unread(ID, node, answer)
        elif any(word == "Fatal" for _, _, word in found):
            fix = "reboot the node, or stop all GPU programs, reset all GPUs and restart nvidia-fabricmanager"
            yield fail(ID, node, said, expected="no SXid", fix=fix)
        elif found:
            fix = "read /var/log/fabricmanager.log, and watch whether they come again"
            yield warn(ID, node, said, expected="no SXid", fix=fix)
        elif not any(device.is_switch for device in devices(answer)):
            yield not_here(ID, node, "no NVSwitch")
        elif "log readable" in answer.lines:
            yield ok(ID, node, "no SXid in the kernel's log")
        else:
            fix = "check with become, or let the user read the journal: usermod -aG systemd-journal USER"
            yield unknown(ID, node, "the kernel's log may not be read", fix=fix)
