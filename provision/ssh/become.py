"""Root's rights for a script: the ssh user has them, or sudo gives them, or sudo wants a password, asked for once.

A small script goes first (``templates/ssh/become.sh.j2``). It tries ``sudo -n``, and where that is refused says so and
waits. The password is written only after sudo's own prompt, which holds a token, was seen; the script that shall run is
written only when root's shell has said that it reads. So neither ever reads what is meant for the other, whatever the
node's sudoers says, and the password is nowhere but in memory and in sudo's input.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from typing import TYPE_CHECKING, Literal, cast

from provision.render import render
from provision.ssh.framing import AS_ROOT, decode, frame
from provision.ssh.prompts import PasswordRefused, Passwords
from provision.ssh.wire import RootRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from provision.model import Node
    from provision.ssh.prompts import Prompts

_PATIENCE = 60.0  # seconds until sudo has answered to a password; PAM may ask a directory that is slow

_Answer = Literal["ready", "ask", "missing", "prompt", "ended"]

# sudo's words in the C locale, as its programs of release 1.9.13 hold them (`strings`); that an authentication or a
# terminal is required is how sudo 1.9.16 and sudo-rs say it (trifectatechfoundation/sudo-rs issue 1668).
_WANTS_PASSWORD = re.compile(r"(?i)(password|authentication) is required|terminal is required to (read|authent)")
_WRONG_PASSWORD = re.compile(r"incorrect (password|authentication) attempt|Sorry, try again")
_NOT_ALLOWED = re.compile(r"not in the sudoers file|may not run sudo|not allowed to execute")
_NO_TERMINAL = re.compile(r"must have a tty")
_NOT_SETUID = re.compile(r"effective uid is not 0|must be owned by uid 0 and have the setuid|no new privileges")


def refusal(said: str, user: str) -> tuple[str, str]:
    """Why sudo has refused, and what to do about it.

    Args:
        said: what sudo has written in the C locale.
        user: who has called it.

    Returns:
        The reason and a hint. No command line and nothing that was typed is in them.
    """
    root = "or log in as root: ssh.user in the inventory"
    if _NO_TERMINAL.search(said):
        return "sudo wants a terminal (requiretty)", f"on the node, in sudoers: Defaults:{user} !requiretty"
    if _NOT_ALLOWED.search(said):
        return f"{user} may not use sudo", f"on the node, in sudoers: {user} ALL=(ALL) ALL; {root}"
    if _NOT_SETUID.search(said):
        return "sudo cannot become root there", f"is it a setuid program, on a file system without nosuid? {root}"
    if _WRONG_PASSWORD.search(said):
        return f"the sudo password of {user} was refused", "run the command again and type it anew"
    lines = [line.split(" -c ")[0].strip() for line in said.splitlines() if not line.startswith("@clusterctl:")]
    last = next((line for line in reversed(lines) if line), "it says nothing")
    return f"sudo refuses: {last.removeprefix('sudo: ')[:200]}", f"try on the node: sudo -n true; {root}"


class Sudo:
    """What the connections of one command share: the password, and where it is needed. Kept in memory only."""

    def __init__(self, prompts: Prompts | None) -> None:
        self.passwords = Passwords(prompts.sudo_password, "sudo password") if prompts else None
        self.needed: set[str] = set()  # names of nodes whose sudo does nothing without one


class Ascent:
    """One script's way to root; a ``wire.Handover``."""

    def __init__(self, node: Node, user: str, sudo: Sudo) -> None:
        token = secrets.token_hex(8)
        self._quietly = node.name not in sudo.needed
        script = render("ssh/become.sh.j2", token=token, as_root=AS_ROOT, quietly=self._quietly)
        self.head = frame(script, secrets.token_hex(8))
        self.settled = threading.Event()
        self._node = node
        self._user = user
        self._sudo = sudo
        self._marker = re.compile(f"@clusterctl:{token}:(ready|ask|missing|prompt):".encode())
        self._said = bytearray()
        self._read = 0  # of what was said
        self._ended = False
        self._changed = threading.Condition()

    def feed_err(self, data: bytes) -> None:
        """Take what comes on stderr before the script begins; empty at its end."""
        with self._changed:
            self._said += data
            self._ended = self._ended or not data
            self._changed.notify_all()

    def give_up(self) -> None:
        """End ``climb``: the stream has ended."""
        self.feed_err(b"")

    def climb(self, write: Callable[[bytes], bool], waiting: Callable[[], None]) -> bool:
        """Become root; whether root's shell reads now. If it does not, the stream has ended.

        Args:
            write: sends bytes to the node.
            waiting: called before a person may be asked.

        Raises:
            RootRefused: the node does not allow it, or there is no password that it takes.
        """
        try:
            answer, said = self._next(None)
            if answer == "missing":
                raise self.refused("sudo is not installed there", "install it, or log in as root: ssh.user")
            if answer == "ask":
                if self._quietly and not _WANTS_PASSWORD.search(said):
                    raise self.refused(*refusal(said, self._user))
                self._sudo.needed.add(self._node.name)
                waiting()
                return self._with_password(write)
            return answer == "ready"
        finally:
            self.settled.set()

    def why_ended(self) -> RootRefused | None:
        """The reason when the stream has ended before root's shell read; None when sudo has said nothing."""
        said = decode(self._said[self._read :]).strip()
        known = re.search(r"^sudo: |Sorry, ", said, re.MULTILINE)
        return self.refused(*refusal(said, self._user)) if known else None

    def refused(self, reason: str, hint: str) -> RootRefused:
        """The error for this node."""
        return RootRefused(self._node, reason, hint=hint)

    def _with_password(self, write: Callable[[bytes], bool]) -> bool:
        user, passwords = self._user, self._sudo.passwords
        free = f"let sudo do without on the node: {user} ALL=(ALL) NOPASSWD: ALL in sudoers"
        if passwords is None:
            raise self.refused(
                f"sudo needs the password of {user}, and nobody can be asked", f"run it on a terminal; or {free}"
            )
        lost = False

        def attempt(password: str) -> bool:
            nonlocal lost
            if not password or any(
                sign in password for sign in "\n\r\0"
            ):  # what is behind it would be read as a script
                raise self.refused("a sudo password is one line that is not empty", free)
            write(b"yes\n")
            answer, said = self._next(_PATIENCE)
            if answer == "prompt":
                write(password.encode("utf-8", "surrogateescape") + b"\n")
                answer, said = self._next(_PATIENCE)
            if answer == "ready":
                return True
            if answer == "prompt" or _WRONG_PASSWORD.search(said):
                return False
            lost = not said.strip()
            raise self.refused(*refusal(said.replace(password, "…"), user))

        try:
            passwords.try_at(user, self._node.name, attempt)
        except PasswordRefused as refused:
            raise self.refused(str(refused), free) from None
        except RootRefused:
            if lost:  # the connection, not sudo, has ended
                return False
            raise
        return True

    def _next(self, patience: float | None) -> tuple[_Answer, str]:
        """The next marker, and what was said before it."""
        until = None if patience is None else time.monotonic() + patience
        with self._changed:
            while True:
                if found := self._marker.search(self._said, self._read):
                    before = decode(self._said[self._read : found.start()])
                    self._read = found.end()
                    return cast("_Answer", found[1].decode()), before
                if self._ended:
                    return "ended", decode(self._said[self._read :])
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise self.refused(f"sudo has not answered within {patience:g} s", "try on the node: sudo true")
                self._changed.wait(left)
