"""What the kernel knows of GPUs, for the checks that do not ask nvidia-smi: sysfs, /proc and the kernel's log."""

from __future__ import annotations

import re
from dataclasses import dataclass

from provision.checks import Answer

# Every NVIDIA device on the PCI bus, from sysfs and without starting a program: address, class, driver, link width. One
# that has fallen off the bus answers with ones: its link seems to be 63 wide, or cannot be read.
PCI = """\
for device in /sys/bus/pci/devices/*; do
    { read -r vendor <"$device/vendor"; } 2>/dev/null || continue
    [ "$vendor" = 0x10de ] || continue
    read -r class <"$device/class"
    driver=none
    while read -r line; do
        case $line in DRIVER=*) driver=${line#DRIVER=} ;; esac
    done <"$device/uevent"
    width=none
    if [ -e "$device/current_link_width" ]; then
        { read -r width <"$device/current_link_width"; } 2>/dev/null || width=lost
    fi
    echo "pci ${device##*/} $class $driver $width"
done
"""

# The loaded kernel module's version.
VERSION = """\
if [ -r /proc/driver/nvidia/version ]; then
    read -r line </proc/driver/nvidia/version
    echo "$line"
fi
"""

# What the kernel's log says of NVIDIA's devices. dmesg may be root's only, and a user who may not read the journal
# gets an empty one.
LOG = f"""\
log=$(dmesg 2>/dev/null)
[ -n "$log" ] || log=$(journalctl -k -b -q -o short-monotonic --no-pager 2>/dev/null)
[ -z "$log" ] || echo "log readable"
printf '%s\\n' "$log" | grep -E 'NVRM: Xid|SXid|available PCIe bandwidth' | tail -n 200
{PCI}echo looked
"""

_GPU_CLASSES = ("0x0300", "0x0302")  # VGA controller, 3D controller: PCI Code and ID Assignment, base class 03h
_SWITCH_CLASS = "0x0680"  # bridge, other: NVSwitch of A100 and H100 boards


@dataclass(frozen=True)
class Device:
    """An NVIDIA device on the PCI bus, as ``PCI`` prints it."""

    address: str
    kind: str
    driver: str
    width: str

    @property
    def is_gpu(self) -> bool:
        """A graphics processor, not its audio function and no switch."""
        return self.kind.startswith(_GPU_CLASSES)

    @property
    def is_switch(self) -> bool:
        """An NVSwitch, which needs the fabric manager."""
        return self.kind.startswith(_SWITCH_CLASS)

    @property
    def is_lost(self) -> bool:
        """It has fallen off the bus."""
        return self.width in ("63", "lost")


def devices(answer: Answer) -> tuple[Device, ...]:
    """What ``PCI`` found."""
    lines = re.findall(r"^pci (\S+) (0x[0-9a-f]+) (\S+) (\S+)$", answer.out, flags=re.MULTILINE)
    return tuple(Device(*fields) for fields in lines)


def kernel_module(text: str) -> str:
    """The loaded kernel module's version, from ``/proc/driver/nvidia/version``; empty if it is not there."""
    found = re.search(r"NVRM version:.*?\s(\d{3,}\.\d+(?:\.\d+)*)\s", f"{text}\n")
    return found[1] if found else ""
