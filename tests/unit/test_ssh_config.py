"""An ssh_config that is odd or hostile: an error line, nothing run that ssh would not run, and jump hosts by name."""

from __future__ import annotations

import gc
import os
import re
import socket
import threading
from contextlib import contextmanager
from pathlib import PurePosixPath

import pytest

from provision.errors import UsageError
from provision.model import Inventory, Node, Ssh
from provision.ssh import session as sessions
from provision.ssh.remote import Connections, NodeUnreachable, fan_out
from provision.ssh.session import Session

NODE = Node("gpu01", "gpu01")


@pytest.fixture
def closed():
    """A port where nothing listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Tries to connect with an ssh_config; the error."""
    (tmp_path / ".ssh").mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/sh")
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)

    def attempt(config, node=NODE, timeout=5.0):
        (tmp_path / ".ssh/config").write_bytes(config if isinstance(config, bytes) else config.encode())
        ssh = Ssh(known_hosts=tmp_path / "known_hosts", timeout=timeout)
        inventory = Inventory(tmp_path / "inventory.yaml", PurePosixPath("/opt/env"), (node,), ssh)
        with pytest.raises((NodeUnreachable, UsageError)) as caught:
            Session(inventory, None).connect(node)
        return caught.value

    return attempt


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("Host *\n  Port abc\n", "~/.ssh/config cannot be used for gpu01: .*'abc'"),
        ("Host *\n  Port 999999\n  HostName 127.0.0.1\n", "port"),
        ("Host *\n  ForwardAgent maybe\n", "~/.ssh/config cannot be used for gpu01: maybe is missing"),
        ("CanonicalizeHostname yes\n", "~/.ssh/config cannot be used for gpu01: canonicaldomains is missing"),
        ("CanonicalizeMaxDots x\n", "~/.ssh/config cannot be used for gpu01"),
        ("Host gpu01\n  ProxyJump a\nHost a\n  ProxyJump b\nHost b\n  ProxyJump a\n", "its jump hosts form a loop"),
        ("Host *\n  ProxyJump a:x\n", "~/.ssh/config cannot be used for gpu01"),
        ("Match host\n", "~/.ssh/config cannot be read"),
        ('Match host "gpu\n', "~/.ssh/config cannot be read"),
        ('Host "gpu\n', "~/.ssh/config cannot be read"),
        ("gibberish\n", "~/.ssh/config cannot be read"),
        (b"Host \xff\xfe\n", "~/.ssh/config cannot be read"),
        ("Host *\n  ProxyCommand sh -c 'unclosed\n", "its ProxyCommand ended with status"),
        ('Host *\n  ProxyCommand "/no such/program" %h\n', "its ProxyCommand ended with status 127"),
        ("Host *\n  ProxyCommand sh -c 'echo why >&2; exit 3' 2>&1 | cat >&2\n", "its ProxyCommand ended .*: why"),
        ("Include ~/.ssh/config\nHost *\n  Port abc\n", "~/.ssh/config cannot be used for gpu01"),
    ],
)
def test_an_odd_ssh_config_is_an_error_line(attempt, config, message):
    error = attempt(config)
    assert re.search(message, str(error))
    assert "Traceback" not in str(error)
    assert len(str(error)) < 500


def test_a_proxy_that_fails_is_not_waited_for(attempt):
    """paramiko's own reads on at its end until the time is up, with one core."""
    before = os.times()
    error = attempt("Host *\n  ProxyCommand false\n", timeout=60.0)
    after = os.times()
    assert "its ProxyCommand ended with status 1" in error.reason
    assert error.hint == "try it by hand: ssh -v gpu01"
    assert after.elapsed - before.elapsed < 30


@pytest.mark.parametrize(
    "match",
    [
        "Match tagged x exec",  # ssh: only with this tag
        "Match localnetwork 203.0.113.0/24 exec",
        "Match nonsense x exec",  # ssh refuses the whole file
        "Match host other exec",
        "Match HOST other EXEC",
        "Match final host other exec",
        "Match canonical exec",
    ],
)
def test_commands_that_ssh_would_not_run_are_not_run(attempt, tmp_path, match, closed):
    flag = tmp_path / "ran"
    attempt(f'{match} "touch {flag}"\n  User x\nHost *\n  HostName 127.0.0.1\n  Port {closed}\n')
    assert not flag.exists()


