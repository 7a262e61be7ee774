"""Several jump hosts that lead to the same nodes: ``ssh.jump_hosts``. Each is a real sshd."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import command
import pytest
import yaml
from local_sshd import LocalSshd, children, make_key
from training import wait_until

from provision.model import Node
from provision.ssh.openssh import OpenSshRemote, bulk
from provision.ssh.remote import Connections, HostKeyChanged, HostKeyUnknown, NodeUnreachable, connect, fan_out

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a private sshd and its users"),
    pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="openssh-server is not installed"),
]
COUNT = 8  # nodes


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / ".ssh").mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def servers(tmp_path, home):
    """The nodes' sshd, and three of jump hosts, which all trust one key."""
    key = make_key(tmp_path / "key")
    made = [LocalSshd(tmp_path / name, {"sh": "/bin/sh"}) for name in ("node", "one", "two", "three")]
    for each in made:
        shutil.copy(f"{key}.pub", each.home("sh") / ".ssh/authorized_keys")
    yield made
    for each in made:
        each.close()


@pytest.fixture
def inventory(servers, tmp_path):
    """Eight nodes behind the three jump hosts, with every host key pinned."""
    node, *jumps = servers
    nodes = [node.node("sh", f"gpu{number}") for number in range(COUNT)]
    made = node.inventory(*nodes, key=tmp_path / "key", timeout=5)
    made.ssh.known_hosts.write_text("".join(each.known_hosts() for each in servers))
    hosts = tuple(each.node("sh", name) for each, name in zip(jumps, ("one", "two", "three"), strict=True))
    return replace(made, ssh=replace(made.ssh, jump_hosts=hosts))


def names(pool, inventory):
    """By node, the jump host that leads to it; every node must answer."""

    def one(node):
        assert pool[node].run("echo hi").out == "hi\n"
        return pool[node].jump.name

    return fan_out(inventory.nodes, one)


def test_nodes_are_divided_among_the_jump_hosts_which_need_one_connection_each(inventory, servers):
    warnings = []
    with Connections(inventory, None, warnings.append) as pool:
        found = names(pool, inventory)
        assert list(found.values()) == ["one", "two", "three"] * 2 + ["one", "two"]
        for jump in servers[1:]:
            wait_until(lambda jump=jump: jump.connections() == 1, "one connection to a jump host", 30)
    assert not warnings


def test_a_dead_jump_host_is_routed_around_and_named_once(inventory, servers):
    servers[1].close()
    warnings = []
    with Connections(inventory, None, warnings.append) as pool:
        found = names(pool, inventory)
        assert set(found.values()) == {"two", "three"}
        assert {found["gpu0"], found["gpu3"], found["gpu6"]} == {"two", "three"}  # its nodes are divided
    why = f"jump host one: 127.0.0.1 port {servers[1].port} refuses connections"
    assert warnings == [f"{why}; nodes are reached through the other jump hosts"]


def test_a_jump_host_that_does_not_answer_is_routed_around(inventory, servers):
    stopped = servers[2].process.pid
    os.kill(stopped, signal.SIGSTOP)  # the kernel accepts the connection, and no process reads it
    warnings = []
    inventory = replace(inventory, ssh=replace(inventory.ssh, timeout=1))
    try:
        with Connections(inventory, None, warnings.append) as pool:
            assert set(names(pool, inventory).values()) == {"one", "three"}
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert len(warnings) == 1
    assert "jump host two: no answer from 127.0.0.1" in warnings[0]


def test_a_jump_host_that_hangs_after_it_was_connected_is_routed_around(inventory, servers):
    inventory = replace(inventory, ssh=replace(inventory.ssh, timeout=1))
    warnings = []
    with Connections(inventory, None, warnings.append) as pool:
        assert pool[inventory.nodes[0]].jump.name == "one"
        stopped = children(servers[1].process.pid)
        assert stopped
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            assert {pool[inventory.nodes[number]].jump.name for number in (3, 6)} == {"two", "three"}
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
    assert warnings == ["jump host one no longer answers; nodes are reached through the other jump hosts"]


def test_a_node_that_does_not_answer_is_not_the_jump_hosts_fault(inventory):
    warnings = []
    with contextlib.ExitStack() as sockets:
        full = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        silent = replace(inventory.nodes[0], port=full.getsockname()[1])
        waiting = sockets.enter_context(socket.create_connection(full.getsockname()))  # the kernel drops all others
        assert waiting
        inventory = replace(inventory, ssh=replace(inventory.ssh, timeout=1), nodes=(silent, *inventory.nodes[1:]))
        pool = sockets.enter_context(Connections(inventory, None, warnings.append))
        with pytest.raises(NodeUnreachable, match=r"no answer from .* through the jump host within 1 s"):
            pool[silent]
        assert pool[inventory.nodes[3]].jump.name == "one"
    assert not warnings


