"""Connections to a real sshd: every way to fail has its own reason, and bytes arrive as they were sent."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from local_sshd import PASSWORD, LocalSshd, free_port, make_key
from training import wait_until

from provision.errors import ClusterctlError, InterruptedByUser, UsageError
from provision.model import Node, Ssh
from provision.render import quote
from provision.ssh import wire
from provision.ssh.hostkeys import look_up
from provision.ssh.openssh import OpenSshRemote, bulk
from provision.ssh.prompts import Passwords
from provision.ssh.remote import (
    Connections,
    DeadlineExceeded,
    HostKeyChanged,
    HostKeyUnknown,
    NodeUnreachable,
    connect,
    fan_out,
)

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a private sshd with users of its own"),
    pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="openssh-server is not installed"),
]

SHELLS = {
    "sh": "/bin/sh",
    "bash": "/bin/bash",
    "tcsh": "/usr/bin/tcsh",
    "fish": "/usr/bin/fish",
    "no": "/usr/sbin/nologin",
}
NASTY = "'\"$(id)`id`\n ü\\ !! \t*"
BLOCK = os.urandom(1 << 20)


class Answers:
    """Prompts that are counted."""

    def __init__(self, *, confirm=False, password=None):
        self._confirm = confirm
        self._password = password
        self.confirmed = []
        self.asked = []

    def confirm_host_key(self, node, key_type, fingerprint):
        self.confirmed.append((node.name, key_type, fingerprint))
        return self._confirm

    def password(self, user, where):
        self.asked.append((user, where))
        return self._password

    sudo_password = password


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    users = {name: shell for name, shell in SHELLS.items() if Path(shell).exists()}
    server = LocalSshd(tmp_path_factory.mktemp("sshd") / "s", users)
    yield server
    server.close()


@pytest.fixture
def own_server(tmp_path):
    """Makes servers that a test may break; all are closed afterwards."""
    servers = []

    def make(users=("sh",), **options):
        server = LocalSshd(tmp_path / f"s{len(servers)}", {user: SHELLS[user] for user in users}, **options)
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.close()


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home without keys, agent or ssh_config."""
    folder = tmp_path / "home"
    (folder / ".ssh").mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return folder


@pytest.fixture(params=["paramiko", "openssh"])
def remote(request, server):
    """A connection of either kind."""
    node = server.node("sh")
    inventory = server.inventory(node)
    remote = connect(inventory, node)
    yield remote if request.param == "paramiko" else OpenSshRemote(inventory, node, control=remote)
    remote.close()


def both(inventory, node):
    """The errors of both ways to a node."""
    errors = []
    for way in (connect, lambda inventory, node: OpenSshRemote(inventory, node).run("true")):
        with pytest.raises(NodeUnreachable) as caught:
            way(inventory, node)
        errors.append(caught.value)
    return errors


# --- the conversation ------------------------------------------------------------------------------


def test_output_error_and_exit_code(remote):
    began = time.monotonic()
    result = remote.run("echo out; echo err >&2; printf end; exit 3")
    assert (result.out, result.err, result.rc) == ("out\nend", "err\n", 3)
    assert 0 < result.seconds <= time.monotonic() - began


def test_values_arrive_unchanged(remote):
    assert remote.run(f"printf %s {quote(NASTY)}; cat", stdin=[NASTY.encode()]).out == NASTY * 2


def test_output_that_is_not_utf8_survives(remote):
    text = b"caf\xe9".decode("utf-8", "surrogateescape")
    assert remote.run(f"printf %s {quote(text)}").out == text


def test_no_input_is_an_empty_input(remote):
    assert remote.run("cat; echo done").out == "done\n"


def test_lines_come_one_by_one(remote):
    lines = []
    first = threading.Event()

    def on_line(line):
        lines.append(line)
        first.set()

    def after_the_first_line():
        assert first.wait(60)
        yield b"go\n"

    result = remote.run(
        "echo one; read -r x; echo; printf 'two %s' \"$x\"", stdin=after_the_first_line(), on_line=on_line
    )
    assert (lines, result.out, result.rc) == (["one", "", "two go"], "", 0)


def test_huge_output_on_both_streams_while_input_flows(remote):
    script = "head -c 30000000 /dev/zero | tr '\\0' e >&2; cat; head -c 20000000 /dev/zero | tr '\\0' o"
    result = remote.run(script, stdin=[b"i" * (1 << 20)] * 20)
    assert (len(result.err), len(result.out)) == (30_000_000, 20 * (1 << 20) + 20_000_000)
    assert (set(result.err), set(result.out)) == ({"e"}, {"i", "o"})


