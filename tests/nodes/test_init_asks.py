"""``clusterctl init HOST...`` on nodes that have a second network: what it asks becomes the inventory."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from command import run

from provision import inventory as inventory_file


@pytest.fixture
def box(make_sandbox):
    """Three nodes with a second network, and Docker's bridge, which has the same address everywhere."""
    box = make_sandbox(nodes=["gpu01", "gpu02", "gpu03"])
    for number, node in enumerate(box.state.nodes, 1):
        script = f"""
            ip link add data0 type veth peer name far0
            ip address add 10.201.7.{10 + number}/24 dev data0
            ip link set data0 up
            ip link set far0 up
            ip link add docker0 type bridge
            ip address add 172.29.0.1/16 dev docker0
            ip link set docker0 up
        """
        subprocess.run(["nsenter", f"--net=/proc/{node.init.pid}/ns/net", "sh", "-ec", script], check=True)
    return box


@pytest.fixture
def user(box, tmp_path):
    """A folder without an inventory, and a home with the key that logs in; runs clusterctl there."""
    ssh = tmp_path / "home/.ssh"
    ssh.mkdir(parents=True, mode=0o700)
    shutil.copy(box.key, ssh / "id_ed25519")
    folder = tmp_path / "work"
    folder.mkdir()

    def clusterctl(*argv):
        return run(*argv, cwd=folder, env={"HOME": str(tmp_path / "home"), "SSH_AUTH_SOCK": ""})

    clusterctl.folder = folder
    return clusterctl


def test_the_nodes_are_asked_for_names_and_networks(box, user):
    first = box.nodes[0].address.rpartition(".")[0]
    ends = [int(node.address.rpartition(".")[2]) for node in box.nodes]
    hosts = f"{first}.[{ends[0]}-{ends[-1]}]"
    done = user("init", "--accept-host-keys", "--user", "root", "--prefix", "/srv/llm/current", hosts)
    assert done.returncode == 0, done.stderr
    inventory = user.folder / "inventory.yaml"
    assert inventory.read_text() == (
        "# yaml-language-server: $schema=inventory.schema.json\n"
        "# clusterctl's inventory; inventory.example.yaml shows every key.\n"
        "# gpu[01-03]: no GPU\n"
        "# data_address: 10.201.7.0/24 on data0, 10 Gbit/s\n"
        "prefix: /srv/llm/current\n"
        "ssh:\n  user: root\n"
        "nodes:\n"
        f"  gpu[01-03]:\n    address: {hosts}\n    data_address: 10.201.7.[11-13]\n"
    )
    assert "gpu[01-03]: ready" in done.stdout
    assert "  nodes:\n    gpu[01-03]:\n" in done.stdout
    assert sorted(path.name for path in user.folder.iterdir()) == [
        "inventory.schema.json",
        "inventory.yaml",
        "known_hosts",
    ]
    loaded = inventory_file.load(inventory)
    assert [node.data_address for node in loaded.nodes] == ["10.201.7.11", "10.201.7.12", "10.201.7.13"]
    before = inventory.read_bytes()
    again = user("init", "--accept-host-keys", hosts)
    assert again.returncode == 2
    assert "already exists" in again.stderr
    assert inventory.read_bytes() == before
    assert user("init", "-q").stdout == "gpu[01-03]: ready\n"


def test_from_an_ansible_inventory_with_a_node_that_is_down(box, user):
    one, two, _ = (node.address for node in box.nodes)
    dead = one.rpartition(".")[0] + ".251"
    (user.folder / "hosts.yml").write_text(
        f"gpus:\n  hosts:\n    a1: {{ansible_host: {one}}}\n    a2: {{ansible_host: {two}, rack: r1}}\n"
        f"    a3: {{ansible_host: {dead}}}\n  vars:\n    ansible_user: root\nrest:\n  hosts:\n    other:\n"
    )
    done = user("init", "--json", "--from", "hosts.yml", "--group", "gpus", "--accept-host-keys")
    assert done.returncode == 5
    assert "hosts.yml: rack (line 4) is skipped" in done.stderr
    data = json.loads(done.stdout)
    assert data["nodes"] == {"a1": "ready", "a2": "ready"}
    assert list(data["error"]["reasons"]) == ["a3"]
    loaded = inventory_file.load(user.folder / "inventory.yaml")
    assert [(node.name, node.address, node.data_address) for node in loaded.nodes] == [
        ("a1", one, "10.201.7.11"),
        ("a2", two, "10.201.7.12"),
        ("a3", dead, None),
    ]
    assert loaded.ssh.user == "root"


def test_without_a_reachable_node_nothing_is_written(box, user):
    dead = box.nodes[0].address.rpartition(".")[0] + ".251"
    done = user("init", "--accept-host-keys", dead)
    assert done.returncode == 5
    assert list(user.folder.iterdir()) == []
    nobody = user("init", box.nodes[0].address)  # its host key is not known, and no user can be asked
    assert nobody.returncode == 5
    assert "on a terminal" in nobody.stderr
    assert list(user.folder.iterdir()) == []
