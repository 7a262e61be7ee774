"""gpu.fm: the fabric manager runs where there are NVSwitches, in the driver's version.

Only boards whose switches are on this machine's PCI bus need it here (A100 and H100 HGX; not a virtual machine that was
given GPUs only). Source: NVIDIA, "Fabric Manager for NVIDIA NVSwitch Systems": both versions must be equal.
"""

import re

from provision.checks.kit import Answer, Judgement, fail, not_here, ok, unknown, unread
from provision.checks.kit.gpu import PCI, VERSION, devices, kernel_module

TITLE = "the fabric manager runs and has the driver's version"
PROBE = f"""\
{PCI}{VERSION}\
for switch in /dev/nvidia-nvswitch[0-9]*; do
    [ -e "$switch" ] || continue
    for file in /proc/[0-9]*/comm; do
        {{ read -r name <"$file"; }} 2>/dev/null || continue
        case $name in nv-fabricmanage*) echo running && break ;; esac
    done
    nv-fabricmanager --version 2>/dev/null
    echo "unit $(systemctl is-active nvidia-fabricmanager 2>/dev/null)"
    break
done
echo looked
"""
WHY = "Without it CUDA does not start: error 802, 'system not yet initialized', minutes after the job began."


def judge(answer: Answer) -> Judgement:
    """FAIL where it does not run, or in another version."""
    return _judge(answer)


def _judge(answer: Answer) -> Judgement:
    if "looked" not in answer.lines:
        return unread(answer)
    switches = [device for device in devices(answer) if device.is_switch]
    if not switches:
        return not_here("no NVSwitch on the PCI bus")
    driver = kernel_module(answer.out)
    version = re.search(r"Fabric Manager version is\s*:\s*(\S+)", answer.out)
    if version and driver and version[1] != driver:
        observed = f"fabric manager {version[1]}, driver {driver}"
        fix = f"install nvidia-fabricmanager of version {driver}, hold both packages, systemctl restart it"
        return fail(observed, expected=f"fabric manager {driver}", fix=fix)
    if "running" not in answer.lines:
        unit = re.search(r"^unit (\S+)", answer.out, flags=re.MULTILINE)
        state = f" (its unit is {unit[1]})" if unit else ""
        observed = f"{len(switches)} NVSwitches, the fabric manager is not running{state}"
        fix = "systemctl enable --now nvidia-fabricmanager; journalctl -u nvidia-fabricmanager shows why it stopped"
        return fail(observed if version else f"{observed}, and is not installed", expected="it runs", fix=fix)
    if not version or not driver:
        return unknown("the fabric manager runs; its version or the driver's is not known")
    return ok(f"fabric manager {version[1]} for {len(switches)} NVSwitches")
