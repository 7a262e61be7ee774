"""Rules that find problems of a running training in its progress and samples.

A rule reports nothing when in doubt. Each subject is a file, and each rule a row with its thresholds and their reasons.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from provision.diagnosis.conditions import loss, speed
from provision.diagnosis.conditions.rules import Condition, Limit, Rule

if TYPE_CHECKING:
    from provision.diagnosis.evidence import Evidence

__all__ = ["RULES", "Condition", "Limit", "Rule", "conditions"]

RULES: tuple[Rule, ...] = (*loss.RULES, *speed.GPU_RULES, *speed.RULES)


def conditions(evidence: Evidence) -> tuple[Condition, ...]:
    """The problems of a run, in the order of the table."""
    found = ((rule, tuple(rule.look(evidence, rule.limits))) for rule in RULES)
    return tuple(Condition(rule.id, says, rule.fix, rule.leads) for rule, says in found if says)