def test_endless_output_is_aborted(remote, monkeypatch, tmp_path):
    monkeypatch.setattr(wire, "TOTAL_LIMIT", 1 << 20)
    flag = tmp_path / "ended"
    begin = "x=$(head -c 100000 /dev/zero | tr '\\0' x)"
    last = "echo $x >&2"  # a trap that prints gets as far as its next command
    for target in ("", " >&2"):
        with pytest.raises(NodeUnreachable, match="output is larger than 1 MiB"):
            remote.run(
                f"{begin}; trap '{last}; touch {flag}; exit 1' TERM; while :; do head -c 65536 /dev/zero{target}; done"
            )
        wait_until(flag.exists, "the script cleans up", 60)
        flag.unlink()
    assert remote.run("echo still here").out == "still here\n"


def test_100_mb_of_input_arrive_completely(remote):
    digest = hashlib.sha256(BLOCK * 100).hexdigest()
    assert remote.run("sha256sum", stdin=(BLOCK for _ in range(100))).out.split()[0] == digest


def test_a_megabyte_of_script(remote):
    assert remote.run("x=" + "x" * 1_000_000 + "\necho ${#x}").out == "1000000\n"


def test_the_script_may_end_before_its_input_does(remote):
    sent = 0

    def endless():
        nonlocal sent
        while True:
            sent += 1
            yield BLOCK

    result = remote.run("head -c 10 >/dev/null; echo enough >&2; exit 4", stdin=endless())
    assert (result.rc, result.err) == (4, "enough\n")
    assert sent < 500


def test_blocking_iterator_delays_nothing(remote):
    release = threading.Event()

    def blocked():
        yield b"x"
        release.wait(600)

    assert remote.run("echo over", stdin=blocked()).out == "over\n"
    release.set()  # only now does the iterator go on


def test_an_error_of_the_iterator_stops_the_script(remote, tmp_path):
    mark = tmp_path / "mark"

    def broken():
        yield b"x" * 1000
        raise UsageError("the bundle is damaged")

    with pytest.raises(UsageError, match="damaged"):
        remote.run(f"cat >/dev/null; touch {quote(mark)}", stdin=broken())
    assert not mark.exists()


def test_an_error_of_on_line_is_raised(remote):
    def on_line(_line):
        raise UsageError("enough")

    with pytest.raises(UsageError, match="enough"):
        remote.run("echo x; sleep 60", on_line=on_line)


def test_deadline_stops_the_script(remote, tmp_path):
    pid = tmp_path / "pid"
    with pytest.raises(DeadlineExceeded, match="within 5 s"):  # ssh connects within them, on a busy machine too
        remote.run(f"echo $$ >{quote(pid)}; sleep 600", deadline=5)
    assert gone(int(pid.read_text()))


def test_a_background_process_does_not_hold_the_connection(remote):
    result = remote.run("sleep 600 & echo $!")
    assert remote.run(f"kill {result.out}").rc == 0  # it is still running: the answer did not wait for its end


def test_many_scripts_at_once(remote):
    nodes = [Node(str(number), "") for number in range(8)]
    results = fan_out(nodes, lambda node: remote.run("cat", stdin=[node.name.encode() * 100_000]).out)
    assert results == {node.name: node.name * 100_000 for node in nodes}


def test_root_shells_do_not_expand_the_marker(remote):
    assert remote.run('echo "$cc_t"; echo "$0"').rc == 0


# --- login shells ------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", ["sh", "bash", "tcsh", "fish"])
def test_login_shells_that_print(server, user):
    if user not in server.users:
        pytest.skip(f"{user} is not installed")
    home = server.home(user)
    noise = "echo noise on stdout\necho noise on stderr >/dev/stderr\nprintf 'no newline'\n"
    for name in (".bashrc", ".tcshrc", ".profile"):
        (home / name).write_text(noise)
    (home / ".config/fish").mkdir(parents=True, exist_ok=True)
    (home / ".config/fish/config.fish").write_text(noise)
    node = server.node(user)
    inventory = server.inventory(node)
    remote = connect(inventory, node)
    for way in (remote, OpenSshRemote(inventory, node)):
        result = way.run(f"printf %s {quote(NASTY)}; cat; echo err >&2", stdin=[b"in"])
        assert (result.out, result.err, result.rc) == (NASTY + "in", "err\n", 0)
    remote.close()


