"""Runs a script as root: as the ssh user if that is root, through ``sudo -n``, or with a password, asked for once.

A small script goes first (``templates/ssh/become.sh.j2``). It tries ``sudo -n``; if sudo refuses, it reports that and
waits. The password is written only after sudo's prompt, which contains a token, was read. The main script is written
only after root's shell has reported that it reads. So neither can read the other's input, whatever the node's sudoers
contains, and the password exists only in memory and in sudo's input.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from typing import TYPE_CHECKING, Literal, cast

from provision.render import render
from provision.ssh.prompts import PasswordRefused, Passwords
from provision.ssh.wire import AS_ROOT, RootRefused, decode, frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from provision.model import Node
    from provision.ssh.prompts import Prompts

_PATIENCE = 60.0  # seconds for sudo to answer to a password; PAM may query a slow directory

_Answer = Literal["ready", "ask", "missing", "prompt", "ended"]

# sudo's messages in the C locale, from `strings` of release 1.9.13. sudo 1.9.16 and sudo-rs write that "authentication"
# or a terminal is required (trifectatechfoundation/sudo-rs issue 1668).
_WANTS_PASSWORD = re.compile(r"(?i)(password|authentication) is required|terminal is required to (read|authent)")
_WRONG_PASSWORD = re.compile(r"incorrect (password|authentication) attempt|Sorry, try again")
_NOT_ALLOWED = re.compile(r"not in the sudoers file|may not run sudo|not allowed to execute")
_NO_TERMINAL = re.compile(r"must have a tty")
_NOT_SETUID = re.compile(r"effective uid is not 0|must be owned by uid 0 and have the setuid|no new privileges")


def explain_refusal(output: str, user: str) -> tuple[str, str]:
    """Why sudo refused, and how to fix it.

    Args:
        output: sudo's output in the C locale.
        user: the user who called sudo.

    Returns:
        The reason and a hint. Neither contains a command line or anything that was typed.
    """
    root = "or log in as root: ssh.user in the inventory"
    if _NO_TERMINAL.search(output):
        return "sudo requires a terminal (requiretty)", f"on the node, in sudoers: Defaults:{user} !requiretty"
    if _NOT_ALLOWED.search(output):
        return f"{user} may not use sudo", f"on the node, in sudoers: {user} ALL=(ALL) ALL; {root}"
    if _NOT_SETUID.search(output):
        return "sudo cannot become root there", f"is it a setuid program, on a file system without nosuid? {root}"
    if _WRONG_PASSWORD.search(output):
        return f"the sudo password of {user} was refused", "run the command again and retype the password"
    lines = [line.split(" -c ")[0].strip() for line in output.splitlines() if not line.startswith("@clusterctl:")]
    last = next((line for line in reversed(lines) if line), "no message")
    return f"sudo refused: {last.removeprefix('sudo: ')[:200]}", f"try on the node: sudo -n true; {root}"


class Sudo:
    """State that the connections of one command share: the password, and the nodes that need it. Kept in memory."""

    def __init__(self, prompts: Prompts | None) -> None:
        self.passwords = Passwords(prompts.sudo_password, "sudo password") if prompts else None
        self.needed: set[str] = set()  # names of nodes whose sudo needs a password


class SudoEscalation:
    """Makes one script run as root; a ``wire.Escalation``."""

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
        self._output = bytearray()
        self._read = 0  # bytes of the output that were parsed
        self._ended = False
        self._changed = threading.Condition()

    def feed_err(self, data: bytes) -> None:
        """Take stderr's bytes from before the script starts; empty at its end."""
        with self._changed:
            self._output += data
            self._ended = self._ended or not data
            self._changed.notify_all()

    def give_up(self) -> None:
        """End ``become_root``: the stream has ended."""
        self.feed_err(b"")

    def become_root(self, write: Callable[[bytes], bool], waiting: Callable[[], None]) -> bool:
        """Become root. Returns whether root's shell reads its input; if not, the stream has ended.

        Args:
            write: sends bytes to the node.
            waiting: called before the user may be asked.

        Raises:
            RootRefused: the node refuses, or accepts no password.
        """
        try:
            answer, output = self._next(None)
            if answer == "missing":
                raise self.refused("sudo is not installed there", "install it, or log in as root: ssh.user")
            if answer == "ask":
                if self._quietly and not _WANTS_PASSWORD.search(output):
                    raise self.refused(*explain_refusal(output, self._user))
                self._sudo.needed.add(self._node.name)
                waiting()
                return self._with_password(write)
            return answer == "ready"
        finally:
            self.settled.set()

    def why_ended(self) -> RootRefused | None:
        """Why the stream ended before root's shell was ready; None if sudo printed nothing."""
        output = decode(self._output[self._read :]).strip()
        known = re.search(r"^sudo: |Sorry, ", output, re.MULTILINE)
        return self.refused(*explain_refusal(output, self._user)) if known else None

    def refused(self, reason: str, hint: str) -> RootRefused:
        """The error for this node."""
        return RootRefused(self._node, reason, hint=hint)

    def _with_password(self, write: Callable[[bytes], bool]) -> bool:
        user, passwords = self._user, self._sudo.passwords
        free = f"allow sudo without a password on the node: {user} ALL=(ALL) NOPASSWD: ALL in sudoers"
        if passwords is None:
            raise self.refused(
                f"sudo needs the password of {user}, and there is no terminal to ask on",
                f"run it on a terminal; or {free}",
            )
        lost = False

        def attempt(password: str) -> bool:
            nonlocal lost
            # sh would read the rest of a second line as a script.
            if not password or any(sign in password for sign in "\n\r\0"):
                raise self.refused("a sudo password is a single line and not empty", free)
            write(b"yes\n")
            answer, output = self._next(_PATIENCE)
            if answer == "prompt":
                write(password.encode("utf-8", "surrogateescape") + b"\n")
                answer, output = self._next(_PATIENCE)
            if answer == "ready":
                return True
            if answer == "prompt" or _WRONG_PASSWORD.search(output):
                return False
            lost = not output.strip()
            raise self.refused(*explain_refusal(output.replace(password, "…"), user))

        try:
            passwords.try_at(user, self._node.name, attempt)
        except PasswordRefused as refused:
            raise self.refused(str(refused), free) from None
        except RootRefused:
            if lost:  # the connection ended, not sudo
                return False
            raise
        return True

    def _next(self, patience: float | None) -> tuple[_Answer, str]:
        """The next marker, and the output before it."""
        until = None if patience is None else time.monotonic() + patience
        with self._changed:
            while True:
                if found := self._marker.search(self._output, self._read):
                    before = decode(self._output[self._read : found.start()])
                    self._read = found.end()
                    return cast("_Answer", found[1].decode()), before
                if self._ended:
                    return "ended", decode(self._output[self._read :])
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise self.refused(f"sudo did not answer within {patience:g} s", "try on the node: sudo true")
                self._changed.wait(left)
