"""gpu.fabric: every GPU has joined the NVLink fabric.

States and statuses: nvidia-smi's manual page, "Fabric"; seen on H200 behind NVSwitch with driver 580.159.04. Drivers
before 530 do not have the fields, GPUs without NVSwitch say N/A.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, not_here, ok
from provision.checks._nvidia import SMI, Gpu, each, gpus, query
from provision.model import Finding

ID = "gpu.fabric"
LEVEL = 0
TITLE = "every GPU behind NVSwitch has joined the fabric"
TOOL = SMI
TIMEOUT = 20.0
_FIELDS = ("index", "fabric.state", "fabric.status")
PROBE = query(*_FIELDS)
WHY = "Until the fabric manager has set up NVLink, CUDA does not start: error 802, 'system not yet initialized'."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """FAIL for a GPU that has not joined, or not with success."""
    found = yield from gpus(ID, answers, *_FIELDS[1:], fields=_FIELDS)
    for node, row in found.items():
        bad = {gpu.index: said for gpu in row if (said := _missing(gpu))}
        if bad:
            fix = "systemctl restart nvidia-fabricmanager, and read /var/log/fabricmanager.log; see the check gpu.fm"
            yield fail(ID, node, each(bad), expected="Completed, Success", fix=fix)
        elif any(gpu.has("fabric.state") for gpu in row):
            yield ok(ID, node, "Completed, Success")
        else:
            yield not_here(ID, node, "no NVLink fabric")


def _missing(gpu: Gpu) -> str:
    state, status = gpu["fabric.state"], gpu["fabric.status"]
    if not gpu.has("fabric.state") or (state, status) == ("Completed", "Success"):
        return ""
    return f"{state}, {status}" if gpu.has("fabric.status") else state
