"""The user's pattern for the lines of a training (``--pattern``), checked before anything starts."""

from __future__ import annotations

from provision.errors import UsageError
from provision.inventory.document import shown
from trainer.reader import Pattern, PatternError

EXAMPLE = r"--pattern 'step (?P<step>\d+).*loss (?P<loss>[\d.]+)'"


def read_pattern(text: str | None, source: str = "--pattern") -> Pattern | None:
    """The pattern of a text; None without a text. ``source`` is where the text is from.

    Raises:
        UsageError: the pattern cannot be used.
    """
    if text is None:
        return None
    try:
        return Pattern(text)
    except PatternError as error:
        raise UsageError(f"{source} {shown(text)}: {error}", hint=f"for example: {EXAMPLE}") from None
