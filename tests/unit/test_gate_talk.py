"""The gate's talk with real agents on this machine: each listens, all connect, and then every port is free again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from provision.checks.kit.measures import heard, offset
from provision.model import LOCAL, Inventory, Node
from provision.run.readiness import parse_content as parse
from provision.session import Session
from provision.ssh.local import LocalRemote
from provision.tasks.measures.talk import talk, talk_script

AGENT = Path(__file__).parents[2] / "trainer" / "agent"
PYTHON = os.environ.get("AGENT_PYTHON", sys.executable)  # to try the agent under an older Python
NODES = tuple(Node(f"node0{number}", LOCAL, f"127.0.0.1{number}") for number in (1, 2, 3))


class Here:
    """In place of connections: every node is this machine."""

    def __init__(self):
        self.remotes = {node.name: LocalRemote(node) for node in NODES}

    def __getitem__(self, node):
        return self.remotes[node.name]


@pytest.fixture
def here():
    found = Here()
    yield found
    for remote in found.remotes.values():
        remote.close()


def session(here):
    return Session(Inventory(None, None, NODES), connections=here)


@pytest.fixture
def script(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(PYTHON)
    (tmp_path / "agent").symlink_to(AGENT)
    return lambda *paths: talk_script(str(tmp_path), str(tmp_path), 1.0, paths)


def free_ports(number):
    """Ports without a listener."""
    sockets = [socket.create_server(("", 0)) for _ in range(number)]
    found = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return found


def test_all_reach_all(here, script):
    ports = free_ports(2)
    talked = talk(session(here), NODES, script("/nowhere"), patience=1, ports=ports)
    for node in NODES:
        message = heard(talked.ports[node.name])
        assert message.own == node.data_address
        assert {one.state for one in message.tried} == {"open"}
        assert len([one for one in message.tried if one.kind == "random"]) == 4  # two ports of each of two others
        if node is NODES[0]:
            assert message.master == "open"
        else:
            assert [message.to("node01", kind).port for kind in ("master", "link")] == ports
        assert abs(offset(talked.clock[node.name]).seconds) < 1
        assert parse(talked.content[node.name])["/nowhere"].state == "missing"
    for port in ports:  # the run starts a moment later
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            sock.listen(1)


def test_port_in_use_and_port_with_another_service(here, script):
    with socket.create_server(("", 0)) as other:
        (free,) = free_ports(1)
        talked = talk(session(here), NODES[:2], script(), patience=1, ports=[other.getsockname()[1], free])
    assert heard(talked.ports["node01"]).master == "busy"
    assert heard(talked.ports["node02"]).to("node01", "master") is None
    assert heard(talked.ports["node02"]).to("node01", "link").state == "open"


def test_an_address_that_leads_elsewhere(here, script):
    nodes = (NODES[0], replace(NODES[1], data_address="nowhere.invalid"))
    talked = talk(session(here), nodes, script(), patience=1, ports=free_ports(1))
    assert {one.state for one in heard(talked.ports["node01"]).tried} == {"unreachable"}
    assert {one.state for one in heard(talked.ports["node02"]).tried} == {"open"}


def test_single_node_is_asked_for_content_only(here, script, tmp_path):
    talked = talk(session(here), NODES[:1], script(str(tmp_path)), patience=1, ports=[])
    assert parse(talked.content["node01"])[str(tmp_path)].state == "folder"
    assert not talked.ports
    assert not talked.clock


def test_agent_that_does_not_start_is_reported_and_the_others_continue(here, script):
    here.remotes["node02"] = Broken(NODES[1])
    talked = talk(session(here), NODES, script(), patience=1, ports=free_ports(1))
    assert "no such agent" in heard(talked.ports["node02"]).problem
    assert offset(talked.clock["node02"]) is None
    assert {one.state for one in heard(talked.ports["node03"]).tried} == {"open"}


class Broken(LocalRemote):
    """A node on which the script ends at once."""

    def run(self, _script, **other):
        return super().run("echo 'no such agent' >&2; exit 1", **other)


# --- the agent alone -----------------------------------------------------------------------------


def ask(*lines):
    argv = [PYTHON, "-IB", AGENT, "talk"]
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_states_of_connections():
    (closed,) = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        silent = mute.getsockname()[1]
        message = ask(
            "listen 0123 it 127.0.0.1 0",
            f"connect 0.5 a master 127.0.0.1 {closed} b link 127.0.0.1 {silent} c random nowhere.invalid 1",
        )
    assert message[0] == "self 127.0.0.1"
    assert message[2] == "ready"
    assert message[3:] == [
        f"tried a master {closed} refused",
        f"tried b link {silent} foreign",
        "tried c random 1 unreachable nowhere.invalid has no address here",
        "done",
    ]
