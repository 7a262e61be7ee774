"""gpu.count: as many GPUs as the other nodes have and the inventory asks for."""

from provision.checks.kit import Answers, Judgements, Plan, fail, not_here, odd
from provision.checks.kit.gpu import GPUS, SMI, rows, unanswered

TITLE = "every node shows the same number of GPUs"
TOOL = SMI
TIMEOUT = 20.0
PROBE = GPUS
WHY = "A rank without a GPU fails at once, and a node that starts fewer ranks than the others makes them all wait."

_FIX = "look for Xid 79 in dmesg; power cycle the node, then reseat or replace the GPU"
ABSENT = "FAIL"
ABSENT_FIX = f"install the driver; where it is there, {_FIX}"


def judge(seen: Plan, answers: Answers) -> Judgements:
    """FAIL where there are fewer than the inventory's ``gpus``, and where the number is not that of most nodes."""
    wanted = {node.name: node.gpus for node in seen.nodes}
    counts = {}
    for node, answer in answers.items():
        found = rows(answer)
        asked = wanted.get(node) or 0
        if isinstance(found, str):
            yield node, unanswered(node, answer)
        elif len(found) < asked:
            observed = f"{len(found)} GPUs, the inventory starts {asked} processes"
            yield node, fail(observed, expected=f"{asked} GPUs", fix=f"correct gpus: in the inventory, or {_FIX}")
        else:
            counts[node] = len(found)
    if not any(counts.values()):
        yield from ((node, not_here("no GPU")) for node in counts)
        return
    yield from odd(counts, show=lambda count: f"{count} GPUs" if count != 1 else "1 GPU", fix=_FIX, verdict="FAIL")
