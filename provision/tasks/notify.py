"""The user's command for events of a run (``--notify``), checked before anything starts."""

from __future__ import annotations

from provision.errors import UsageError
from provision.inventory.schema import as_text


def read_notify(text: str | None, source: str = "--notify") -> str | None:
    """The command of a text, with the inventory's limits; empty: none. ``source`` is where the text is from.

    Raises:
        UsageError: it is too long, or has a line break or a control character.
    """
    if not text:
        return text
    try:
        return as_text(text)
    except ValueError as error:
        raise UsageError(f"{source}: {error}", hint="write a script on the nodes, and name it") from None
