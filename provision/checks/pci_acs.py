"""pci.acs: PCI bridges let devices speak to each other directly.

``lspci -vvv`` shows ``ACSCtl: SrcValid+`` on bridges that send peer-to-peer traffic through the root complex (NCCL user
guide, Troubleshooting, PCI Access Control Services). It prints capabilities to root only. Virtual machines need ACS and
use ATS instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, not_here, ok, unknown, warn
from provision.checks._infiniband import sections
from provision.model import Finding

ID = "pci.acs"
LEVEL = 0
ROOT = True
TITLE = "PCI Access Control Services are off"
WHY = "Traffic between GPUs and adapters goes up to the processor and back: GPUDirect is slow, or NCCL hangs."
PROBE = """\
PATH=$PATH:/usr/sbin:/sbin
echo "@devices $(cat /sys/bus/pci/devices/*/class 2>/dev/null | grep -c -e '^0x0207' -e '^0x0302' -e '^0x0300')"
if grep -qw hypervisor /proc/cpuinfo; then echo @virtual; fi
if command -v lspci >/dev/null 2>&1; then
  echo @lspci
  lspci -vvv 2>/dev/null | sed -n -e 's/^\\([0-9a-f:.]* [^:]*\\):.*/\\1/p' -e 's/^[[:space:]]*\\(ACSCtl:.*\\)/\\1/p' |
    awk '/^ACSCtl:/ { print at, $0; next } { at = $1 }'
fi
echo @end
"""
TIMEOUT = 20
_CONTROL = re.compile(r"^(\S+) ACSCtl:.*SrcValid([+-])", re.MULTILINE)


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """Name machines of metal whose bridges redirect traffic between devices."""
    for name, answer in answers.items():
        said = {mark: list(sections(answer.out, mark)) for mark in ("devices", "virtual", "lspci", "end")}
        controls = _CONTROL.findall(answer.out)
        on = [bridge for bridge, sign in controls if sign == "+"]
        if not said["end"] or not said["devices"]:
            yield unknown(ID, name, "what the node printed about its PCI devices is not understood")
        elif said["devices"][0][0] == ("0",):
            yield not_here(ID, name, "no GPU and no InfiniBand adapter")
        elif said["virtual"]:
            yield ok(ID, name, "a virtual machine")
        elif not said["lspci"]:
            yield unknown(ID, name, "lspci is not installed", fix="install pciutils with services: os_packages:")
        elif not answer.root:
            yield unknown(ID, name, "lspci shows it to root only", fix="run as root")
        elif on:
            yield warn(
                ID,
                name,
                f"on at {len(on)} of {len(controls)} bridges, such as {on[0]}",
                expected="SrcValid- on every bridge",
                fix="switch ACS off in the BIOS, or with setpci -s BRIDGE ECAP_ACS+0x6.w=0000 at each start",
            )
        else:
            yield ok(ID, name, f"off at {len(controls)} bridges" if controls else "no bridge has it")
