"""The exceptions. An exception ends the command; findings and step states are values.

::

    ClusterctlError                       exit code
      UsageError                          2    an argument, an option, a missing program on this machine
        ListedError                       2    a file has mistakes; all are listed, each with its place
          InventoryError                  2    the file is inventory.yaml
      BundleError                         3    a bundle is truncated, damaged, unknown or too new
      PreflightError                      4    nodes refuse the command; nothing was changed
      NodesFailedError                    5    some nodes failed; the others are done
      RunFailedError                      6    the training run failed
      InterruptedByUser                 130    Ctrl-C or SIGTERM, after cleaning up

Every message says what failed and where; ``hint`` is the next command, or what to change.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self


class Reason(str):
    """Why something failed on a node; ``common`` is the same text without the node's name, address and port."""

    __slots__ = ("common",)
    common: str

    def __new__(cls, text: str, common: str = "") -> Self:
        """``common`` is empty if the text has nothing that is specific to the node."""
        self = super().__new__(cls, text)
        self.common = common or str(text)
        return self

    @classmethod
    def about(cls, text: str, name: str, address: str, port: int | None = None) -> Self:
        """A reason that may contain the node's name, address or port."""
        common = _replaced(text, address, "its address")
        if any(letter.isdigit() for letter in name):  # a name without digits may be an ordinary word of the sentence
            common = _replaced(common, name, "its name")
        common = re.sub(rf"\bport {port}\b", "its port", common) if port else common
        return cls(text, common.replace("its address its port", "its address with its port"))


def within(text: str, why: str) -> str:
    """``text`` with the reason inserted at ``{}``; a ``Reason`` if the reason is one."""
    whole = text.replace("{}", why, 1)
    return Reason(whole, text.replace("{}", why.common, 1)) if isinstance(why, Reason) else whole


def _replaced(text: str, own: str, words: str) -> str:
    behind = r"[\w-]|\.\w|:\w" if ":" in own else r"[\w-]|\.\w"
    return re.sub(rf"(?<![\w.:-]){re.escape(own)}(?!{behind})", words, text) if own else text


class ClusterctlError(Exception):
    """Ends the command. ``str(error)`` says what failed and where; ``hint`` says what to do next."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def complete(self, change: Callable[[str], str]) -> None:
        """Apply ``change`` to every sentence that may name a command; see ``hints.complete``."""
        self.args = (change(str(self)),)
        self.hint = change(self.hint)


class UsageError(ClusterctlError):
    """A wrong argument or option, or something missing on this machine."""

    exit_code = 2


class ListedError(UsageError):
    """A file with mistakes. ``problems`` has one line for each mistake, with its place."""

    def __init__(self, message: str, *, problems: Sequence[str] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.problems = tuple(problems)


class InventoryError(ListedError):
    """The inventory cannot be used."""


class BundleError(ClusterctlError):
    """A bundle that cannot be read or must not be used."""

    exit_code = 3


class NodesError(ClusterctlError):
    """Something failed on named nodes. ``reasons`` maps a node's name to its reason."""

    def __init__(self, message: str, *, reasons: Mapping[str, str], hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reasons = dict(reasons)

    def complete(self, change: Callable[[str], str]) -> None:
        """Also apply ``change`` to the reasons."""
        super().complete(change)
        self.reasons = {name: change(reason) for name, reason in self.reasons.items()}


class PreflightError(NodesError):
    """Nodes refuse the command. Raised before anything was changed on any node."""

    exit_code = 4


class NodesFailedError(NodesError):
    """Some nodes failed. All other nodes are finished, unless ``nothing_done`` is set."""

    exit_code = 5

    def __init__(self, message: str, *, reasons: Mapping[str, str], hint: str = "", nothing_done: bool = False) -> None:
        super().__init__(message, reasons=reasons, hint=hint)
        self.nothing_done = nothing_done


class RunFailedError(NodesError):
    """The training run failed. ``reasons`` has the last log lines of the nodes that failed first."""

    exit_code = 6


class InterruptedByUser(ClusterctlError):  # noqa: N818 - not an error of the program
    """Ctrl-C or SIGTERM. Raised after everything that was started has been stopped."""

    exit_code = 130


def shown_value(value: object) -> str:
    """A value of any type, shortened for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
