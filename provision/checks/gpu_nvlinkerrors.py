"""gpu.nvlinkerrors: the NVLinks count no errors.

Counters since the driver was loaded; symbol errors, which the link corrects, do not count. Format of
``nvidia-smi nvlink -e``: seen with driver 580.159.04. Up to four are tolerated: they happen while links are trained.
"""

import re

from provision.checks.kit import Answer, Judgement, Plan, not_here, ok, warn
from provision.checks.kit.gpu import SMI, each, links, unanswered

TITLE = "the NVLinks count no errors"
TOOL = SMI
TIMEOUT = 20.0
PROBE = "nvidia-smi nvlink -e"
LIMITS = {"errors": 5}  # of one kind on one link
WHY = "A link that repeats what it sends is slow, and one that fails ends the run with an NCCL error."

_COUNT = re.compile(r"(?!.*Symbol)(.*Errors): (\d+)")


def judge(plan: Plan, node: str, answer: Answer) -> Judgement:
    """WARN from the limit on."""
    most = plan.limits["errors"]
    listed = links(answer.out)
    counts = {
        gpu.index: [(link, kind[1], int(kind[2])) for link, text in gpu.links if (kind := _COUNT.match(text))]
        for gpu in listed
    }
    bad = {
        index: ", ".join(f"link {link} {count} {kind}" for link, kind, count in all_ if count >= most)
        for index, all_ in counts.items()
    }
    bad = {index: text for index, text in bad.items() if text}
    if bad:
        fix = "watch whether they grow; reset the GPU or reboot, and have board or bridge replaced if they return"
        return warn(each(bad), expected=f"less than {most:.0f} of a kind on every link", fix=fix)
    if any(counts.values()):
        worst = max(count for all_ in counts.values() for *_, count in all_)
        return ok(f"at most {worst} errors on a link" if worst else "no errors")
    if listed:
        return not_here("no active NVLink")
    return unanswered(node, answer)
