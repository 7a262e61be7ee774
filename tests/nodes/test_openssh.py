"""The system's ssh as the way for many bytes, against a private sshd."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest
from local_sshd import LocalSshd

from provision.model import Node
from provision.ssh.openssh import OpenSshRemote, bulk, ssh_argv
from provision.ssh.remote import Connections, DeadlineExceeded

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


def test_a_script_that_takes_no_more_ends_the_stream(way):
    result = way.run("head -c 10 | wc -c; exit 3", stdin=(BLOCK for _ in range(500)))
    assert (result.rc, result.out.strip()) == (3, "10")


def test_the_deadline_ends_a_stream_that_nobody_reads(way):
    with pytest.raises(DeadlineExceeded):
        way.run("sleep 100", stdin=(BLOCK for _ in range(500)), deadline=1)


def test_what_the_source_raises_breaks_the_stream_off(way):
    def source():
        yield BLOCK
        raise RuntimeError("the source is damaged")

    with pytest.raises(RuntimeError, match="damaged"):
        way.run("cat >/dev/null; sleep 100", stdin=source())


def test_the_system_s_ssh_is_used_where_a_key_is_enough(way, server, monkeypatch):
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
