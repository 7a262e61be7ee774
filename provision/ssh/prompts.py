"""What a connection may ask the user, and how a password is asked for once however many nodes want it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from provision.model import Node


class Prompts(Protocol):
    """The questions. The command line answers them; both are called from any thread, one question at a time."""

    def confirm_host_key(self, node: Node, key_type: str, fingerprint: str) -> bool:
        """Whether this is the node's host key: its type and ``SHA256:…`` as ``ssh-keygen -l`` shows them."""
        ...

    def password(self, user: str, where: str) -> str | None:
        """The login password of ``user``, first needed at ``where``; None when the user gives none."""
        ...

    def sudo_password(self, user: str, where: str) -> str | None:
        """The password that sudo wants of ``user``, first on the node ``where``; None when the user gives none."""
        ...


class WithoutSudo:
    """Answers all questions except the one for sudo's password."""

    def __init__(self, prompts: Prompts) -> None:
        self.confirm_host_key = prompts.confirm_host_key
        self.password = prompts.password

    def sudo_password(self, _user: str, _where: str) -> str | None:
        """None: the user is not asked."""
        return None


class PasswordRefused(Exception):  # noqa: N818 - never leaves this package
    """No password, or a wrong one; the message is the reason."""


class Passwords:
    """The passwords of one kind in this run, by user. Kept in memory only.

    The first node that needs a password asks for it and tries it while every other node waits. A wrong one is neither
    asked for again nor tried elsewhere: a typing error must not lock an account on a whole cluster.
    """

    def __init__(self, ask: Callable[[str, str], str | None], kind: str = "password") -> None:
        self._ask = ask
        self._kind = kind
        self._lock = threading.Lock()
        self._typed: dict[str, str] = {}
        self._good: dict[str, str] = {}
        self._refused: dict[str, str] = {}

    def __repr__(self) -> str:
        return "Passwords(…)"

    def try_at(self, user: str, where: str, attempt: Callable[[str], bool]) -> None:
        """Get in through ``attempt``, which says whether the password was accepted.

        Raises:
            PasswordRefused: there is no password that ``where`` accepts.
        """
        with self._lock:
            password = self._good.get(user)
            if password is None:
                if user in self._refused:
                    raise PasswordRefused(self._refused[user])
                if user not in self._typed:
                    answer = self._ask(user, where)
                    if answer is None:
                        self._refused[user] = f"no {self._kind} was given for {user}"
                        raise PasswordRefused(self._refused[user])
                    self._typed[user] = answer  # kept, should the node have hung up meanwhile
                if attempt(self._typed[user]):
                    self._good[user] = self._typed[user]
                    return
                self._refused[user] = f"the {self._kind} of {user} was refused by {where}, and not tried again"
                raise PasswordRefused(f"the {self._kind} of {user} was refused")
        if not attempt(password):
            raise PasswordRefused(f"the {self._kind} of {user} is another one here")
