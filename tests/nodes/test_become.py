"""Scripts that run as root through a real sudo, on nodes whose ssh user is an ordinary one."""

from __future__ import annotations

import threading
from functools import partial
from os import getpid

import pytest
from sudo_nodes import ASKING, FREE, allow, install
from training import wait_until

from provision import inventory as inventory_file
from provision import sandbox
from provision.render import quote
from provision.ssh.openssh import OpenSshRemote
from provision.ssh.remote import Connections, DeadlineExceeded, NodeUnreachable, RootRefused, fan_out

PASSWORD = "correct $horse' battery"
NASTY = "'\"$(id)`id`\n ü\\ !! \t*"


@pytest.fixture(scope="module")
def box(require_sandbox, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sandbox")
    with sandbox.up(
        sandbox.Options(nodes=3, name=f"become-{getpid()}", directory=folder, user="trainer", password=PASSWORD)
    ) as box:
        install(box)
        yield box


@pytest.fixture
def sudoers(box):
    """Sets the rules of sudo."""
    return partial(allow, box)


class Typing:
    """A user who types a password when asked; counts the questions."""

    def __init__(self, password=PASSWORD):
        self._password = password
        self.asked = []

    def confirm_host_key(self, *_about):
        raise AssertionError("the host keys are pinned")

    def password(self, *_about):
        raise AssertionError("the key logs in")

    def sudo_password(self, user, where):
        self.asked.append((user, where))
        return self._password


@pytest.fixture
def connect(box):
    """Connections with or without a user to ask."""
    pools = []

    def make(prompts=None):
        pools.append(Connections(inventory_file.load(box.inventory), prompts))
        return pools[-1], pools[-1].inventory.nodes

    yield make
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("more", ["", "Defaults use_pty\n"])
def test_sudo_without_a_password(connect, sudoers, more):
    sudoers(more + FREE)
    pool, (node, *_) = connect()
    script = f"id -u; pwd; printf %s {quote(NASTY)}; cat; echo err >&2; exit 1"
    result = pool[node].run(script, stdin=[b"in"], root=True)
    assert (result.out, result.err, result.rc) == (f"0\n/root\n{NASTY}in", "err\n", 1)
    assert pool[node].run("id -un; echo $#").out == "trainer\n0\n"
    assert pool[node].run("echo $#", root=True).out == "0\n"
    control = pool[node]
    assert OpenSshRemote(pool.inventory, node, control=control).run("id -u", root=True).out == "0\n"


def test_one_question_for_all_nodes(connect, sudoers):
    sudoers(ASKING)
    typing = Typing()
    pool, nodes = connect(typing)
    # The places where sudo or the caller's bytes would contain the password.
    look = (
        "id -u; cat; p=correct; printf '%s $horse' \"$p\" >/run/looked-for; "
        "for f in /proc/[0-9]*/cmdline /proc/[0-9]*/environ; do "
        'tr "\\0" " " <"$f" 2>/dev/null; done | grep -c -F -f /run/looked-for'
    )
    shown = f"sh -c 'read x' 'correct $horse' <&3 3<&- & exec 3<&-; {look}"
    shown = f"mkfifo /run/never; exec 3<>/run/never; {shown}; kill $!; rm /run/never"
    assert pool[nodes[0]].run(shown, root=True).out == "0\n1\n"  # so it would be found
    for _again in range(2):
        results = fan_out(nodes, lambda node: pool[node].run(look, stdin=[b"mine\n"], root=True))
        assert {name: answer.out for name, answer in results.items()} == {node.name: "0\nmine\n0\n" for node in nodes}
    assert len(typing.asked) == 1
    assert typing.asked[0][0] == "trainer"


def test_one_node_of_several_requires_a_password(connect, sudoers):
    sudoers(FREE, ASKING, FREE)
    typing = Typing()
    pool, nodes = connect(typing)
    results = fan_out(nodes, lambda node: pool[node].run("cat", stdin=[b"mine"], root=True).out)
    assert results == {node.name: "mine" for node in nodes}
    assert typing.asked == [("trainer", nodes[1].name)]


def test_a_wrong_password_is_tried_on_one_node(connect, sudoers, box):
    sudoers(ASKING + "Defaults logfile=/var/log/sudo.log\n")
    typing = Typing("swordfish")
    pool, nodes = connect(typing)
    results = fan_out(nodes, lambda node: pool[node].run("id -u", root=True))
    assert all(isinstance(error, RootRefused) for error in results.values())
    assert len(typing.asked) == 1
    assert sum("not tried again" in error.reason for error in results.values()) == len(nodes) - 1
    assert "swordfish" not in repr([(str(error), error.hint) for error in results.values()])
    logs = [box.node_root(node.name) / "var/log/sudo.log" for node in nodes]

    def tried():
        return [log for log in logs if log.exists() and "incorrect password" in log.read_text()]

    wait_until(tried, "sudo writes its log when its connection is gone already", 30)
    assert len(tried()) == 1
    for log in logs:
        log.unlink(missing_ok=True)


def test_refusals_have_reasons(connect, sudoers, box):
    sudoers(ASKING, "Defaults requiretty\n" + FREE, "")
    pool, nodes = connect()
    one, two, three = fan_out(nodes, lambda node: pool[node].run("id -u", root=True)).values()
    assert "needs the password of trainer, and there is no terminal to ask on" in one.reason
    assert "NOPASSWD" in one.hint
    assert "requiretty" in two.reason
    assert "there is no terminal to ask on" in three.reason  # sudo reports who is in sudoers only after a password
    pool, nodes = connect(Typing())
    with pytest.raises(RootRefused, match="trainer may not use sudo"):
        pool[nodes[2]].run("id -u", root=True)
    sudo = box.node_root(nodes[0].name) / "usr/bin/sudo"
    sudo.rename(sudo.with_name("hidden"))
    try:
        with pytest.raises(RootRefused, match="sudo is not installed"):
            pool[nodes[0]].run("id -u", root=True)
    finally:
        sudo.with_name("hidden").rename(sudo)


def test_no_password_is_given(connect, sudoers):
    sudoers(ASKING)
    pool, nodes = connect(Typing(None))
    results = fan_out(nodes, lambda node: pool[node].run("id -u", root=True))
    assert {error.reason for error in results.values()} == {"no sudo password was given for trainer"}


def test_deadline_stops_scripts_that_run_as_root(connect, sudoers, box):
    sudoers(ASKING)
    pool, (node, *_) = connect(Typing())
    seen = []
    with pytest.raises(DeadlineExceeded):
        pool[node].run("echo $$; sleep 1000.5", on_line=seen.append, deadline=6, root=True)
    assert seen
    wait_until_gone(box, node.name, "sleep 1000.5")


def test_close_stops_scripts_that_run_as_root(connect, sudoers, box):
    sudoers(FREE)
    pool, (node, *_) = connect()
    started = threading.Event()
    errors = []

    def work():
        try:
            pool[node].run("echo go; sleep 1000.6", on_line=lambda _line: started.set(), root=True)
        except NodeUnreachable as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(30)
    pool.close()
    thread.join(30)
    assert errors
    wait_until_gone(box, node.name, "sleep 1000.6")


def wait_until_gone(box, name, words):
    script = f"""
for n in $(seq 300); do
  found=
  for f in /proc/[0-9]*/cmdline; do
    [ "$(tr '\\0' ' ' <"$f" 2>/dev/null)" = "{words} " ] && found=1
  done
  [ "$found" ] || exit 0
  sleep 0.1
done
exit 1
"""
    assert box.enter(name, ["sh", "-c", script]).returncode == 0
