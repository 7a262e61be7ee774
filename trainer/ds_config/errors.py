"""Errors of the configuration."""

from __future__ import annotations


class ConfigError(ValueError):
    """Options that contradict each other. ``hint`` says what to type instead."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
