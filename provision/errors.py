"""The exception tree. An exception means "cannot go on"; findings and step states are values.

::

    ClusterctlError                       exit code
      UsageError                          2    an argument, an option, a missing program on this machine
        InventoryError                    2    inventory.yaml: every mistake at once, each with its path
      BundleError                         3    a bundle that is truncated, damaged, foreign or too new
      PreflightError                      4    nodes that refuse, nothing was changed
      NodesFailedError                    5    some nodes failed, the others are done
      RunFailedError                      6    the training run failed
      InterruptedByUser                 130    Ctrl-C or SIGTERM, after cleaning up

Every message says what went wrong and where; ``hint`` is the next command to type or thing to change.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self


class Reason(str):
    """Why something failed on a node; ``alike`` is the same text without what only this node has in it."""

    __slots__ = ("alike",)
    alike: str

    def __new__(cls, text: str, alike: str = "") -> Self:
        """``alike``: empty where the text has nothing of the node's own."""
        self = super().__new__(cls, text)
        self.alike = alike or str(text)
        return self

    @classmethod
    def about(cls, text: str, name: str, address: str, port: int | None = None) -> Self:
        """A reason that may hold the node's own name, address or port."""
        alike = _replaced(text, address, "its address")
        if any(letter.isdigit() for letter in name):  # others are words that a sentence may have anyway
            alike = _replaced(alike, name, "its name")
        alike = re.sub(rf"\bport {port}\b", "its port", alike) if port else alike
        return cls(text, alike.replace("its address its port", "its address with its port"))


def within(text: str, why: str) -> str:
    """``text`` with a reason in place of its ``{}``; a ``Reason`` stays one."""
    whole = text.replace("{}", why, 1)
    return Reason(whole, text.replace("{}", why.alike, 1)) if isinstance(why, Reason) else whole


def _replaced(text: str, own: str, words: str) -> str:
    behind = r"[\w-]|\.\w|:\w" if ":" in own else r"[\w-]|\.\w"
    return re.sub(rf"(?<![\w.:-]){re.escape(own)}(?!{behind})", words, text) if own else text


class ClusterctlError(Exception):
    """Something that ends the command. ``str(error)`` is what and where; ``hint`` what to do next."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def complete(self, change: Callable[[str], str]) -> None:
        """Change every sentence that may name a command: see ``hints.complete``."""
        self.args = (change(str(self)),)
        self.hint = change(self.hint)


class UsageError(ClusterctlError):
    """A wrong argument or option, or something missing on this machine."""

    exit_code = 2


class InventoryError(UsageError):
    """The inventory cannot be used. ``problems`` holds one line for each mistake, with its place."""

    def __init__(self, message: str, *, problems: Sequence[str] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.problems = tuple(problems)


class BundleError(ClusterctlError):
    """A bundle that cannot be read or must not be used."""

    exit_code = 3


class NodesError(ClusterctlError):
    """Something went wrong on named nodes. ``reasons`` maps a node's name to one readable reason."""

    def __init__(self, message: str, *, reasons: Mapping[str, str], hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reasons = dict(reasons)

    def complete(self, change: Callable[[str], str]) -> None:
        """The reasons may name commands as well."""
        super().complete(change)
        self.reasons = {name: change(reason) for name, reason in self.reasons.items()}


class PreflightError(NodesError):
    """Nodes that cannot take what was asked for. Raised before anything was changed anywhere."""

    exit_code = 4


class NodesFailedError(NodesError):
    """Some nodes failed; every other node was finished first, unless ``nothing_done`` says that none was."""

    exit_code = 5

    def __init__(self, message: str, *, reasons: Mapping[str, str], hint: str = "", nothing_done: bool = False) -> None:
        super().__init__(message, reasons=reasons, hint=hint)
        self.nothing_done = nothing_done


class RunFailedError(NodesError):
    """The training run failed. ``reasons`` holds the last log lines of the nodes that failed first."""

    exit_code = 6


class InterruptedByUser(ClusterctlError):  # noqa: N818 - not an error of the program
    """Ctrl-C or SIGTERM: raised after what was started has been stopped."""

    exit_code = 130


def shown_value(value: object) -> str:
    """A value of any type as it may stand in a message, shortened to a fixed length."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
