"""gpu.pcielog: the kernel found no slot between a GPU and the processor that is slower than the GPU.

At boot Linux says "..., limited by 8.0 GT/s PCIe x8 link at ..." (drivers/pci/pci.c, __pcie_print_link_status).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, not_here, ok, unknown, warn
from provision.checks._gpu import LOG, devices
from provision.checks._host import unread
from provision.model import Finding

ID = "gpu.pcielog"
LEVEL = 0
TITLE = "no slot limits a GPU's PCIe bandwidth"
PROBE = LOG
ROOT = True
WHY = "Data, checkpoints and network traffic of that GPU go at the slot's speed, and all ranks wait for it."

_LIMITED = re.compile(r"pci\S* ([0-9a-f]{4}:\S+): ([\d.]+) Gb/s available PCIe bandwidth, limited by (.*?) at (\S+) \(")


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """WARN for every GPU that is limited; UNKNOWN where the kernel's log may not be read."""
    for node, answer in answers.items():
        mine = {device.address for device in devices(answer) if device.is_gpu}
        found = {row[0]: f"limited by {row[2]} at {row[3]}" for row in _LIMITED.findall(answer.out) if row[0] in mine}
        if "looked" not in answer.lines:
            yield unread(ID, node, answer)
        elif found:
            said = "; ".join(f"{address} is {text}" for address, text in found.items())
            fix = "reseat GPU and riser; look at the slot's lanes and speed in the BIOS (lspci -vv, LnkCap and LnkSta)"
            yield warn(ID, node, said, expected="the GPU's own speed", fix=fix)
        elif "log readable" in answer.lines or not mine:
            yield ok(ID, node, "no GPU is limited") if mine else not_here(ID, node, "no GPU")
        else:
            fix = "check with become, or let the user read the journal: usermod -aG systemd-journal USER"
            yield unknown(ID, node, "the kernel's log may not be read", fix=fix)
