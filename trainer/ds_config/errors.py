"""What is wrong with a wish, and the way out."""

from __future__ import annotations


class ConfigError(ValueError):
    """Options that do not go together. ``str(error)`` says which and why; ``hint`` what to type instead."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
