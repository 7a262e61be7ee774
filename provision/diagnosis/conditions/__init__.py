"""What is wrong with how a run trains, though it runs: from its progress and its samples.

A rule is silent when in doubt. One file a subject, a rule a row; each rule has its thresholds with the reason for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from provision.diagnosis.conditions import gpus, loss, speed
from provision.diagnosis.conditions._rule import Condition, Limit, Rule

if TYPE_CHECKING:
    from provision.diagnosis.evidence import Evidence

__all__ = ["RULES", "Condition", "Limit", "Rule", "conditions"]

RULES: tuple[Rule, ...] = (*loss.RULES, *gpus.RULES, *speed.RULES)


def conditions(evidence: Evidence) -> tuple[Condition, ...]:
    """All rules that hold for a run, in the order of the table."""
    found = ((rule, tuple(rule.look(evidence, rule.limits))) for rule in RULES)
    return tuple(Condition(rule.id, says, rule.fix, rule.leads) for rule, says in found if says)