def test_a_second_node_uses_the_same_configuration(tmp_path, monkeypatch):
    """Fabric reads the files again for every copy of its settings, and would apply what was dropped before."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir(mode=0o700)
    flag = tmp_path / "ran"
    (tmp_path / ".ssh/config").write_text(
        f'Match tagged x exec "touch {flag}"\n  User x\n'
        "Host gpu01\n  IdentityFile /keys/one\nHost gpu02\n  IdentityFile /keys/two\n"
    )
    nodes = (NODE, Node("gpu02", "gpu02"), Node("gpu03", "gpu03"))
    opened = []
    monkeypatch.setattr(sessions.Session, "open_connection", lambda _self, connection, _node: opened.append(connection))
    session = Session(Inventory(tmp_path / "inventory.yaml", PurePosixPath("/opt/env"), nodes), None)
    for node in nodes:
        session.connect(node)
    keys = [connection.connect_kwargs["key_filename"] for connection in opened]
    assert keys == [["/keys/one"], ["/keys/two"], []]
    assert not flag.exists()


# invoke, which runs what Match names, leaves its pipes to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_commands_that_ssh_would_run_are_run(attempt, tmp_path, closed):
    flag, proxy = tmp_path / "ran", tmp_path / "proxy"
    attempt(f'Match host gpu01 EXEC "touch {flag}"\n  Port {closed}\n  HostName 127.0.0.1\n')
    assert flag.exists()
    # With quotes, a redirection and the tokens of a host: a line of shell, as for ssh.
    attempt(f'Host gpu01\n  HostName h\n  Port 77\n  ProxyCommand "echo" "%h  %p" >{proxy}; false\n')
    assert proxy.read_text() == "h  77\n"
    gc.collect()


def test_a_large_ssh_config_is_read(attempt, closed):
    many = "".join(f"Host other{number}\n  HostName 10.0.0.1\n  User u{number}\n" for number in range(22_000))
    assert len(many) > 1_000_000
    error = attempt(f"{many}Host gpu01\n  HostName 127.0.0.1\n  Port {closed}\n")
    assert error.reason == f"127.0.0.1 port {closed} refuses connections"


def test_no_jump_host_is_none(attempt, closed):
    config = f"Host gpu01\n  ProxyJump none\nHost *\n  HostName 127.0.0.1\n  Port {closed}\n  ProxyJump bastion\n"
    assert attempt(config).reason == f"127.0.0.1 port {closed} refuses connections"


def test_several_jump_hosts_are_used_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir(mode=0o700)
    (tmp_path / ".ssh/config").write_text("Host gpu*\n  ProxyJump one,two\nHost one two\n  ProxyJump none\n")
    inventory = Inventory(tmp_path / "inventory.yaml", PurePosixPath("/opt/env"), (NODE,))
    opened = []
    monkeypatch.setattr(sessions.Session, "open_connection", lambda _self, connection, _node: opened.append(connection))
    Session(inventory, None).connect(NODE)
    (last,) = opened
    assert [last.host, last.gateway.host, last.gateway.gateway.host] == ["gpu01", "two", "one"]
    assert last.gateway.gateway.gateway is None


def test_a_jump_host_that_refuses_is_named(attempt, closed):
    config = f"Host gpu*\n  ProxyJump bastion\nHost bastion\n  HostName 127.0.0.1\n  Port {closed}\n"
    error = attempt(config)
    assert str(error) == f"gpu01: jump host 127.0.0.1: 127.0.0.1 port {closed} refuses connections"


@contextmanager
def listener(answer):
    """Answers every connection, and counts them."""
    count = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            while True:
                try:
                    sock, _ = server.accept()
                except OSError:
                    return
                count.append(1)
                with sock:
                    sock.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1], count
        server.shutdown(socket.SHUT_RDWR)


def test_a_jump_host_that_fails_is_tried_once_for_all_nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(sessions, "ATTEMPTS", 1)
    (tmp_path / ".ssh").mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(tmp_path))
    with listener(b"SSH-2.0-x\r\nthis is no packet of ssh, whatever it says, and far longer than one may be") as (
        port,
        count,
    ):
        (tmp_path / ".ssh/config").write_text(
            f"Host gpu*\n  ProxyJump bastion\nHost bastion\n  HostName 127.0.0.1\n  Port {port}\n"
        )
        nodes = tuple(Node(f"gpu{number:02}", f"gpu{number:02}") for number in range(8))
        inventory = Inventory(
            tmp_path / "inventory.yaml", PurePosixPath("/opt/env"), nodes, Ssh(known_hosts=tmp_path / "k", timeout=5)
        )
        with Connections(inventory) as pool:
            errors = fan_out(nodes, lambda node: pool[node])
    assert len(count) == 1
    assert all(error.reason.startswith("jump host 127.0.0.1: ") for error in errors.values()), errors
    assert len({error.reason for error in errors.values()}) == 1
    assert {error.node for error in errors.values()} == {node.name for node in nodes}
