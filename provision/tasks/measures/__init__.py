"""Measures, which need several nodes at once. A check's ``MEASURE`` names a file; ``talk.py`` is the gate's.

A measure has ``measure(plan: Plan, session: Session) -> dict[str, Answer]``, which returns an answer for every node.
The checks define the format of the lines. The answer of an unreachable node has the reason in ``err``.
"""
