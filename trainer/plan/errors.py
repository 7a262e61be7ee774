"""Errors of planning."""

from __future__ import annotations


class PlanError(ValueError):
    """A model, cluster or batch that cannot be planned. ``hint`` says what to type or change."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
