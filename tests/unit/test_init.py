"""Nodes' facts become the nodes of an inventory, and these its text."""

from __future__ import annotations

from ipaddress import IPv4Interface

import pytest

from provision import inventory as inventory_file
from provision.errors import UsageError
from provision.inventory.new_nodes import (
    Facts,
    Interface,
    Port,
    Wanted,
    data_addresses,
    describe_nodes,
    draft_nodes,
    parse_hosts,
    read_facts,
)
from provision.inventory.writing import inventory_text, runs
from provision.model import Node
from provision.ssh.enrol import default_key

# Recorded with templates/enrol/ask.sh.j2 on a machine with one NVIDIA H200 and without iproute2 (the last part of the
# trie, which repeats the same, is shortened); SSH_CONNECTION was set by hand.
H200 = """\
host\tvm
reached\t192.0.2.2
gpu\tGPU 0: NVIDIA H200 (UUID: GPU-cce09752-ab60-6d25-5d87-ee417aaddb56)
net\teth0\t1\tup\t-1
net\tifb0\t1\tdown\t
net\tlo\t772\tunknown\t
trie\tMain:
trie\t  +-- 0.0.0.0/0 3 0 5
trie\t     |-- 0.0.0.0
trie\t        /0 universe UNICAST
trie\t     +-- 127.0.0.0/8 2 0 2
trie\t        +-- 127.0.0.0/31 1 0 0
trie\t           |-- 127.0.0.0
trie\t              /8 host LOCAL
trie\t           |-- 127.0.0.1
trie\t              /32 host LOCAL
trie\t        |-- 127.255.255.255
trie\t           /32 link BROADCAST
trie\t     +-- 192.0.2.0/24 2 0 2
trie\t        +-- 192.0.2.0/30 2 0 2
trie\t           |-- 192.0.2.0
trie\t              /24 link UNICAST
trie\t           |-- 192.0.2.2
trie\t              /32 host LOCAL
trie\t        |-- 192.0.2.255
trie\t           /32 link BROADCAST
trie\tLocal:
trie\t           |-- 192.0.2.2
trie\t              /32 host LOCAL
route\tIface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
route\teth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
route\teth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
"""

# `ip` and `net` as recorded on a Debian 12 machine. The lines of InfiniBand are not recorded: they are as the kernel's
# Documentation/ABI/stable/sysfs-class-infiniband has them.
IPOIB = """\
host\tgpu01.cluster.example
reached\t192.168.20.14
gpu\tGPU 0: NVIDIA A800-SXM4-80GB (UUID: GPU-1)
gpu\tGPU 1: NVIDIA A800-SXM4-80GB (UUID: GPU-2)
net\tdocker0\t1\tdown\t-1
net\teno1\t1\tup\t1000
net\tib0\t32\tup\t200000
net\tlo\t772\tunknown\t
port\tmlx5_0\t1\tInfiniBand\t4: ACTIVE\t200 Gb/sec (4X HDR)
ip\t1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever preferred_lft forever
ip\t2: eno1    inet 192.168.20.14/24 brd 192.168.20.255 scope global eno1\\  valid_lft forever
ip\t3: ib0    inet 10.10.0.14/16 brd 10.10.255.255 scope global ib0\\       valid_lft forever preferred_lft forever
ip\t4: docker0    inet 172.17.0.1/16 brd 172.17.255.255 scope global docker0\\  valid_lft forever
"""


def test_a_machine_without_iproute2():
    facts = read_facts(H200)
    assert (facts.host, facts.reached, facts.gpus, facts.ports) == ("vm", "192.0.2.2", ("NVIDIA H200",), ())
    assert facts.interfaces[0] == Interface("eth0", (IPv4Interface("192.0.2.2/24"),))
    assert not facts.interfaces[1].up
    assert facts.interfaces[2].addresses == ()


def test_a_machine_with_infiniband():
    facts = read_facts(IPOIB)
    assert facts.gpus == ("NVIDIA A800-SXM4-80GB",) * 2
    assert facts.ports == (Port("mlx5_0", "1", "InfiniBand", "4: ACTIVE", "200 Gb/sec (4X HDR)"),)
    docker, eno1, ib0, _ = facts.interfaces
    assert not docker.up
    assert (eno1.speed, eno1.infiniband) == (1000, False)
    assert (ib0.speed, ib0.infiniband, ib0.addresses) == (200000, True, (IPv4Interface("10.10.0.14/16"),))


@pytest.mark.parametrize(
    "out", ["", "noise\n", "net\tx\n", "port\ta\tb\n", "ip\tx\n", "route\ta\tzz\n", "ip\t1: a inet 999.1.1.1/24 x"]
)
def test_damaged_answers_give_no_facts(out):
    assert read_facts(out) == Facts("")


