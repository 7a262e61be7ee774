"""The system's ssh as the way for many bytes, against a private sshd."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from local_sshd import PASSWORD, LocalSshd, make_key

from provision.model import Node
from provision.ssh.openssh import OpenSshRemote, bulk, ssh_argv
from provision.ssh.remote import Connections, DeadlineExceeded, NodeUnreachable

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a private sshd with users of its own"),
    pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="openssh-server is not installed"),
]
BLOCK = os.urandom(1 << 20)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = LocalSshd(tmp_path_factory.mktemp("sshd") / "s", {"sh": "/bin/sh"})
    yield server
    server.close()


@pytest.fixture(params=["paramiko", "openssh"])
def way(request, server):
    """One way to a node, over either implementation."""
    node = server.node("sh", "a")
    inventory = server.inventory(node)
    with Connections(inventory) as pool:
        yield pool[node] if request.param == "paramiko" else bulk(inventory, node, pool[node])


def test_every_byte_arrives(way):
    result = way.run("sha256sum", stdin=(BLOCK for _ in range(50)))
    assert result.out.split()[0] == hashlib.sha256(BLOCK * 50).hexdigest()


def test_a_script_that_stops_reading_ends_the_stream(way):
    result = way.run("head -c 10 | wc -c; exit 3", stdin=(BLOCK for _ in range(500)))
    assert (result.rc, result.out.strip()) == (3, "10")


def test_deadline_aborts_a_stream_without_reader(way):
    with pytest.raises(DeadlineExceeded):
        way.run("sleep 100", stdin=(BLOCK for _ in range(500)), deadline=1)


def test_an_error_of_the_source_aborts_the_stream(way):
    def source():
        yield BLOCK
        raise RuntimeError("the source is damaged")

    with pytest.raises(RuntimeError, match="damaged"):
        way.run("cat >/dev/null; sleep 100", stdin=source())


def test_system_ssh_is_used_if_a_key_is_enough(way, server, monkeypatch):
    inventory = server.inventory(way.node)
    if not isinstance(way, OpenSshRemote):
        assert isinstance(bulk(inventory, way.node, way), OpenSshRemote)
        monkeypatch.setattr(shutil, "which", lambda _name: None)
        assert bulk(inventory, way.node, way) is way


def test_the_arguments_of_ssh(server):
    node = Node("a", "-oProxyCommand=evil", user="u", port=7)
    argv = ssh_argv(server.inventory(node), node)
    assert argv[-2:] == ["--", "-oProxyCommand=evil"]
    assert "BatchMode=yes" in argv
    assert "StrictHostKeyChecking=yes" in argv


def test_an_ssh_without_an_option_still_works(server, tmp_path):
    """RemoteCommand came with OpenSSH 7.6. There is no older client here: the option gets an unknown name."""
    argv = ssh_argv(server.inventory(server.node("sh", "a")), server.node("sh", "a"))
    options = [word.partition("=")[0] for before, word in itertools.pairwise(argv) if before == "-o"]
    assert options.index("IgnoreUnknown") < options.index("RemoteCommand")
    # The user's file may have options that only another ssh knows, after an IgnoreUnknown.
    config = tmp_path / "config"
    config.write_text("IgnoreUnknown UseKeychain\nUseKeychain yes\nRemoteCommand echo never\n")
    unknown = [word.replace("RemoteCommand=", "NoRemoteCommand=") for word in argv]
    for each in (argv, unknown):
        done = subprocess.run([each[0], "-F", config, "-G", *each[1:]], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert ("echo never" in done.stdout) == (each is unknown)


def test_a_key_that_others_may_read_is_refused_at_the_first_login(server, tmp_path, monkeypatch):
    """The system's ssh refuses it when the bytes are to be sent; then it is late, and the reason is hard to find."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    key = tmp_path / "a key"
    shutil.copy(server.key, key)
    node = server.node("sh", "a")
    inventory = server.inventory(node, key=key)
    for mode in (0o644, 0o640, 0o601):
        key.chmod(mode)
        with Connections(inventory, Refusing()) as pool, pytest.raises(NodeUnreachable) as refused:
            pool[node].run(":")
        assert f"other users may read {key}" in refused.value.reason
        assert refused.value.hint == f"chmod 600 '{key}'"
    key.chmod(0o600)
    with Connections(inventory) as pool:
        assert bulk(inventory, node, pool[node]).run("echo hi").out == "hi\n"


class Refusing:
    """A user with a password is not asked for it if the key must be fixed."""

    def confirm_host_key(self, *_about):
        return True

    def password(self, *_about):
        raise AssertionError("a password was asked for")

    sudo_password = password


def test_key_of_another_user_may_have_any_mode(server, tmp_path):
    """As on a USB stick mounted by root: ssh accepts it too."""
    key = tmp_path / "key"
    shutil.copy(server.key, key)
    key.chmod(0o644)
    os.chown(key, 65534, 65534)
    node = server.node("sh", "a")
    inventory = server.inventory(node, key=key)
    with Connections(inventory) as pool:
        way = bulk(inventory, node, pool[node])
        assert isinstance(way, OpenSshRemote)
        assert way.run("echo hi").out == "hi\n"


def test_a_second_connection_can_be_closed_alone(server):
    node = server.node("sh", "a")
    with Connections(server.inventory(node)) as pool:
        first, further = pool[node], pool.open_separate(node)
        assert further.run("echo hi").out == "hi\n"
        further.close()
        assert not further.alive
        assert first.run("echo hi").out == "hi\n"
        forgotten = pool.open_separate(node)
    assert not forgotten.alive


def test_a_further_connection_asks_for_no_password_again(server, tmp_path):
    node = server.node("sh", "a")
    asked = []

    class Answers:
        def password(self, user, _where):
            asked.append(user)
            return PASSWORD

        sudo_password = password

    with Connections(server.inventory(node, key=make_key(tmp_path / "other")), Answers()) as pool:
        assert bulk(pool.inventory, node, pool[node]) is pool[node]
        assert pool.open_separate(node).run("echo hi").out == "hi\n"
    assert asked == ["sh"]
