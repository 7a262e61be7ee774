"""sudo's messages become reasons, and the bytes that each side gets on the way to root."""

from __future__ import annotations

import re
import threading

import pytest

from provision.model import Node
from provision.ssh.become import Sudo, SudoEscalation, explain_refusal
from provision.ssh.wire import RootRefused

# As the programs of sudo 1.9.13p3 of Debian 12 hold them (`strings /usr/libexec/sudo/sudoers.so /usr/bin/sudo`).
SAID = {
    "sudo: sorry, you must have a tty to run sudo\n": "requiretty",
    "bob is not in the sudoers file.\n": "bob may not use sudo",
    "Sorry, user bob is not allowed to execute '/bin/sh -c secret words' as root on gpu01.\n": "bob may not use sudo",
    "Sorry, user bob may not run sudo on gpu01.\n": "bob may not use sudo",
    "sudo: /usr/bin/sudo must be owned by uid 0 and have the setuid bit set\n": "cannot become root",
    "sudo: effective uid is not 0, is /usr/bin/sudo on a file system with the 'nosuid' option set or an NFS file "
    "system without root privileges?\n": "cannot become root",
    'sudo: The "no new privileges" flag is set, which prevents sudo from running as root.\n': "cannot become root",
    "sudo: 1 incorrect password attempt\n": "password of bob was refused",
    "sudo: unable to resolve host gpu01: Name or service not known\nsudo: Account expired or PAM config lacks an "
    "account section for sudo, contact your system administrator\n": "sudo refused: Account expired",
    "Sorry, try again.\nsudo: 2 incorrect password attempts\n": "password of bob was refused",
    "sudo: something new\n": "sudo refused: something new",
    "": "sudo refused: no message",
}


@pytest.mark.parametrize("printed", SAID)
def test_a_refusal_has_a_reason_and_a_hint(printed):
    reason, hint = explain_refusal(printed, "bob")
    assert SAID[printed] in reason
    assert hint
    assert "secret" not in reason + hint


class Sudoer:
    """The node's side of a conversation: its answer after each write."""

    def __init__(self, *answers):
        self.written = []
        self._answers = list(answers)

    def talk(self, sudo, user="bob", node="gpu01"):
        escalation = SudoEscalation(Node(node, "10.0.0.1"), user, sudo)
        token = re.search(rb"\bcc_token=(\w+)", escalation.head)[1].decode()

        def say():
            for part in self._answers.pop(0) if self._answers else [None]:
                escalation.feed_err(b"" if part is None else part.replace("@", f"@clusterctl:{token}:").encode())

        def write(data):
            self.written.append(data)
            threading.Thread(target=say).start()
            return True

        say()
        return escalation.become_root(write, lambda: None)


class Typing:
    def __init__(self, password="open sesame"):
        self.asked = 0
        self._password = password

    def sudo_password(self, _user, _where):
        self.asked += 1
        return self._password


WANTS = ["sudo: a password is", " required\n", "@ask:\n"]


def test_no_password_is_written_if_sudo_needs_none():
    node = Sudoer(["Welcome to gpu01\n", "@rea", "dy:\n"])
    assert node.talk(Sudo(None))
    assert node.written == []


def test_the_password_comes_after_sudo_asked_for_it():
    sudo = Sudo(Typing())
    node = Sudoer(WANTS, ["@prompt:"], ["@ready:\n"])
    assert node.talk(sudo)
    assert node.written == [b"yes\n", b"open sesame\n"]
    assert sudo.needed == {"gpu01"}


def test_no_password_is_written_if_sudo_needs_none_any_more():
    node = Sudoer(WANTS, ["@ready:\n"])
    assert node.talk(Sudo(Typing()))
    assert node.written == [b"yes\n"]


@pytest.mark.parametrize(
    "answer", [["Sorry, try again.\n", "@prompt:"], ["sudo: 1 incorrect password attempt\n", None]]
)
def test_a_wrong_password_is_written_once(answer):
    typing = Typing()
    sudo = Sudo(typing)
    with pytest.raises(RootRefused, match="the sudo password of bob was refused"):
        Sudoer(WANTS, ["@prompt:"], answer).talk(sudo)
    node = Sudoer(WANTS)
    with pytest.raises(RootRefused, match="refused by gpu01, and not tried again"):
        node.talk(sudo, node="gpu02")
    assert node.written == []
    assert typing.asked == 1


def test_a_password_in_sudo_s_words_is_not_shown():
    printed = ["sudo: pam: open sesame is odd\n", None]
    with pytest.raises(RootRefused, match="pam: … is odd"):
        Sudoer(WANTS, ["@prompt:"], printed).talk(Sudo(Typing()))


@pytest.mark.parametrize("answers", [[[None]], [WANTS, [None]], [WANTS, ["@prompt:"], [None]]])
def test_a_lost_connection_is_no_refusal(answers):
    assert not Sudoer(*answers).talk(Sudo(Typing()))


def test_without_sudo():
    with pytest.raises(RootRefused, match="not installed"):
        Sudoer(["@missing:\n"]).talk(Sudo(Typing()))


def test_the_shared_state_shows_no_password():
    sudo = Sudo(Typing())
    assert Sudoer(WANTS, ["@prompt:"], ["@ready:\n"]).talk(sudo)
    assert "sesame" not in repr(vars(sudo))


@pytest.mark.parametrize(
    "password",
    ['it\'s "x"', " spaces at both ends ", "$HOME `id` $(id)", "-Sx", "pässwörd €", "a\\b%s", "\udcff\udc80"],
)
def test_any_line_is_a_password_and_is_only_written(password, caplog):
    node = Sudoer(WANTS, ["@prompt:"], ["@ready:\n"])
    sudo = Sudo(Typing(password))
    assert node.talk(sudo)
    assert node.written == [b"yes\n", password.encode("utf-8", "surrogateescape") + b"\n"]
    escalation = SudoEscalation(Node("gpu02", "10.0.0.2"), "bob", sudo)
    assert password.encode("utf-8", "surrogateescape") not in escalation.head  # what goes into an argv on the node
    assert password not in caplog.text + repr(sudo.passwords) + repr(sudo)


@pytest.mark.parametrize("password", ["", "two\nlines", "one\r", "nul\0"])
def test_invalid_password_is_not_written(password):
    node = Sudoer(WANTS, ["@prompt:"], ["@ready:\n"])
    with pytest.raises(RootRefused, match="a sudo password is a single line and not empty"):
        node.talk(Sudo(Typing(password)))
    assert node.written == []