# --- names and data addresses ---------------------------------------------------------------------


def node(number, *more, host="", reached=True, speed=1000):
    interfaces = (Interface("eno1", (IPv4Interface(f"192.168.20.{number}/24"),), speed=speed), *more)
    return Facts(host, f"192.168.20.{number}" if reached else "", interfaces=interfaces)


def on(name, address, **more):
    return Interface(name, (IPv4Interface(address),), **more)


def chosen(*facts):
    return list(data_addresses(dict(enumerate(facts)))[0].values())


def test_the_second_network_is_for_data():
    facts = [node(n, on("ens2", f"10.0.0.{n}/24", speed=25000)) for n in (1, 2)]
    assert chosen(*facts) == ["10.0.0.1", "10.0.0.2"]
    assert data_addresses(dict(enumerate(facts)))[1] == "data_address: 10.0.0.0/24 on ens2, 25 Gbit/s"


def test_infiniband_comes_first_and_then_the_fastest():
    slow, fast = "10.0.0.{}/24", "10.1.0.{}/24"
    both = [node(n, on("ens2", slow.format(n), speed=25000), on("ens3", fast.format(n), speed=100000)) for n in (1, 2)]
    assert chosen(*both) == ["10.1.0.1", "10.1.0.2"]
    ib = [node(n, on("ib0", slow.format(n), infiniband=True), on("ens3", fast.format(n), speed=100000)) for n in (1, 2)]
    assert chosen(*ib) == ["10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize(
    "make",
    [
        node,
        lambda n: node(n, on("docker0", f"172.17.0.{n}/16")),
        lambda n: node(n, on("br-1a2b", f"10.0.0.{n}/24")),
        lambda n: node(n, on("virbr0", f"10.0.0.{n}/24")),
        lambda n: node(n, on("lo", f"10.0.0.{n}/24")),
        lambda n: node(n, on("ens2", f"169.254.0.{n}/16")),
        lambda n: node(n, on("ens2", f"10.0.{n}.1/24")),  # a separate network on each
        lambda n: node(n, on("ens2", "10.0.0.1/24")),  # as a service processor shows itself on every machine
        lambda n: node(n, on("ens2", f"10.0.0.{n}/24", up=False)),
        lambda n: node(n, on("ens2", f"192.168.20.{n + 100}/24", speed=25000)),  # the same network again
        lambda n: node(n, on("ens2", f"10.0.0.{n}/24", speed=1000), speed=25000),  # slower
        lambda n: node(n, on("ens2", f"10.0.0.{n}/24"), reached=False),  # which one is that of ssh?
        lambda n: node(n, *([on("ens2", f"10.0.0.{n}/24")] if n == 1 else [])),
    ],
)
def test_networks_that_are_not_used_for_data(make):
    assert chosen(make(1), make(2)) == []


def test_single_node_needs_no_data_network():
    assert chosen(node(1, on("ens2", "10.0.0.1/24"))) == []


def names(hosts, *own):
    facts = {index: Facts(name) for index, name in enumerate(own) if name is not None}
    return [each.name for each in describe_nodes(parse_hosts(hosts), facts)[0]]


@pytest.mark.parametrize(
    ("hosts", "own", "expected"),
    [
        (["10.0.0.[1-2]"], ["gpu01.example.org", "gpu02"], ["gpu01", "gpu02"]),
        (["10.0.0.[1-2]"], ["gpu.a", "gpu.b"], ["gpu.a", "gpu.b"]),
        (["10.0.0.[1-2]"], ["ubuntu", "ubuntu"], ["node1", "node2"]),
        (["10.0.0.[1-2]"], ["localhost.localdomain", "(none)"], ["node1", "node2"]),
        (["10.0.0.[1-2]"], ["gpu01", None], ["gpu01", "node2"]),
        (["10.0.0.[1-2]"], ["node2", None], ["node2", "node1"]),
        (["a=10.0.0.1", "10.0.0.2"], ["x", "a"], ["a", "node2"]),
        (["head", "10.0.0.2"], ["x", "y"], ["head", "y"]),
        (["h[1-2].example.org"], ["x", "y"], ["h1.example.org", "h2.example.org"]),
        (["fd00::1"], ["gpu1"], ["gpu1"]),
    ],
)
def test_a_name_is_given_or_asked(hosts, own, expected):
    assert names(hosts, *own) == expected


def test_a_node_that_gave_no_answer_keeps_its_line():
    facts = {0: node(1, on("ib0", "10.0.0.1/24"), host="gpu01"), 2: node(3, on("ib0", "10.0.0.3/24"), host="gpu03")}
    nodes, notes = describe_nodes(parse_hosts(["192.168.20.[1-3]"]), facts)
    assert nodes == (
        Node("gpu01", "192.168.20.1", "10.0.0.1"),
        Node("node2", "192.168.20.2"),
        Node("gpu03", "192.168.20.3", "10.0.0.3"),
    )
    assert "node2: no data_address, because it did not answer" in notes[-1]