def test_a_user_who_may_not_run_commands(server):
    node = server.node("no")
    remote = connect(server.inventory(node), node)
    with pytest.raises(NodeUnreachable, match="did not start sh: This account is currently not available"):
        remote.run("true")
    remote.close()


# --- no connection ------------------------------------------------------------------------------------


def test_refused(server):
    node = Node("n1", "127.0.0.1", user="sh", port=free_port())
    for error in both(server.inventory(node), node):
        assert "refuses connections" in error.reason
        assert str(error).startswith("n1: ")
        assert "sshd" in error.hint


def test_a_name_that_does_not_exist(server):
    node = Node("n1", "no-such-host.invalid", user="sh")
    for error in both(server.inventory(node), node):
        assert "cannot be resolved" in error.reason


def test_a_listener_that_never_answers(server):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        node = Node("n1", "127.0.0.1", user="sh", port=mute.getsockname()[1])
        for error in both(server.inventory(node, timeout=1), node):
            assert "no answer" in error.reason


def test_an_address_that_swallows_packets(server):
    with socket.socket() as full:  # a backlog that is full drops further SYNs
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        held = []
        for _ in range(4):
            held.append(socket.socket())
            held[-1].setblocking(False)
            held[-1].connect_ex(full.getsockname())
        node = Node("n1", "127.0.0.1", user="sh", port=full.getsockname()[1])
        began = time.monotonic()
        for error in both(server.inventory(node, timeout=1), node):
            assert "no answer" in error.reason
        assert time.monotonic() - began < 100  # the kernel would try for 127 s, twice
        for one in held:
            one.close()


def test_a_port_without_an_ssh_server(server):
    with socket.create_server(("127.0.0.1", 0)) as web:

        def answer():
            while True:
                try:
                    connection, _ = web.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"HTTP/1.0 400 Bad\r\n\r\n" * 100)

        threading.Thread(target=answer, daemon=True).start()
        node = Node("n1", "127.0.0.1", user="sh", port=web.getsockname()[1])
        both(server.inventory(node, timeout=2), node)
        web.shutdown(socket.SHUT_RDWR)


