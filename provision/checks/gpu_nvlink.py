"""gpu.nvlink: every GPU has as many active NVLinks as the others.

Some links are inactive by design (an H100 for PCIe has six of them), so what is expected is the number that most GPUs
of the cluster have, unless the limit names one. Format of ``nvidia-smi nvlink -s``: seen with driver 580.159.04.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok, unknown
from provision.checks._links import links
from provision.checks._nvidia import SMI, each, trouble
from provision.model import Finding

ID = "gpu.nvlink"
LEVEL = 0
TITLE = "all NVLinks of every GPU are active"
TOOL = SMI
TIMEOUT = 20.0
PROBE = "nvidia-smi nvlink -s"
LIMITS = {"active_links": 0}  # 0: as many as most GPUs of the cluster have
WHY = "A missing link slows every exchange between GPUs; without any, NCCL goes through PCIe, several times slower."

_FIX = (
    "systemctl restart nvidia-fabricmanager, then reset the GPU or reboot; if it stays, have board or bridge replaced"
)


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """FAIL for a GPU with fewer active links than expected."""
    found: dict[str, dict[str, list[str]]] = {}
    for node, answer in answers.items():
        listed = links(answer.out)
        if listed:
            found[node] = {gpu: [said for _, said in all_ if said != "<inactive>"] for gpu, all_ in listed.items()}
        elif answer.out.startswith("No devices were found"):
            yield ok(ID, node, "no GPU")
        else:
            yield unknown(ID, node, trouble(answer), fix="the check gpu.driver tells more")
    wanted = int(seen.limits["active_links"]) or _usual(found)
    for node, active in found.items():
        few = {gpu: f"{len(speeds)} of {wanted} links active" for gpu, speeds in active.items() if len(speeds) < wanted}
        if few:
            yield fail(ID, node, each(few), expected=f"{wanted} active links", fix=_FIX)
        else:
            speeds = sorted({speed for each_ in active.values() for speed in each_})
            said = f"{wanted} links, {' and '.join(speeds)} each"
            yield ok(ID, node, said if wanted else "no active NVLink on any node")


def _usual(found: Mapping[str, Mapping[str, list[str]]]) -> int:
    """How many active links most GPUs have; the larger number where two are as frequent."""
    counted = Counter(len(speeds) for gpus in found.values() for speeds in gpus.values())
    return max(counted, key=lambda count: (counted[count], count), default=0)
