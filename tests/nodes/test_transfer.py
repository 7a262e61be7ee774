"""One stream to many nodes, over real ssh: whole, bounded in memory, and broken off cleanly."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from local_sshd import LocalSshd

from provision.errors import BundleError
from provision.model import Node, Result
from provision.render import quote
from provision.ssh.remote import Connections, DeadlineExceeded, NodeUnreachable
from provision.ssh.transfer import BLOCKS_AHEAD, OpenSshRemote, broadcast, bulk, ssh_argv

needs_sshd = [
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
def remotes(request, server):
    """Makes the ways to some nodes."""
    pools = []

    def make(*names):
        nodes = [server.node("sh", name) for name in names]
        inventory = server.inventory(*nodes)
        pools.append(pool := Connections(inventory))
        ways = {node.name: pool[node] for node in nodes}
        if request.param == "paramiko":
            return ways
        return {node.name: bulk(inventory, node, ways[node.name]) for node in nodes}

    yield make
    for pool in pools:
        pool.close()


pytestmark = needs_sshd


def everywhere(script, ways):
    return dict.fromkeys(ways, script)


def nothing(_size):
    """No progress is shown."""


def test_every_node_gets_every_byte(remotes):
    ways = remotes("a", "b", "c")
    sizes = []
    results = broadcast(ways, everywhere("sha256sum", ways), (BLOCK for _ in range(50)), on_bytes=sizes.append)
    expected = hashlib.sha256(BLOCK * 50).hexdigest()
    assert {name: result.out.split()[0] for name, result in results.items()} == dict.fromkeys("abc", expected)
    assert sum(sizes) == 50 << 20


def test_the_system_s_ssh_is_used_where_a_key_is_enough(remotes, server, monkeypatch):
    (way,) = remotes("a").values()
    inventory = server.inventory(way.node)
    if not isinstance(way, OpenSshRemote):
        assert isinstance(bulk(inventory, way.node, way), OpenSshRemote)
        monkeypatch.setattr(shutil, "which", lambda _name: None)
        assert bulk(inventory, way.node, way) is way


def test_a_node_that_fails_early_stops_no_other(remotes):
    ways = remotes("a", "b")
    scripts = {"a": "head -c 100 >/dev/null; echo full >&2; exit 28", "b": "wc -c"}
    results = broadcast(ways, scripts, (BLOCK for _ in range(40)), on_bytes=nothing)
    assert (results["a"].rc, results["a"].err) == (28, "full\n")
    assert int(results["b"].out) == 40 << 20


def test_when_every_node_has_failed_nothing_more_is_read(remotes):
    ways = remotes("a", "b")
    read = 0

    def endless():
        nonlocal read
        while True:
            read += 1
            yield BLOCK

    results = broadcast(ways, everywhere("exit 3", ways), endless(), on_bytes=nothing)
    assert [result.rc for result in results.values()] == [3, 3]
    assert read < 1000


def test_a_node_that_takes_nothing_is_left_behind(remotes):
    ways = remotes("a", "b")
    scripts = {"a": "sleep 60", "b": "wc -c"}
    began = time.monotonic()
    results = broadcast(ways, scripts, (BLOCK for _ in range(60)), on_bytes=nothing, stall=1.5)
    assert time.monotonic() - began < 20
    assert isinstance(results["a"], NodeUnreachable)
    assert "took no data" in results["a"].reason
    assert int(results["b"].out) == 60 << 20


def test_a_damaged_source_breaks_every_stream_off(remotes, tmp_path):
    ways = remotes("a", "b")

    def damaged():
        for _ in range(5):
            yield BLOCK
        raise BundleError("chunk 5 is damaged")

    scripts = {name: f"cat >/dev/null; touch {quote(tmp_path / name)}" for name in ways}
    with pytest.raises(BundleError, match="chunk 5"):
        broadcast(ways, scripts, damaged(), on_bytes=nothing)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_source_while_a_node_is_stuck(remotes, tmp_path):
    ways = remotes("a", "b")
    begun = threading.Event()

    def damaged():
        yield BLOCK
        begun.set()
        raise BundleError("damaged")

    began = time.monotonic()
    with pytest.raises(BundleError):
        broadcast(ways, {"a": "sleep 60", "b": f"cat; touch {quote(tmp_path / 'b')}"}, damaged(), on_bytes=nothing)
    assert time.monotonic() - began < 20
    assert not (tmp_path / "b").exists()


def test_an_interruption_breaks_every_stream_off(remotes, tmp_path):
    ways = remotes("a")

    def interrupt(_size):
        raise KeyboardInterrupt

    script = f"cat >/dev/null; touch {quote(tmp_path / 'a')}"
    with pytest.raises(KeyboardInterrupt):
        broadcast(ways, {"a": script}, [BLOCK] * 5, on_bytes=interrupt)
    assert not (tmp_path / "a").exists()


def test_the_deadline_is_each_node_s_own(remotes):
    ways = remotes("a", "b")
    results = broadcast(
        ways, {"a": "cat >/dev/null; sleep 60", "b": "wc -c"}, [BLOCK] * 3, on_bytes=nothing, deadline=3
    )
    assert isinstance(results["a"], DeadlineExceeded)
    assert int(results["b"].out) == 3 << 20


class Slow:
    """A remote that takes one block whenever it is told to."""

    def __init__(self, name):
        self.node = Node(name, "")
        self.go = threading.Semaphore(0)
        self.taken = 0

    def run(self, _script, *, stdin=(), on_line=None, deadline=None):
        for _ in stdin:
            self.taken += 1
            assert self.go.acquire(timeout=20)
        return Result(0, "")

    def close(self):
        pass


def test_memory_is_bounded_by_the_slowest_node():
    slow, quick = Slow("slow"), Slow("quick")
    quick.go = threading.Semaphore(1000)
    read = 0
    most = 0

    def blocks():
        nonlocal read, most
        for _ in range(50):
            read += 1
            most = max(most, read - slow.taken)
            yield b"x"
            slow.go.release()

    broadcast({"slow": slow, "quick": quick}, {"slow": "", "quick": ""}, blocks(), on_bytes=nothing)
    assert (slow.taken, quick.taken) == (50, 50)
    assert most <= BLOCKS_AHEAD + 2


def test_a_mistake_in_the_program_is_raised():
    class Broken(Slow):
        def run(self, _script, **_options):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broadcast({"a": Broken("a")}, {"a": ""}, [b"x"], on_bytes=nothing)


def test_the_arguments_of_ssh(server):
    node = Node("a", "-oProxyCommand=evil", user="u", port=7)
    argv = ssh_argv(server.inventory(node), node)
    assert argv[-2:] == ["--", "-oProxyCommand=evil"]
    assert "BatchMode=yes" in argv
    assert "StrictHostKeyChecking=yes" in argv
