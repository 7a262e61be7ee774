"""gpu.power: no GPU is limited to less power than it was made for."""

from provision.checks.kit import Answers, Judgements, Plan, warn
from provision.checks.kit.gpu import GPUS, SMI, Gpu, alike, each, gpus

TITLE = "the power limit of every GPU is its default"
TOOL = SMI
TIMEOUT = 20.0
PROBE = GPUS
LIMITS = {"below_percent": 2}
WHY = "A GPU with less power has lower clocks: the whole run goes at its pace."


def judge(seen: Plan, answers: Answers) -> Judgements:
    """WARN where the limit is lower than the default, or not that of the other nodes."""
    found = yield from gpus(answers, "power.limit", "power.default_limit")
    nodes = {}
    for node, row in found.items():
        low = {gpu.index: observed for gpu in row if (observed := _low(gpu, seen.limits["below_percent"]))}
        if low:
            fix = "nvidia-smi -i N -pl WATTS (as root); find out first who set it, and whether the rack can bear more"
            yield node, warn(each(low), expected="the default limit", fix=fix)
        else:
            nodes[node] = {gpu.index: _limit(gpu) for gpu in row}
    fix = "nvidia-smi -i N -pl WATTS (as root) sets the same limit on all nodes"
    yield from alike(nodes, noun="", fix=fix, verdict="WARN")


def _low(gpu: Gpu, percent: float) -> str:
    limit, default = gpu.number("power.limit"), gpu.number("power.default_limit")
    if limit is None or default is None or limit >= default * (1 - percent / 100):
        return ""
    return f"{limit:.0f} W of {default:.0f} W"


def _limit(gpu: Gpu) -> str:
    limit = gpu.number("power.limit")
    return "no power limit" if limit is None else f"{limit:.0f} W"
