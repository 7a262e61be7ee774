from __future__ import annotations

import pytest

from provision import inventory
from provision.errors import UsageError
from provision.ssh.enrol import new_inventory


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    (tmp_path / "home/.ssh").mkdir(parents=True)
    return tmp_path / "home"


def nodes(path):
    return [(node.name, node.address) for node in inventory.load(path).nodes]


def test_names_ranges_and_bare_addresses(tmp_path):
    path = tmp_path / "cluster/inventory.yaml"
    new_inventory(path, ["gpu[01-02]=10.0.0.[1-2]", "10.0.0.9", "head.example.org"], user="ubuntu", prefix="/srv/x/env")
    assert nodes(path) == [
        ("gpu01", "10.0.0.1"),
        ("gpu02", "10.0.0.2"),
        ("node3", "10.0.0.9"),
        ("head.example.org", "head.example.org"),
    ]
    loaded = inventory.load(path)
    assert loaded.ssh.user == "ubuntu"
    assert str(loaded.prefix) == "/srv/x/env"
    assert loaded.ssh.key == path.parent / "clusterctl_key"


def test_a_range_of_addresses(tmp_path):
    path = tmp_path / "i.yaml"
    new_inventory(path, ["192.168.1.[10-12]"])
    assert nodes(path) == [("node1", "192.168.1.10"), ("node2", "192.168.1.11"), ("node3", "192.168.1.12")]


def test_a_key_of_the_user_is_left_to_ssh(tmp_path, home):
    (home / ".ssh/id_ed25519").touch()
    new_inventory(tmp_path / "i.yaml", ["a"])
    assert inventory.load(tmp_path / "i.yaml").ssh.key is None


def test_what_is_there_stays(tmp_path):
    path = tmp_path / "i.yaml"
    path.write_text("mine")
    with pytest.raises(UsageError, match="there already"):
        new_inventory(path, ["a"])
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    "hosts", [["=a"], ["a="], ["a=1.2.3.4", "a=1.2.3.5"], ["a[1-2]=1.2.3.4"], ["a[1-=b"], ["a b=c"]]
)
def test_hosts_that_make_no_inventory_leave_nothing_behind(tmp_path, hosts):
    with pytest.raises(UsageError):
        new_inventory(tmp_path / "i.yaml", hosts)
    assert not (tmp_path / "i.yaml").exists()
