"""The inventory's jump hosts: which one leads to a node, and which have failed."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from provision.errors import Reason
from provision.ssh.client import Retry
from provision.ssh.wire import NodeUnreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from provision.model import Inventory, Node

T = TypeVar("T")

_WAYS = 2  # jump hosts that answer, but do not reach the node: after so many the node is at fault
_SHOWN = 3  # jump hosts whose failures an error names


class JumpHostFailed(NodeUnreachable):
    """A jump host cannot be used."""


class NotReached(NodeUnreachable):
    """A jump host answers, but does not reach the node."""


class JumpRetry(Retry):
    """The attempt failed at a jump host, and is worth repeating."""


def in_turn(number: int, hosts: Sequence[T]) -> list[T]:
    """The jump hosts of the node with this number, in the order in which they are tried.

    Nodes take turns, also with their second choice: those of a dead jump host are divided among all others.
    """
    if not hosts:
        return []
    turn, first = divmod(number, len(hosts))
    others = [*hosts[first + 1 :], *hosts[:first]]
    start = turn % len(others) if others else 0
    return [hosts[first], *others[start:], *others[:start]]


class JumpHosts:
    """Chooses a jump host for each node of a command. Those that have failed are tried last.

    ``warn`` receives a sentence for each one that another has replaced, once and in any thread.
    """

    def __init__(self, inventory: Inventory, warn: Callable[[str], None] | None) -> None:
        self._hosts = inventory.ssh.jump_hosts
        self._numbers = {node.name: number for number, node in enumerate(inventory.nodes)}
        self._warn = warn
        self._failed: dict[str, bool] = {}  # by name: whether there was a warning
        self._lock = threading.Lock()

    def lead_to(self, node: Node) -> bool:
        """Whether the node is behind jump hosts."""
        return bool(self._hosts) and node not in self._hosts

    def log_in(self, node: Node, attempt: Callable[[Node], T]) -> T:
        """What ``attempt`` returns for the first jump host that can be used.

        One whose key is unknown or has changed is not replaced: that needs a person.

        Raises:
            NodeUnreachable, Retry: none can be used, or two of them do not reach the node.
        """
        errors: dict[str, JumpHostFailed | NotReached | JumpRetry] = {}
        for jump in sorted(in_turn(self._numbers.get(node.name, 0), self._hosts), key=self._has_failed):
            try:
                found = attempt(jump)
            except (JumpHostFailed, NotReached, JumpRetry) as error:  # noqa: PERF203 - a connection costs more
                errors[jump.name] = error
                if not isinstance(error, NotReached):
                    with self._lock:
                        self._failed.setdefault(jump.name, False)
                elif sum(isinstance(each, NotReached) for each in errors.values()) == _WAYS:
                    break
            else:
                self._report(errors)
                return found
        raise _all_failed(node, list(errors.values()))

    def _has_failed(self, jump: Node) -> bool:
        return jump.name in self._failed

    def _report(self, errors: Mapping[str, JumpHostFailed | NotReached | JumpRetry]) -> None:
        for name in sorted(name for name, error in errors.items() if not isinstance(error, NotReached)):
            with self._lock:
                warned, self._failed[name] = self._failed[name], True
            if self._warn and not warned:
                self._warn(f"{errors[name].reason}; nodes are reached through the other jump hosts")


def _all_failed(node: Node, errors: Sequence[JumpHostFailed | NotReached | JumpRetry]) -> Exception:
    """The error of a node for which every jump host failed; an attempt that is worth repeating comes first."""
    first = next((error for error in errors if isinstance(error, JumpRetry | NotReached)), errors[0])
    if len(errors) == 1 or not isinstance(first, JumpHostFailed):
        return first
    shown = sorted(error.reason for error in errors)
    more = f"; and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return JumpHostFailed(node, Reason("; ".join(shown[:_SHOWN]) + more), hint=first.hint)
