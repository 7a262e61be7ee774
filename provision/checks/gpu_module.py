"""gpu.module: the loaded kernel module, the driver's libraries and the installed module are of one version.

The library's version is the end of its file's name (libnvidia-ml.so.580.159.04). Formats seen with driver 580.159.04.
"""

import re

from provision.checks.kit import Answer, Judgement, fail, not_here, ok, unknown, unread, warn
from provision.checks.kit.gpu import PCI, VERSION, devices, kernel_module

TITLE = "kernel module and libraries of the driver have one version"
PROBE = f"""\
{PCI}{VERSION}\
list=$(ldconfig -p 2>/dev/null | sed -n 's/.*libnvidia-ml\\.so\\.1 .*=> //p')
for path in $list /usr/local/nvidia/lib*/libnvidia-ml.so.1 /run/opengl-driver/lib/libnvidia-ml.so.1; do
    [ ! -e "$path" ] || echo "library $(readlink -f "$path")"
done
echo "installed $(modinfo -F version nvidia 2>/dev/null)"
echo looked
"""
WHY = "After an update without a reboot CUDA does not start: 'Driver/library version mismatch'."

_FIX = "reboot the node (or unload and load the nvidia modules); apt-mark hold 'nvidia-*' 'libnvidia-*' keeps it so"
_VERSION = r"(\d+\.\d+(?:\.\d+)*)\s*$"


def judge(answer: Answer) -> Judgement:
    """FAIL if the loaded module differs from the libraries, WARN if the next boot would load another one."""
    return _judge(answer)


def _judge(answer: Answer) -> Judgement:
    if "looked" not in answer.lines:
        return unread(answer)
    loaded = kernel_module(answer.out)
    if not loaded:
        if not any(device.is_gpu for device in devices(answer)):
            return not_here("no GPU")
        return fail("the kernel module is not loaded", expected="a loaded module", fix="modprobe nvidia")
    libraries = sorted(set(re.findall(rf"^library .*libnvidia-ml\.so\.{_VERSION}", answer.out, flags=re.MULTILINE)))
    if not libraries:
        return unknown(f"kernel module {loaded}; libnvidia-ml.so.1 was not found", fix="ldconfig")
    if loaded not in libraries:
        observed = f"kernel module {loaded}, libraries {', '.join(libraries)}"
        return fail(observed, expected=f"libraries {loaded}", fix=_FIX)
    if len(libraries) > 1:
        fix = "remove the libraries of the other version, then run ldconfig"
        return warn(f"libraries {' and '.join(libraries)} are installed", expected=f"only {loaded}", fix=fix)
    installed = re.search(rf"^installed {_VERSION}", answer.out, flags=re.MULTILINE)
    if installed and installed[1] != loaded:
        observed = f"kernel module {loaded} is loaded, {installed[1]} is installed and comes with the next boot"
        return warn(observed, expected=f"libraries and module {loaded}", fix=_FIX)
    return ok(f"module and libraries {loaded}")