def test_a_jump_host_that_dies_is_replaced_at_the_next_use(inventory, servers):
    warnings = []
    with Connections(inventory, None, warnings.append) as pool:
        before = names(pool, inventory)
        servers[1].close()
        first = inventory.nodes[0]
        wait_until(lambda: not pool[first].transport.is_active() or pool[first].jump.name != "one", "the loss", 30)
        after = names(pool, inventory)
        assert "one" not in after.values()
        assert {name for name in before if before[name] != after[name]} == {"gpu0", "gpu3", "gpu6"}
    assert len(warnings) == 1


def test_an_error_names_the_jump_hosts_if_none_can_be_used(inventory, servers):
    for jump in servers[1:]:
        jump.close()
    warnings = []
    with Connections(inventory, None, warnings.append) as pool, pytest.raises(NodeUnreachable) as caught:
        pool[inventory.nodes[1]]
    assert not warnings  # no other one is used instead
    ports = {each.node("sh").port for each in servers[1:]}
    assert caught.value.reason.count("refuses connections") == 3
    assert all(f"port {port} " in caught.value.reason for port in ports)
    assert all(f"jump host {name}: " in caught.value.reason for name in ("one", "two", "three"))


def test_a_node_that_is_down_is_at_fault_after_two_jump_hosts(inventory, servers):
    servers[0].close()
    warnings = []
    with Connections(inventory, None, warnings.append) as pool:
        for result in fan_out(inventory.nodes, lambda node: pool[node]).values():
            assert isinstance(result, NodeUnreachable)
            assert result.reason.startswith("the jump host cannot reach 127.0.0.1 port ")
    assert not warnings


def test_a_jump_host_without_forwarding(inventory, servers, tmp_path):
    servers[1].close()
    config = servers[1].folder / "sshd_config"
    config.write_text("AllowTcpForwarding no\n" + config.read_text())
    servers[1].start()
    with Connections(inventory) as pool:
        assert "one" not in names(pool, inventory).values()
    alone = replace(inventory, ssh=replace(inventory.ssh, jump_hosts=inventory.ssh.jump_hosts[:1]))
    with pytest.raises(NodeUnreachable, match=r"the jump host cannot reach .*rohibited"):
        connect(alone, inventory.nodes[0])


def test_a_jump_host_with_an_unknown_or_changed_key_is_not_routed_around(inventory, servers):
    pinned = inventory.ssh.known_hosts
    known = pinned.read_text()
    pinned.write_text(known.replace(f":{servers[1].port} ", ":1 "))
    with pytest.raises(HostKeyUnknown, match=r"gpu0: jump host one: its host key .* is not pinned"):
        connect(inventory, inventory.nodes[0])
    pinned.write_text(known.replace(servers[1].known_hosts().split()[2], servers[2].known_hosts().split()[2]))
    with pytest.raises(HostKeyChanged, match=r"gpu0: jump host one: its host key has changed"):
        connect(inventory, inventory.nodes[0])
    assert connect(inventory, inventory.nodes[1]).run("echo hi").out == "hi\n"


def test_a_node_that_is_a_jump_host_is_reached_directly(inventory):
    hosts = inventory.ssh.jump_hosts
    with Connections(replace(inventory, nodes=(*inventory.nodes, *hosts))) as pool:
        assert pool[hosts[0]].jump is None
        assert pool[hosts[0]].run("echo hi").out == "hi\n"
        assert pool[inventory.nodes[0]].jump == hosts[0]


def test_jump_hosts_behind_a_jump_host_of_ssh_config(inventory, servers, home):
    _, gate, two, _ = servers
    (home / ".ssh/config").write_text(
        f"Host inner\n  HostName 127.0.0.1\n  Port {two.port}\n  User sh\n  ProxyJump gate\n"
        f"Host gate\n  HostName 127.0.0.1\n  Port {gate.port}\n  User sh\n"
    )
    inventory = replace(inventory, ssh=replace(inventory.ssh, jump_hosts=(Node("inner", "inner"),)))
    with Connections(inventory) as pool:
        assert set(names(pool, inventory).values()) == {"inner"}
        wait_until(lambda: [gate.connections(), two.connections()] == [1, 1], "one connection to each", 30)


def test_the_systems_ssh_takes_the_same_way(inventory, servers):
    """With the keys of jump hosts pinned in the inventory's file only, which ``ssh -J`` would not read."""
    block = os.urandom(1 << 20)
    with Connections(inventory) as pool:
        for node, jump in zip(inventory.nodes[:3], servers[1:], strict=True):
            way = bulk(inventory, node, pool[node])
            assert isinstance(way, OpenSshRemote)
            before = jump.connections()
            seen = []
            way.run(
                "echo started; sha256sum",
                stdin=(block for _ in range(20)),
                on_line=lambda line, jump=jump, seen=seen: seen.append((line, jump.connections())),
            )
            assert seen[0] == ("started", before + 1)
            assert seen[1][0].split()[0] == hashlib.sha256(block * 20).hexdigest()


def test_a_path_with_special_characters_in_the_way_of_the_systems_ssh(inventory, tmp_path):
    folder = tmp_path / "100% 'a' $HOME"
    folder.mkdir()
    for name in ("key", "key.pub"):
        shutil.copy(tmp_path / name, folder / name)
    known = folder / "known_hosts"
    shutil.copy(inventory.ssh.known_hosts, known)
    inventory = replace(inventory, ssh=replace(inventory.ssh, key=folder / "key", known_hosts=known))
    node = inventory.nodes[0]
    assert OpenSshRemote(inventory, node, jump=inventory.ssh.jump_hosts[0]).run("echo hi").out == "hi\n"


