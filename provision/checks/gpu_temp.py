"""gpu.temp: the GPUs and their memory are not hot.

From 85 degrees on most models begin to slow down, near 95 they stop: ``nvidia-smi -q -d TEMPERATURE`` shows a model's
own limits.
"""

from provision.checks.kit import Answers, Judgement, Judgements, Plan, ok
from provision.checks.kit.gpu import GPUS, SMI, each, gpus
from provision.model import Verdict

TITLE = "no GPU is hot"
TOOL = SMI
TIMEOUT = 20.0
PROBE = GPUS
LIMITS = {"warn_celsius": 85, "fail_celsius": 95}
WHY = "A hot GPU slows down, and all ranks with it, or is shut off in the middle of the run."


def judge(seen: Plan, answers: Answers) -> Judgements:
    """WARN and FAIL from the limits on; the hotter of chip and memory counts."""
    warm, hot = seen.limits["warn_celsius"], seen.limits["fail_celsius"]
    found = yield from gpus(answers, "temperature.gpu", "temperature.memory")
    for node, row in found.items():
        known = {
            gpu.index: max(values)
            for gpu in row
            if (values := [v for f in ("gpu", "memory") if (v := gpu.number(f"temperature.{f}")) is not None])
        }
        bad = {index: f"{degrees:.0f} °C" for index, degrees in known.items() if degrees >= warm}
        if bad:
            fix = "check fans, air flow and the neighbours in the rack; stop the load"
            verdict: Verdict = "FAIL" if max(known.values()) >= hot else "WARN"
            yield node, Judgement(verdict, each(bad), expected=f"below {warm:.0f} °C", fix=fix)
        else:
            yield node, ok(f"at most {max(known.values()):.0f} °C" if known else "these GPUs report no temperature")
