"""gpu.xid: the driver has reported no error (Xid) since the node was started.

Source of the numbers: NVIDIA, "Xid Errors" and its catalogue (docs.nvidia.com/deploy/xid-errors). What hardware does
fails; what a program does wrong, and any other number, is a warning.
"""

import re
from collections import Counter
from collections.abc import Mapping

from provision.checks.kit import Answer, Judgement, fail, not_here, ok, unknown, unread, warn
from provision.checks.kit.gpu import LOG, devices

TITLE = "no Xid error since the node was started"
PROBE = LOG
ROOT = True
WHY = "Xids are how a GPU says that memory, bus or link failed: most runs that die on one node have one in its log."

_RESET = "reset the GPU (nvidia-smi --gpu-reset -i N) or reboot"
_REPLACE = "reboot; if it returns, have the GPU replaced"
_FAILS = {
    46: ("GPU stopped processing", _RESET),
    48: ("double bit ECC error", _RESET),
    62: ("internal microcontroller halted", _RESET),
    63: ("a row of memory was retired", f"{_RESET}, which replaces the row"),
    64: ("a row of memory could not be retired", _REPLACE),
    74: ("NVLink error", f"{_RESET}; see gpu.nvlink and gpu.nvlinkerrors"),
    79: ("GPU has fallen off the bus", "power cycle the node; if it returns, reseat or replace the GPU"),
    92: ("many single bit ECC errors", _REPLACE),
    94: ("contained memory error", f"start the program again; then {_RESET}"),
    95: ("uncontained memory error", _RESET),
    109: ("context switch timeout", _RESET),
    119: ("GSP does not answer", "reboot; then update the driver"),
    120: ("GSP error", "reboot; then update the driver"),
    136: ("NVLink training failed", _RESET),
    140: ("unrecovered ECC error", _RESET),
    143: ("GPU was not initialised", _RESET),
    158: ("GPU fatal timeout", _RESET),
}
_PROGRAM = {
    13: "graphics engine exception",
    31: "memory page fault",
    43: "GPU stopped processing",
    45: "preemptive cleanup after an error",
    154: "GPU recovery action changed",
}
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)[^)]*\): (\d+)")


def judge(answer: Answer) -> Judgement:
    """FAIL for what hardware does, WARN for the rest; UNKNOWN where the kernel's log may not be read."""
    return _judge(answer)


def _judge(answer: Answer) -> Judgement:
    if "looked" not in answer.lines:
        return unread(answer)
    found = Counter((gpu, int(number)) for gpu, number in _XID.findall(answer.out))
    if not found and not any(device.is_gpu for device in devices(answer)):
        return not_here("no GPU")
    if "log readable" not in answer.lines:
        fix = "check with become, or let the user read the journal: usermod -aG systemd-journal USER"
        return unknown("the kernel's log may not be read", fix=fix)
    if not found:
        return ok("no Xid in the kernel's log")
    numbers = sorted({number for _, number in found}, key=lambda number: (number not in _FAILS, number))
    texts = [
        _describe(number, {gpu: count for (gpu, one), count in found.items() if one == number}) for number in numbers
    ]
    if numbers[0] in _FAILS:
        return fail("; ".join(texts), expected="no Xid", fix=_FAILS[numbers[0]][1])
    fix = "look at the program that ran then; if other programs meet it as well, reset the GPU and watch it"
    return warn("; ".join(texts), expected="no Xid", fix=fix)


def _describe(number: int, where: Mapping[str, int]) -> str:
    meaning = _FAILS[number][0] if number in _FAILS else _PROGRAM.get(number, "")
    times = sum(where.values())
    gpus = ", ".join(sorted(where))
    return f"Xid {number}{f' ({meaning})' if meaning else ''} {f'{times} times ' if times > 1 else ''}on {gpus}"
