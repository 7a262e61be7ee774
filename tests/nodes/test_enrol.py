"""clusterctl init against a real sshd: nodes that only accept a password accept a key afterwards."""

from __future__ import annotations

import os
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from local_sshd import PASSWORD, LocalSshd, make_key

from provision.errors import UsageError
from provision.inventory import load
from provision.model import Notice, StageFinished, ignore
from provision.session import Session
from provision.ssh.enrol import Enrolled, create_key, public_key
from provision.ssh.openssh import OpenSshRemote
from provision.ssh.remote import HostKeyUnknown, NodeUnreachable, connect
from provision.tasks.init import enrol_nodes

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a private sshd with users of its own"),
    pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="openssh-server is not installed"),
]


class Answers:
    def __init__(self, password=PASSWORD):
        self._password = password
        self.asked = []
        self.confirmed = []

    def confirm_host_key(self, node, _key_type, fingerprint):
        self.confirmed.append((node.name, fingerprint))
        return True

    def password(self, user, where):
        self.asked.append((user, where))
        return self._password

    sudo_password = password


@pytest.fixture
def server(tmp_path):
    users = {"one": "/bin/sh", "two": "/bin/bash", "three": "/usr/bin/tcsh"}
    server = LocalSshd(tmp_path / "s", {user: shell for user, shell in users.items() if Path(shell).exists()})
    yield server
    server.close()


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    (folder / ".ssh").mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return folder


def enrol(inventory, nodes, *, prompts=None, emit=ignore):
    """By node, what was done or the error."""
    with Session(inventory, nodes, prompts=prompts, emit=emit) as session:
        outcome = enrol_nodes(session)
    return {node.name: outcome.ok.get(node.name) or outcome.failed[node.name].error for node in nodes}


def fresh(server, nodes, **options):
    """An inventory with a missing key, for nodes that accept none."""
    for user in server.users:
        subprocess.run(["rm", "-rf", server.home(user) / ".ssh"], check=True)
    inventory = server.inventory(*nodes, **options)
    return replace(inventory, ssh=replace(inventory.ssh, key=inventory.path.parent / "the key"))


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_key_is_created_and_installed_and_the_second_run_asks_nothing(server):
    nodes = [server.node(user) for user in server.users]
    inventory = fresh(server, nodes, known=False)
    answers, events = Answers(), []
    results = enrol(inventory, nodes, prompts=answers, emit=events.append)
    assert results == {node.name: Enrolled(node.name, "key installed") for node in nodes}
    assert len(answers.confirmed) == 1  # one sshd, one host key
    assert sorted({user for user, _ in answers.asked}) == sorted(server.users)
    assert mode(inventory.ssh.key) == 0o600
    assert any(isinstance(event, Notice) and "created" in event.text for event in events)
    assert events[-1].states == dict.fromkeys(results, "key installed")
    assert isinstance(events[-1], StageFinished)
    for user in server.users:
        ssh = server.home(user) / ".ssh"
        assert (mode(ssh), mode(ssh / "authorized_keys")) == (0o700, 0o600)
        assert (ssh / "authorized_keys").read_text() == public_key(inventory) + "\n"
        assert sorted(path.name for path in ssh.iterdir()) == ["authorized_keys"]
    for node in nodes:
        connect(inventory, node).close()

    before = [(server.home(user) / ".ssh/authorized_keys").stat() for user in server.users]
    again = Answers()
    assert enrol(inventory, nodes, prompts=again) == {node.name: Enrolled(node.name, "ready") for node in nodes}
    assert (again.asked, again.confirmed) == ([], [])
    assert [(server.home(user) / ".ssh/authorized_keys").stat() for user in server.users] == before


def test_existing_lines_in_authorized_keys_stay(server):
    node = server.node("one")
    inventory = fresh(server, [node])
    create_key(inventory.ssh.key)
    ssh = server.home("one") / ".ssh"
    ssh.mkdir(mode=0o777)
    blob = public_key(inventory).split()[1]
    old = f"# ssh-ed25519 {blob} switched off\nssh-ed25519 AAAAother somebody"  # no newline at the end
    (ssh / "authorized_keys").write_text(old)
    assert enrol(inventory, [node], prompts=Answers())["one"] == Enrolled("one", "key installed")
    assert (ssh / "authorized_keys").read_text() == old + "\n" + public_key(inventory) + "\n"