def test_init_pins_every_jump_host_and_writes_them(servers, tmp_path, home):
    work = tmp_path / "work"
    work.mkdir()
    for name in ("key", "key.pub"):
        shutil.copy(tmp_path / name, home / f".ssh/id_ed25519{name[3:]}")
    node, one, two, dead = servers
    dead.close()
    jumps = [word for each in (one, two, dead) for word in ("--jump-host", f"sh@127.0.0.1:{each.port}")]
    done = command.run("init", *jumps, "--accept-host-keys", f"gpu01=sh@127.0.0.1:{node.port}", cwd=work)
    assert done.returncode == 0, done.stderr
    assert f"jump host 127.0.0.1:{dead.port}: " in done.stderr
    text = (work / "inventory.yaml").read_text()
    assert f"  jump_hosts:\n  - sh@127.0.0.1:{one.port}\n  - sh@127.0.0.1:{two.port}\n" in text
    known = (work / "known_hosts").read_text()
    assert all(f"[127.0.0.1]:{each.port} " in known for each in (node, one, two))
    one.close()
    done = command.run("run", "--", "echo", "from the node", cwd=work)
    assert done.returncode == 0, done.stderr
    assert "from the node" in done.stdout
    assert f"jump host 127.0.0.1:{one.port}: 127.0.0.1 port {one.port} refuses connections" in done.stderr


# --- a run ----------------------------------------------------------------------------------------------

# Each rank waits for a file on its node between its two lines.
SCRIPT = """\
import os, time
print("before", flush=True)
while not os.path.exists("/var/tmp/go"):
    time.sleep(0.05)
print("after", flush=True)
"""
NODES = ["login1", "login2", "gpu1", "gpu2"]


@pytest.fixture
def hidden(make_sandbox):
    """A sandbox whose gpu nodes this machine has no route to; the login nodes have one."""
    box = make_sandbox(nodes=NODES, rootfs="host")
    for name in NODES[2:]:
        done = box.enter(
            name, ["sh", "-c", "mkdir -p /opt/e/current/bin && ln -s $(command -v python3) /opt/e/current/bin/python"]
        )
        assert done.returncode == 0, done.stderr
    inventory = yaml.safe_load(box.inventory.read_text())
    inventory["prefix"] = "/opt/e/current"
    inventory["ssh"]["jump_hosts"] = "login[1-2]"
    box.inventory.write_text(yaml.safe_dump(inventory))
    routes = [f"{node.address}/32" for node in box.nodes if node.name in NODES[2:]]
    for route in routes:
        subprocess.run(["ip", "route", "add", "unreachable", route], check=True)
    yield box
    for route in routes:
        subprocess.run(["ip", "route", "del", "unreachable", route], check=True)


def test_a_run_goes_on_and_is_followed_when_its_jump_host_loses_its_power(hidden):
    folder = hidden.directory
    (folder / "wait.py").write_text(SCRIPT)
    data = folder / "data"
    data.mkdir()
    (data / "file").write_bytes(os.urandom(20 << 20))
    pushed = command.run("push", data, "/var/tmp/data", "--limit", "gpu*", cwd=folder)
    assert pushed.returncode == 0, pushed.stderr
    digests = {hidden.enter(name, ["sha256sum", "/var/tmp/data/file"]).stdout.split()[0] for name in NODES[2:]}
    assert digests == {hashlib.sha256((data / "file").read_bytes()).hexdigest()}

    words = ["train", "--limit", "gpu*", "--launcher", "plain", "--gpus-per-node", "1", "wait.py"]
    with subprocess.Popen(
        [command.CLUSTERCTL, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as follower:
        shown = []
        while not shown or "before" not in shown[-1]:  # of rank 0, on gpu1
            shown.append(follower.stdout.readline())
            assert shown[-1], "".join(shown)
        hidden.power_off("login1")
        try:
            status = command.run("status", "--limit", "gpu*", cwd=folder)
            assert status.returncode == 0, status.stdout + status.stderr
            assert "jump host login1: " in status.stderr
            assert "login2" not in status.stderr
            for name in NODES[2:]:
                assert hidden.enter(name, ["touch", "/var/tmp/go"]).returncode == 0
            rest, _ = follower.communicate(timeout=90)
        finally:
            follower.kill()
            hidden.power_on("login1")
    output = "".join(shown) + rest
    assert follower.returncode == 0, output
    assert len(re.findall(r"(?m)\bafter$", output)) == 1, output
    assert len(re.findall(r"jump host login1: .*; nodes are reached through the other jump hosts", output)) == 1, output
    hidden.inventory.write_text(hidden.inventory.read_text().replace("  jump_hosts: login[1-2]\n", ""))
    refused = command.run("run", "--limit", "gpu1", "--", "true", cwd=folder)
    assert "there is no route to" in refused.stdout + refused.stderr
