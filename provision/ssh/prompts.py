"""Questions that a connection may ask the user. A password is asked for once, even if many nodes need it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from provision.model import Node


class Prompts(Protocol):
    """The questions. The command line asks them; they may come from any thread, one at a time."""

    def confirm_host_key(self, node: Node, key_type: str, fingerprint: str) -> bool:
        """Whether this is the node's host key: its type and ``SHA256:…`` in the format of ``ssh-keygen -l``."""
        ...

    def password(self, user: str, where: str) -> str | None:
        """The login password of ``user``, first needed at ``where``; None if the user enters none."""
        ...

    def sudo_password(self, user: str, where: str) -> str | None:
        """The sudo password of ``user``, first needed on the node ``where``; None if the user enters none."""
        ...


class WithoutSudo:
    """Asks every question except the one for the sudo password."""

    def __init__(self, prompts: Prompts) -> None:
        self.confirm_host_key = prompts.confirm_host_key
        self.password = prompts.password

    def sudo_password(self, _user: str, _where: str) -> str | None:
        """None: the user is not asked."""
        return None


class PasswordRefused(Exception):  # noqa: N818 - never leaves this package
    """There is no password, or it is wrong; the message is the reason."""


class Passwords:
    """The passwords of one kind for one command, by user. Kept in memory only.

    The first node that needs a password asks for it and tries it while the other nodes wait. A wrong password is not
    asked for again and not tried elsewhere, because a typing error must not lock an account on the whole cluster.
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
        """Log in with ``attempt``, which returns whether the password was accepted.

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
                    self._typed[user] = answer  # kept in case the node closed the connection while the user typed
                if attempt(self._typed[user]):
                    self._good[user] = self._typed[user]
                    return
                self._refused[user] = f"the {self._kind} of {user} was refused by {where}, and not tried again"
                raise PasswordRefused(f"the {self._kind} of {user} was refused")
        if not attempt(password):
            raise PasswordRefused(f"{user} has a different {self._kind} here")