def test_home_shared_by_many_nodes(server):
    nodes = [server.node("one", f"n{number}") for number in range(8)]
    inventory = fresh(server, nodes)
    answers = Answers()
    results = enrol(inventory, nodes, prompts=answers)
    assert {result.state for result in results.values()} <= {"key installed", "ready"}
    assert len(answers.asked) == 1
    assert (server.home("one") / ".ssh/authorized_keys").read_text().count(public_key(inventory)) == 1


def test_nodes_that_fail_stop_no_other(server):
    good, unknown = server.node("one"), server.node("nobody-here", "stranger")
    inventory = fresh(server, [good, unknown])
    results = enrol(inventory, [unknown, good], prompts=Answers())
    assert list(results) == ["stranger", "one"]
    assert isinstance(results["stranger"], NodeUnreachable)
    assert results["one"] == Enrolled("one", "key installed")


def test_without_prompts_a_missing_key_is_an_error(server):
    node = server.node("one")
    assert isinstance(enrol(fresh(server, [node], known=False), [node])["one"], HostKeyUnknown)
    error = enrol(fresh(server, [node]), [node])["one"]
    assert isinstance(error, NodeUnreachable)
    assert "needs a password" in error.reason


def test_node_with_another_authorized_keys_file(tmp_path):
    server = LocalSshd(tmp_path / "s", {"one": "/bin/sh"}, options="AuthorizedKeysFile /nowhere/%u\n")
    try:
        node = server.node("one")
        error = enrol(fresh(server, [node]), [node], prompts=Answers())["one"]
        assert "was installed, but" in error.reason
        assert "AuthorizedKeysFile" in error.hint
    finally:
        server.close()


def test_an_authorized_keys_that_cannot_be_written(server):
    node = server.node("one")
    inventory = fresh(server, [node])
    (server.home("one") / ".ssh").write_text("a file, not a folder")
    error = enrol(inventory, [node], prompts=Answers())["one"]
    assert "authorized_keys cannot be written" in error.reason
    assert ".ssh" in error.reason


def test_the_default_key_is_used(server, home):
    node = server.node("one")
    inventory = fresh(server, [node])
    inventory = replace(inventory, ssh=replace(inventory.ssh, key=None))
    error = enrol(inventory, [node], prompts=Answers())["one"]
    assert isinstance(error, UsageError)
    assert "clusterctl_key" in error.hint
    make_key(home / ".ssh/id_ed25519")
    assert enrol(inventory, [node], prompts=Answers())["one"] == Enrolled("one", "key installed")


def test_missing_public_key_is_computed(tmp_path, server):
    inventory = server.inventory(key=make_key(tmp_path / "key"))
    expected = (tmp_path / "key.pub").read_text().split()[:2]
    (tmp_path / "key.pub").unlink()
    assert public_key(inventory).split() == expected
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", tmp_path / "key"], check=True)
    with pytest.raises(UsageError) as caught:
        public_key(inventory)
    assert "ssh-keygen -y" in caught.value.hint


def test_openssh_reads_a_created_key(tmp_path):
    path = tmp_path / "new folder/key"
    assert create_key(path)
    assert not create_key(path)
    done = subprocess.run(["ssh-keygen", "-y", "-f", path], capture_output=True, text=True, check=True)
    assert done.stdout.split()[:2] == Path(f"{path}.pub").read_text().split()[:2]


def test_nodes_written_as_user_at_host_and_port(server, tmp_path):
    """One host key is pinned under the name that OpenSSH gives the host and the port, and both ssh clients find it."""
    first, second, *_ = server.users
    path = tmp_path / "cluster/inventory.yaml"
    path.parent.mkdir()
    path.write_text(
        f"prefix: /opt/env\nssh: {{key: {server.key}}}\n"
        f"nodes:\n  a: {first}@127.0.0.1:{server.port}\n  b: {{address: 'localhost:{server.port}', user: {second}}}\n"
    )
    inventory = load(path)
    assert enrol(inventory, inventory.nodes, prompts=Answers()) == {
        name: Enrolled(name, "ready") for name in ("a", "b")
    }
    pinned = (path.parent / "known_hosts").read_text().splitlines()
    assert sorted(line.split()[0] for line in pinned) == [
        f"[127.0.0.1]:{server.port}",
        f"[localhost]:{server.port}",
    ]
    for node in inventory.nodes:
        assert OpenSshRemote(inventory, node).run("echo here").out == "here\n"
