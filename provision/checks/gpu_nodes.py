"""gpu.nodes: the training user may open the GPUs' device files.

``/dev/nvidia0`` and so on, ``/dev/nvidiactl`` and ``/dev/nvidia-uvm``, which CUDA needs; who may open them is set by
the module's options (NVreg_DeviceFileMode) or by udev. nvidia-modprobe, which is setuid, makes a missing one.
"""

import re

from provision.checks.kit import Answer, Judgement, fail, not_here, ok, unread, warn
from provision.checks.kit.gpu import PCI, devices

TITLE = "the training user may open the GPUs' device files"
PROBE = f"""\
{PCI}\
for file in /dev/nvidia[0-9]* /dev/nvidiactl /dev/nvidia-uvm; do
    if [ ! -e "$file" ]; then echo "missing $file"
    elif [ -r "$file" ] && [ -w "$file" ]; then echo "open $file"
    else echo "closed $file: $(stat -c '%A %U:%G' "$file")"; fi
done
if command -v nvidia-modprobe >/dev/null 2>&1; then echo modprobe; fi
echo "user $(id -un 2>/dev/null || id -u)"
echo looked
"""
WHY = "CUDA finds no GPU, and training runs on the CPU or ends with 'no CUDA-capable device is detected'."


def judge(answer: Answer) -> Judgement:
    """FAIL for a file that is closed or missing, WARN for one that nvidia-modprobe will make."""
    return _judge(answer)


def _judge(answer: Answer) -> Judgement:
    if "looked" not in answer.lines:
        return unread(answer)
    opened, closed, missing = (
        re.findall(rf"^{word} (.*)$", answer.out, flags=re.MULTILINE) for word in ("open", "closed", "missing")
    )
    gpus = [device for device in devices(answer) if device.is_gpu]
    if not gpus and not any(re.match(r"/dev/nvidia\d", file) for file in (*opened, *closed)):
        return not_here("no GPU")
    user = next((line[5:] for line in answer.lines if line.startswith("user ")), "the user")
    if closed:
        fix = f"chmod 0666 {' '.join(each.split(':')[0] for each in closed)}, or give {user} the group (video, render)"
        return fail(f"{user} may not open {'; '.join(closed)}", expected="open to every user", fix=fix)
    if missing:
        made = "modprobe" in answer.lines
        fix = "nvidia-modprobe -u -c 0 (as root), and nvidia-persistenced at every boot; modprobe nvidia_uvm"
        observed = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        return (warn if made else fail)(observed, expected="all device files", fix=fix)
    return ok(f"{user} may open {len(opened)} device files")