def test_connection_closed_by_the_server_is_retried(server):
    """As sshd's MaxStartups does: the first connections are closed before the handshake."""
    accepted, ends = [], []
    with socket.create_server(("127.0.0.1", 0)) as front:

        def serve():
            for number in range(3):
                connection, _ = front.accept()
                accepted.append(number)
                if number < 2:
                    connection.close()
                    continue
                back = socket.create_connection(("127.0.0.1", server.port))
                ends.extend([connection, back])
                for source, target in ((connection, back), (back, connection)):
                    threading.Thread(target=pump, args=(source, target), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        port = front.getsockname()[1]
        node = replace(server.node("sh"), port=port)
        inventory = server.inventory(node)
        inventory.ssh.known_hosts.write_text(server.known_hosts().replace(str(server.port), str(port)))
        remote = connect(inventory, node)
        assert remote.run("echo hi").out == "hi\n"
        remote.close()
    assert accepted == [0, 1, 2]
    for end in ends:
        end.close()


def test_a_wrong_key(server, tmp_path):
    node = server.node("sh")
    inventory = server.inventory(node, key=make_key(tmp_path / "other"))
    first, second = both(inventory, node)
    assert "needs a password" in first.reason
    assert first.hint == "clusterctl init"
    assert "refused" in second.reason


def test_a_key_file_that_is_missing_or_locked(server, tmp_path):
    node = server.node("sh")
    with pytest.raises(NodeUnreachable, match="nothing does not exist"):
        connect(server.inventory(node, key=tmp_path / "nothing"), node)
    locked = tmp_path / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", locked], check=True)
    with pytest.raises(NodeUnreachable, match="passphrase and is not in the agent"):
        connect(server.inventory(node, key=locked), node)


def test_only_keys_are_accepted(own_server, tmp_path):
    server = own_server(options="PasswordAuthentication no\nKbdInteractiveAuthentication no\n")
    node = server.node("sh")
    answers = Answers(password=PASSWORD)
    with pytest.raises(NodeUnreachable, match="refused: no key was accepted"):
        connect(server.inventory(node, key=make_key(tmp_path / "other")), node, prompts=answers)
    assert answers.asked == []


def test_default_keys_are_found(server, home):
    for name in ("id_ed25519", "id_ed25519.pub"):
        shutil.copy(f"{server.key}{name.removeprefix('id_ed25519')}", home / ".ssh" / name)
    node = server.node("sh")
    inventory = server.inventory(node)
    remote = connect(replace(inventory, ssh=replace(inventory.ssh, key=None)), node)
    assert remote.by_key
    remote.close()


def test_broken_connection(own_server):
    server = own_server()
    node = server.node("sh")
    inventory = server.inventory(node)
    remote = connect(inventory, node)
    for way in (remote, OpenSshRemote(inventory, node)):
        with pytest.raises(NodeUnreachable, match="connection was lost"):
            way.run("echo started; sleep 60", on_line=lambda _line: server.cut())
    assert not remote.alive
    with pytest.raises(NodeUnreachable, match="connection was lost"):
        remote.run("true")
    remote.close()


def test_a_script_that_is_killed(server):
    node = server.node("sh")
    remote = connect(server.inventory(node), node)
    with pytest.raises(NodeUnreachable, match="killed on the node"):
        remote.run("kill -KILL $$")
    assert remote.run("echo alive").out == "alive\n"
    remote.close()


def test_too_many_sessions(own_server):
    server = own_server(options="MaxSessions 1\n")
    node = server.node("sh")
    remote = connect(server.inventory(node), node)
    errors = []
    asked = threading.Event()

    def again(_line):
        try:
            with pytest.raises(NodeUnreachable, match="refuses more sessions") as caught:
                remote.run("true")
            errors.append(caught.value)
        finally:
            asked.set()

    def until_asked():  # the first session lasts as long as its stdin
        asked.wait(30)
        yield b""

    remote.run("echo x; cat", stdin=until_asked(), on_line=again)
    assert "MaxSessions" in errors[0].hint
    remote.close()


# --- host keys ------------------------------------------------------------------------------------


def test_an_unknown_host_key_is_refused(server):
    node = server.node("sh")
    inventory = server.inventory(node, known=False)
    first, second = both(inventory, node)
    assert isinstance(first, HostKeyUnknown)
    assert isinstance(second, HostKeyUnknown)
    assert first.hint == second.hint == "clusterctl init"
    assert fingerprint(server.host_keys[0]) in first.reason
    assert not inventory.ssh.known_hosts.exists()


def test_an_unknown_host_key_is_shown_and_pinned_once(server):
    nodes = [server.node("sh", f"n{number}") for number in range(6)]
    inventory = server.inventory(*nodes, known=False)
    answers = Answers(confirm=True)
    with Connections(inventory, answers) as pool:
        results = fan_out(nodes, lambda node: pool[node].run("echo hi").out)
    assert results == {node.name: "hi\n" for node in nodes}
    (asked,) = answers.confirmed
    assert asked[1:] == ("ssh-ed25519", fingerprint(server.host_keys[0]))
    assert inventory.ssh.known_hosts.read_text().strip() == server.known_hosts().strip().removesuffix(" test")
    assert OpenSshRemote(inventory, nodes[0]).run("echo hi").out == "hi\n"
    assert sorted(path.name for path in inventory.ssh.known_hosts.parent.iterdir()) == ["known_hosts"]


def test_a_host_key_that_is_not_confirmed(server):
    node = server.node("sh")
    inventory = server.inventory(node, known=False)
    with pytest.raises(HostKeyUnknown, match="not confirmed"):
        connect(inventory, node, prompts=Answers(confirm=False))
    assert not inventory.ssh.known_hosts.exists()


def test_a_changed_host_key_is_always_refused(server, tmp_path):
    node = server.node("sh")
    inventory = server.inventory(node)
    other = make_key(tmp_path / "other")
    pinned = inventory.ssh.known_hosts
    pinned.write_text(f"[127.0.0.1]:{server.port} {Path(f'{other}.pub').read_text()}")
    before = pinned.read_text()
    answers = Answers(confirm=True)
    with pytest.raises(HostKeyChanged) as caught:
        connect(inventory, node, prompts=answers)
    assert fingerprint(other) in caught.value.reason
    assert fingerprint(server.host_keys[0]) in caught.value.reason
    assert "ssh-keygen -R '[127.0.0.1]:" in caught.value.hint
    assert "known_hosts" in caught.value.hint
    assert answers.confirmed == []
    assert pinned.read_text() == before
    with pytest.raises(HostKeyChanged):
        OpenSshRemote(inventory, node).run("true")


def test_the_hint_for_a_changed_key_works(server, tmp_path):
    node = server.node("sh")
    inventory = server.inventory(node)
    other = make_key(tmp_path / "other")
    inventory.ssh.known_hosts.write_text(f"[127.0.0.1]:{server.port} {Path(f'{other}.pub').read_text()}")
    with pytest.raises(HostKeyChanged) as caught:
        connect(inventory, node)
    command = caught.value.hint.split(": ", 1)[1].split(", then")[0]
    subprocess.run(["sh", "-c", command], check=True, capture_output=True)
    with pytest.raises(HostKeyUnknown):
        connect(inventory, node)


def test_a_node_with_several_keys_shows_the_pinned_one(own_server):
    kinds = ("ed25519", "ecdsa", "rsa")
    server = own_server(host_keys=kinds)
    node = server.node("sh")
    for pinned in kinds:
        inventory = server.inventory(node)
        line = next(line for line in server.known_hosts().splitlines() if pinned in line)
        inventory.ssh.known_hosts.write_text(line + "\n")
        connect(inventory, node).close()
        assert OpenSshRemote(inventory, node).run("echo hi").out == "hi\n", pinned


def test_another_type_than_the_pinned_one_is_a_change(own_server, tmp_path):
    server = own_server()
    node = server.node("sh")
    inventory = server.inventory(node)
    other = make_key(tmp_path / "other", "ecdsa")
    inventory.ssh.known_hosts.write_text(f"[127.0.0.1]:{server.port} {Path(f'{other}.pub').read_text()}")
    with pytest.raises(HostKeyChanged):
        connect(inventory, node, prompts=Answers(confirm=True))


def test_the_users_known_hosts_is_trusted_and_never_written(server, home):
    node = server.node("sh")
    inventory = server.inventory(node, known=False)
    own = home / ".ssh/known_hosts"
    own.write_text(server.known_hosts())
    subprocess.run(["ssh-keygen", "-H", "-f", own], check=True, capture_output=True)  # hashed names
    before = own.read_bytes()
    connect(inventory, node, prompts=Answers()).close()
    assert OpenSshRemote(inventory, node).run("echo hi").out == "hi\n"
    assert own.read_bytes() == before
    assert not inventory.ssh.known_hosts.exists()


def test_a_revoked_key(server):
    node = server.node("sh")
    inventory = server.inventory(node)
    with inventory.ssh.known_hosts.open("a") as file:
        file.write(f"@revoked * {Path(f'{server.host_keys[0]}.pub').read_text()}")
    for error in both(inventory, node):
        assert isinstance(error, HostKeyChanged)


# --- passwords --------------------------------------------------------------------------------------


@pytest.fixture
def keyless(server, tmp_path):
    """Nodes that accept none of the keys."""
    nodes = [server.node("sh", f"n{number}") for number in range(5)]
    return nodes, server.inventory(*nodes, key=make_key(tmp_path / "other"))


def test_a_password_is_asked_for_once(keyless):
    nodes, inventory = keyless
    answers = Answers(password=PASSWORD)
    with Connections(inventory, answers) as pool:
        assert set(fan_out(nodes, lambda node: pool[node].run("echo hi").out).values()) == {"hi\n"}
        assert not pool[nodes[0]].by_key
        assert bulk(inventory, nodes[0], pool[nodes[0]]) is pool[nodes[0]]
    assert [user for user, _where in answers.asked] == ["sh"]
    passwords = Passwords(answers.password)
    passwords.try_at("sh", "a", lambda password: password == PASSWORD)
    assert PASSWORD not in repr(passwords)


def test_a_wrong_password_is_tried_once(keyless):
    nodes, inventory = keyless
    answers = Answers(password="wrong")
    with Connections(inventory, answers) as pool:
        results = fan_out(nodes, lambda node: pool[node])
    assert len(answers.asked) == 1
    reasons = [error.reason for error in results.values()]
    assert all(isinstance(error, NodeUnreachable) for error in results.values())
    assert sum("not tried again" in reason for reason in reasons) == len(nodes) - 1
    assert not any("wrong" in reason.replace("wrongly", "") for reason in reasons)


def test_no_password_is_given(keyless):
    nodes, inventory = keyless
    answers = Answers(password=None)
    with Connections(inventory, answers) as pool:
        results = fan_out(nodes, lambda node: pool[node])
    assert len(answers.asked) == 1
    assert all("no password was given" in error.reason for error in results.values())


def test_without_prompts_a_missing_key_is_an_error(keyless):
    nodes, inventory = keyless
    with pytest.raises(NodeUnreachable, match="needs a password") as caught:
        connect(inventory, nodes[0])
    assert caught.value.hint == "clusterctl init"


# --- ssh_config and jump hosts ------------------------------------------------------------------------


def test_a_jump_host_from_ssh_config(server, own_server, home):
    jump = own_server()
    (home / ".ssh/config").write_text(
        f"Host gpu*\n  HostName 127.0.0.1\n  Port {server.port}\n  User sh\n  ProxyJump jump\n"
        f"Host jump\n  HostName 127.0.0.1\n  Port {jump.port}\n  User sh\n  IdentityFile {jump.key}\n"
    )
    shutil.copy(jump.home("sh") / ".ssh/authorized_keys", server.home("bash") / ".ssh/extra")
    (server.home("sh") / ".ssh/authorized_keys").write_text(
        Path(f"{server.key}.pub").read_text() + Path(f"{jump.key}.pub").read_text()
    )
    nodes = [Node(f"gpu{number}", f"gpu{number}") for number in range(4)]
    inventory = server.inventory(*nodes, key=jump.key)
    with pytest.raises(HostKeyUnknown, match=r"gpu0: jump host 127.0.0.1: its host key .* is not pinned"):
        connect(inventory, nodes[0])
    with inventory.ssh.known_hosts.open("a") as file:
        file.write(jump.known_hosts())
    with Connections(inventory) as pool:
        assert set(fan_out(nodes, lambda node: pool[node].run("echo hi").out).values()) == {"hi\n"}
        wait_until(lambda: jump.connections() == 1, "one connection to the jump host", 30)
        jump.close()
        with pytest.raises(NodeUnreachable):
            pool[nodes[0]].run("true")
    with pytest.raises(NodeUnreachable, match=f"gpu3: jump host 127.0.0.1: 127.0.0.1 port {jump.port} refuses"):
        connect(inventory, nodes[3])
    pinned = inventory.ssh.known_hosts
    pinned.write_text(pinned.read_text().replace(f":{jump.port} ", f":{jump.port + 1} ") + _another_key(jump, server))
    jump.start()
    with pytest.raises(HostKeyChanged, match=r"gpu0: jump host 127.0.0.1: its host key has changed"):
        connect(inventory, nodes[0])


def _another_key(server, other):
    """A line of known_hosts that has another server's key under this one's name."""
    return other.known_hosts().replace(f":{other.port}", f":{server.port}")


def test_an_ssh_config_that_cannot_be_read(server, home):
    (home / ".ssh/config").write_text("this is = = no\nconfig\n")
    node = server.node("sh")
    with pytest.raises(UsageError, match="config"):
        connect(server.inventory(node), node)


# --- many nodes ---------------------------------------------------------------------------------------


def test_a_pool_connects_once_and_again_after_a_cut(own_server):
    server = own_server()
    node = server.node("sh")
    with Connections(server.inventory(node)) as pool:
        first = pool[node]
        assert pool[node] is first
        server.cut()
        with pytest.raises(NodeUnreachable):
            first.run("true")
        assert pool[node] is not first
        assert pool[node].run("echo hi").out == "hi\n"


def test_closing_a_pool_ends_running_scripts(server, tmp_path):
    node = server.node("sh")
    pid = tmp_path / "pid"
    started = threading.Event()
    errors = []
    with Connections(server.inventory(node)) as pool:

        def work():
            try:
                pool[node].run(f"echo $$ >{quote(pid)}; echo go; sleep 60", on_line=lambda _line: started.set())
            except ClusterctlError as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        assert started.wait(60)
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(errors[0], NodeUnreachable)
    assert gone(int(pid.read_text()))
    with pytest.raises(NodeUnreachable, match="ending"):
        pool[node]


def test_a_pool_exposes_its_inventory(server):
    node = server.node("sh")
    assert Connections(server.inventory(node)).inventory.nodes == (node,)


def gone(pid):
    """Whether a process ends, which would otherwise run for ten minutes."""
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > until:
            return False
        threading.Event().wait(0.02)
    return True


def fingerprint(key):
    return subprocess.run(
        ["ssh-keygen", "-lf", f"{key}.pub"], capture_output=True, text=True, check=True
    ).stdout.split()[1]


def pump(source, target):
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def test_an_ipv6_address_and_port_have_a_name_in_known_hosts(tmp_path):
    file = tmp_path / "k"
    file.write_text("[fe80::1]:2222 ssh-ed25519 AAAA\n")
    assert [key.kind for key in look_up("[fe80::1]:2222", [file])] == ["ssh-ed25519"]
    assert Ssh().timeout == 10
    assert InterruptedByUser.exit_code == 130
