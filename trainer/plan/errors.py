"""What cannot be planned, and the way out."""

from __future__ import annotations


class PlanError(ValueError):
    """A model, a cluster or a batch that cannot be planned for. ``hint`` is what to type or change."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
