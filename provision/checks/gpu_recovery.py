"""gpu.recovery: no GPU waits for a reset or a reboot.

``gpu_recovery_action`` is what the driver asks for: None, Reset, Reboot, Drain P2P, Drain and Reset (nvidia-smi's
manual page); drivers before 565 do not have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok
from provision.checks._nvidia import SMI, each, gpus, query
from provision.model import Finding

ID = "gpu.recovery"
LEVEL = 0
TITLE = "no GPU waits for a reset"
TOOL = SMI
TIMEOUT = 20.0
_FIELDS = ("index", "gpu_recovery_action")
PROBE = query(*_FIELDS)
WHY = "The driver has met an error that only a reset ends: programs fail on this GPU, at once or soon."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """FAIL for every action but None."""
    found = yield from gpus(ID, answers, _FIELDS[1], fields=_FIELDS)
    for node, row in found.items():
        asked = {gpu.index: gpu[_FIELDS[1]] for gpu in row if gpu.has(_FIELDS[1]) and gpu[_FIELDS[1]] != "None"}
        if asked:
            fix = "end what runs on it, then nvidia-smi --gpu-reset -i N, or reboot; dmesg | grep Xid tells why"
            yield fail(ID, node, each(asked), expected="None", fix=fix)
        else:
            yield ok(ID, node, "None")
