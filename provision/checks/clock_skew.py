"""clock.skew: Whether the nodes' clocks agree.

Measured over the connections, without chrony: see ``tasks/measures/clock.py``. What is certain is the difference less
both error bars.
"""

from collections.abc import Mapping
from statistics import median

from provision.checks.kit import Answers, Judgements, Plan, fail, ok, unknown, warn
from provision.checks.kit.measures import Offset, offset, show_offset, span

LEVEL = 1
MEASURE = "clock"
TITLE = "the nodes' clocks agree"
WHY = (
    "Logs of several nodes cannot be put in order, NFS and make take new files for old ones, and over seconds "
    "certificates and timeouts go wrong."
)
LIMITS = {"skew_ms": 50, "skew_max_ms": 1000}


def judge(plan: Plan, answers: Answers) -> Judgements:
    """WARN over ``skew_ms``, FAIL over ``skew_max_ms``; from rank 0 with two nodes, else from the middle of all."""
    found = {name: one for name, answer in answers.items() if (one := offset(answer))}
    for name, answer in answers.items():
        if name not in found:
            observed = f"its clock cannot be read: {answer.err or answer.out.strip() or 'no answer'}"
            yield name, unknown(observed[:200], fix=f"date on {name}")
            continue
        reference, called = _reference(found)
        ahead = found[name].minus(reference)
        certain = max(0.0, abs(ahead.seconds) - ahead.error) * 1e3
        observed = f"{show_offset(ahead)} against {called}"
        fix = "services: chrony: {} in the inventory, or by hand before a training: chronyc makestep"
        if certain > plan.limits["skew_max_ms"]:
            yield name, fail(observed, expected=f"below {span(plan.limits['skew_max_ms'] / 1e3)}", fix=fix)
        elif certain > plan.limits["skew_ms"]:
            yield name, warn(observed, expected=f"below {span(plan.limits['skew_ms'] / 1e3)}", fix=fix)
        elif ahead.error * 1e3 > plan.limits["skew_max_ms"]:
            yield name, unknown(f"{observed}: cannot be measured more precisely", fix=f"install coreutils on {name}")
        else:
            yield name, ok(observed)


def _reference(found: Mapping[str, Offset]) -> tuple[Offset, str]:
    """What clocks are compared with: of two nodes, either may be wrong, with more the middle one is right."""
    if len(found) < 3:
        first = next(iter(found))
        return found[first], first
    middle = median(sorted(each.seconds for each in found.values()))
    nearest = min(found.values(), key=lambda each: abs(each.seconds - middle))
    return Offset(nearest.seconds, nearest.error), "the middle of all nodes"
