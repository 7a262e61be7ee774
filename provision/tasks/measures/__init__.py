"""Measures, which need several nodes at once. Each is a file with the name that a check's ``MEASURE`` has.

Each has ``measure(plan: Plan, session: Session) -> dict[str, Answer]``, which returns an answer for every node. The
checks define the format of the lines. The answer of an unreachable node has the reason in ``err``.
"""
