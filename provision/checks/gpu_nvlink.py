"""gpu.nvlink: every GPU has as many active NVLinks as the others.

Some links are inactive by design (an H100 for PCIe has six of them), so what is expected is the number that most GPUs
of a model have in the cluster, unless the limit names one. Format of ``nvidia-smi nvlink -s``: seen with driver
580.159.04.
"""

from collections import Counter
from collections.abc import Iterable

from provision.checks.kit import Answers, Judgements, Plan, fail, ok
from provision.checks.kit.gpu import SMI, LinkedGpu, each, links, unanswered

TITLE = "all NVLinks of every GPU are active"
TOOL = SMI
TIMEOUT = 20.0
PROBE = "nvidia-smi nvlink -s"
LIMITS = {"active_links": 0}  # 0: as many as most GPUs of the model have
WHY = "A missing link slows every exchange between GPUs; without any, NCCL goes through PCIe, several times slower."

_FIX = (
    "systemctl restart nvidia-fabricmanager, then reset the GPU or reboot; if it stays, have board or bridge replaced"
)


def judge(plan: Plan, answers: Answers) -> Judgements:
    """FAIL for a GPU with fewer active links than expected."""
    found = {node: listed for node, answer in answers.items() if (listed := links(answer.out))}
    usual = _usual(gpu for listed in found.values() for gpu in listed)
    for node, answer in answers.items():
        if node not in found:
            yield node, unanswered(node, answer)
            continue
        wanted = {gpu.index: int(plan.limits["active_links"]) or usual[gpu.model] for gpu in found[node]}
        active = {gpu.index: _active(gpu) for gpu in found[node]}
        few = {
            index: f"{len(speeds)} of {wanted[index]} links active"
            for index, speeds in active.items()
            if len(speeds) < wanted[index]
        }
        if few:
            yield node, fail(each(few), expected="all links active", fix=_FIX)
        else:
            texts = {index: f"{len(all_)} links, {all_[0]} each" for index, all_ in active.items() if all_}
            yield node, ok(each(texts) or "no active NVLink, like most GPUs of the model")


def _active(gpu: LinkedGpu) -> list[str]:
    """The speeds of the links that are active."""
    return [speed for _, speed in gpu.links if speed != "<inactive>"]


def _usual(gpus: Iterable[LinkedGpu]) -> dict[str, int]:
    """How many active links most GPUs of a model have; the larger number where two are as frequent."""
    counts: dict[str, Counter[int]] = {}
    for gpu in gpus:
        counts.setdefault(gpu.model, Counter())[len(_active(gpu))] += 1
    return {model: max(found, key=lambda count: (found[count], count)) for model, found in counts.items()}