def test_gpus_that_were_given_stay_and_others_are_counted():
    facts = {0: read_facts(IPOIB)}
    hosts = (Wanted("a", "a", gpus=4), Wanted("b", "b"))
    nodes, notes = describe_nodes(hosts, facts | {1: Facts("b")})
    assert [each.gpus for each in nodes] == [4, None]
    nodes, notes = describe_nodes((Wanted("a", "a"),), {0: facts[0]})
    assert nodes[0].gpus == 2
    assert notes == ("a: 2 x NVIDIA A800-SXM4-80GB; 1 x InfiniBand 200 Gb/sec (4X HDR), ACTIVE",)


@pytest.mark.parametrize(
    "hosts",
    [["=a"], ["a="], ["a=1.2.3.4", "a=1.2.3.5"], ["a[1-2]=1.2.3.4"], ["a[1-=b"], [""], ["10.0.0.1", "10.0.0.1"]],
)
def test_invalid_hosts(hosts):
    with pytest.raises(UsageError):
        parse_hosts(hosts)


# --- the text -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "entries"),
    [
        ([("gpu01", "10.0.0.1"), ("gpu02", "10.0.0.2"), ("gpu03", "10.0.0.3")], 1),
        ([("gpu9", "10.0.0.9"), ("gpu10", "10.0.0.10")], 1),
        ([("gpu09", "10.0.0.9"), ("gpu10", "10.0.0.10")], 1),
        ([("gpu099", "10.0.0.99"), ("gpu100", "10.0.0.100")], 1),
        ([("r1n1", "10.0.0.1"), ("r1n2", "10.0.0.2"), ("r2n1", "10.0.0.3")], 2),
        ([("a1", "10.0.0.1"), ("a2", "10.0.0.3")], 2),
        ([("a1", "10.0.0.255"), ("a2", "10.0.1.0")], 2),
        ([("a2", "10.0.0.2"), ("a1", "10.0.0.1")], 2),
        ([("a1", "10.0.0.1"), ("a3", "10.0.0.2")], 2),
        ([("a01", "10.0.0.1"), ("a2", "10.0.0.2")], 2),
        ([("a1", "a1.x"), ("a2", "a2.x"), ("head", "h")], 2),
        ([("a1b1", "10.0.0.1"), ("a2b1", "10.0.0.2"), ("a2b2", "10.0.0.3")], 2),
        ([("n0", "fd00::9"), ("n1", "fd00::10")], 1),
        ([("2", "10.0.0.1"), ("3", "10.0.0.2")], 1),
    ],
)
def test_consecutive_nodes_become_ranges_that_the_loader_reads_back(nodes, entries, tmp_path):
    nodes = tuple(Node(name, address, gpus=8) for name, address in nodes)
    assert len(runs(nodes)) == entries
    (tmp_path / "i.yaml").write_text(inventory_text(nodes, prefix="/opt/llm/current", ssh={}))
    assert inventory_file.load(tmp_path / "i.yaml").nodes == nodes


def test_nodes_with_different_settings_are_separate_entries(tmp_path):
    nodes = (
        Node("a1", "10.0.0.1", "10.1.0.1"),
        Node("a2", "10.0.0.2", "10.1.0.2"),
        Node("a3", "10.0.0.3"),
        Node("a4", "10.0.0.4", port=2222),
        Node("a5", "10.0.0.5", user="x", gpus=4),
        Node("true", "10.0.0.6"),
    )
    written = inventory_text(nodes, prefix="/opt/x y/current", ssh={"user": "ü", "port": 22}, notes=["a\nb", "c" * 200])
    assert "  a[1-2]:\n    address: 10.0.0.[1-2]\n    data_address: 10.1.0.[1-2]\n  a3: 10.0.0.3\n" in written
    assert "\n# a\\nb\n" in written
    (tmp_path / "i.yaml").write_text(written, encoding="utf-8")
    loaded = inventory_file.load(tmp_path / "i.yaml")
    assert loaded.nodes == nodes
    assert (loaded.ssh.user, loaded.ssh.port, str(loaded.prefix)) == ("ü", 22, "/opt/x y/current")


def test_draft_before_any_node_is_asked():
    assert [each.name for each in draft_nodes(parse_hosts(["g[1-2]=10.0.0.[1-2]", "10.0.0.9", "head"]))] == [
        "g1",
        "g2",
        "node3",
        "head",
    ]


def test_default_key_of_the_user_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    assert default_key() == "clusterctl_key"
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/id_ed25519").touch()
    assert default_key() is None
