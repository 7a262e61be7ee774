"""The network that NCCL is configured to use, and the one it has used.

Lines of logs are from issues of NVIDIA/nccl and others, as their authors posted them; the number stands beside each.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from provision.launchers import environment, network, notices
from provision.model import Node
from provision.run import Facts, RunSpec, Worker
from provision.run.found import Used
from provision.run.found import read_network as read
from trainer.agent import probe

IB, ETHERNET = "InfiniBand", "Ethernet"


def port(device, *, layer=IB, state="ACTIVE", rate=200.0, gid=None):
    return {
        "device": device,
        "port": 1,
        "state": state,
        "link_layer": layer,
        "rate": rate,
        "gid_index": gid,
    }


def spec(*ports, gpus=8, **fields):
    workers = tuple(
        Worker(
            Node(f"gpu0{rank + 1}", f"10.0.0.{rank + 1}"),
            Facts(rank=rank, ip=f"10.0.0.{rank + 1}", interface="eth0", gpus=gpus, infiniband=tuple(each)),
        )
        for rank, each in enumerate(ports)
    )
    given = {
        "id": "run",
        "workers": workers,
        "prefix": PurePosixPath("/data/releases/r"),
        "folder": PurePosixPath("/data/runs/run"),
        "config": "sft.yaml",
        "master": "10.0.0.1",
        "port": 29500,
    }
    return RunSpec(**(given | fields))


HDR = [port("mlx5_0"), port("mlx5_1")]
DOWN = [port("mlx5_0", state="INIT")]
ROCE = [port("mlx5_0", layer=ETHERNET, gid=3)]


def ib_variables(given, rank=0):
    return {name: value for name, value in environment(given, rank).items() if name.startswith("NCCL_IB")}


def test_infiniband_uses_the_active_ports():
    given = spec(HDR, [*HDR, port("mlx5_2", state="DOWN")])
    assert network(given).kind == "infiniband"
    assert ib_variables(given, 1) == {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"}
    assert notices(given) == ()


def test_ethernet_ports_and_slower_ones_beside_infiniband_are_skipped():
    ports = [*HDR, port("mlx5_2", rate=100.0), port("mlx5_bond_0", layer=ETHERNET, rate=400.0, gid=3)]
    assert ib_variables(spec(ports, ports)) == {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"}


def test_roce_has_the_index_of_its_address():
    slow = port("mlx5_9", layer=ETHERNET, rate=25.0, gid=1)
    given = spec(ROCE, [port("mlx5_4", layer=ETHERNET, gid=5), slow])
    assert ib_variables(given, 0) == {"NCCL_IB_HCA": "=mlx5_0:1", "NCCL_IB_GID_INDEX": "3"}
    assert ib_variables(given, 1) == {"NCCL_IB_HCA": "=mlx5_4:1", "NCCL_IB_GID_INDEX": "5"}


def test_different_port_indexes_are_left_to_nccl():
    given = spec(ROCE, [*ROCE, port("mlx5_1", layer=ETHERNET, gid=7)])
    assert "NCCL_IB_GID_INDEX" not in ib_variables(given, 1)
    (notice,) = notices(given)
    assert notice.text.startswith("gpu02: the RoCE ports")


@pytest.mark.parametrize(
    ("ports", "level", "words"),
    [
        (([], []), "info", ["no node has InfiniBand", "TCP over eth0", "a few GB/s"]),
        ((HDR, DOWN), "warning", ["no active InfiniBand port on gpu02", "20 to 40", "ibstat"]),
        ((HDR, ROCE), "warning", ["no active InfiniBand port on gpu02"]),
        ((ROCE, [port("mlx5_0", layer=ETHERNET)]), "warning", ["no active RoCE port on gpu02", "IPv4 address"]),
        ((DOWN, DOWN), "warning", ["no active InfiniBand port on gpu01, gpu02"]),
    ],
)
def test_tcp_is_reported_with_its_reason(ports, level, words):
    given = spec(*ports)
    assert ib_variables(given) == {"NCCL_IB_DISABLE": "1"}
    (notice,) = notices(given)
    assert notice.level == level
    assert [word for word in words if word not in notice.text] == []


def test_log_of_two_nodes_without_infiniband_has_the_interface():
    text = (Path(__file__).parent / "recorded_runs/nccl/h200_two_nodes.log").read_text(encoding="utf-8")
    assert str(read(text)) == "TCP, eth0"


def test_without_nccl_there_is_no_notice():
    assert notices(spec([], [], gpus=0)) == ()
    assert notices(spec(DOWN)) == ()


def test_network_chosen_by_the_user_gives_no_notice():
    given = spec(HDR, DOWN, env={"NCCL_IB_HCA": "mlx5_7"})
    assert environment(given, 0)["NCCL_IB_HCA"] == "mlx5_7"
    assert notices(given) == ()


# --- what NCCL said afterwards -------------------------------------------------------------------

NCCL_1925 = """\
pod-2bp29:2620971:2620971 [3] NCCL INFO NCCL_IB_HCA set to mlx5_0
pod-2bp29:2620971:2620971 [3] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:172.25.30.42<0>
pod-2bp29:2620971:2620971 [3] NCCL INFO Initialized NET plugin IB
pod-2bp29:2620971:2620971 [3] NCCL INFO Assigned NET plugin IB to comm
pod-2bp29:2620971:2620971 [3] NCCL INFO Using network IB
"""
NCCL_TESTS_185 = """\
dgxh100-4:460770:460842 [0] NCCL INFO NET/IB : Using [0]mlx5_10:1/RoCE [1]mlx5_11:1/RoCE [RO]; \
OOB enp220s0np0:11.1.128.136<0>
dgxh100-4:460770:460842 [0] NCCL INFO Using non-device net plugin version 0
dgxh100-4:460770:460842 [0] NCCL INFO Using network IB
"""
NCCL_1053 = """\
axa:3048391:3048566 [0] NCCL INFO NCCL_SOCKET_IFNAME set to lo
axa:3048391:3048566 [0] NCCL INFO NET/Socket : Using [0]lo:127.0.0.1<0>
axa:3048391:3048566 [0] NCCL INFO Using network Socket
"""
NCCL_224 = """\
[1,2]<stdout>:gpu6:1409:1602 [2] NCCL INFO NET/Socket : Using [0]enp1s0f0:172.16.0.166<0> [1]enp96s0f0:10.0.26.164<0> \
[2]flannel.1:10.244.3.0<0>
"""
NCCL_1357 = """\
qh100-gpu19:49357:49418 [3] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_1:1/IB/SHARP [2]mlx5_4:1/IB/SHARP \
[3]mlx5_5:1/IB/SHARP [RO]; OOB ibp25s0:10.20.0.119<0>
qh100-gpu19:49357:49418 [3] NCCL INFO Using network IBext
"""
NV_PEER_56 = """\
master_node:24570:24907 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so), using internal implementation
master_node:24570:24907 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB ib0:192.168.11.1<0>
"""
SOCKET_1232 = """\
[0] node0:13571:13571 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
[1] node2:22555:22555 [0] NCCL INFO Channel 00/0 : 2[1] -> 1[0] [receive] via NET/Socket/0
[2] node0:13572:13572 [1] NCCL INFO Channel 00 : 2[1] -> 0[0] via SHM/direct/direct
"""
GDR_707 = """\
10-90-43-152:120890:121560 [0] NCCL INFO Channel 01 : 2[c7000] -> 0[87000] [receive] via NET/IB/5/GDRDMA
10-90-43-152:120890:121563 [3] NCCL INFO Channel 02 : 2[c7000] -> 3[ca000] [receive] via NET/IB/0/GDRDMA
"""
P2P_188 = "user:852750:852802 [0] NCCL INFO Channel 00/0 : 0[27000] -> 7[ca000] via P2P/IPC/read\n"
SEND_56 = ":22901:22901 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/1\n"
OFI = "node:1:2 [0] NCCL INFO Using network AWS Libfabric\n"


@pytest.mark.parametrize(
    ("log", "used", "shown"),
    [
        (NCCL_1925, Used("InfiniBand", "mlx5_0:1", "eth0"), "InfiniBand, mlx5_0:1"),
        (NCCL_TESTS_185, Used("RoCE", "mlx5_10:1, mlx5_11:1", "enp220s0np0"), "RoCE, mlx5_10:1, mlx5_11:1"),
        (
            NCCL_TESTS_185 + SEND_56,
            Used("RoCE", "mlx5_11:1", "enp220s0np0", False),
            "RoCE, mlx5_11:1, without GPUDirect",
        ),
        (NCCL_1925 + GDR_707, Used("InfiniBand", "mlx5_0:1", "eth0", True), "InfiniBand, mlx5_0:1, GPUDirect"),
        (NCCL_1357, Used("InfiniBand", "mlx5_0:1, mlx5_1:1, mlx5_4:1, mlx5_5:1", "ibp25s0"), None),
        (NCCL_1053, Used("TCP", interface="lo"), "TCP, lo"),
        (NCCL_1053 + SOCKET_1232, Used("TCP", interface="lo"), "TCP, lo"),
        (NCCL_224 + SOCKET_1232, Used("TCP", interface="enp1s0f0"), "TCP, enp1s0f0"),
        (NCCL_1925 + P2P_188, Used("inside the node"), "inside the node"),
        (OFI, Used("AWS Libfabric"), "AWS Libfabric"),
        (NV_PEER_56, None, None),  # found, not chosen yet
        ("", None, None),
        ("step 10 loss 2.5\nNCCL version 2.28.9+cuda13.0\n", None, None),
    ],
)
def test_the_network_that_was_used(log, used, shown):
    found = read(log)
    assert found == used
    if shown:
        assert str(found) == shown


# --- what a node says of its ports ---------------------------------------------------------------


def sysfs(root, device, files, gids=()):
    port = root / device / "ports/1"
    for name, text in files.items():
        (port / name).parent.mkdir(parents=True, exist_ok=True)
        (port / name).write_text(text + "\n")
    for index, (kind, gid) in enumerate(gids):
        for folder, text in (("gid_attrs/types", kind), ("gids", gid)):
            (port / folder).mkdir(parents=True, exist_ok=True)
            (port / folder / str(index)).write_text(text + "\n")


def test_the_probe_reads_rate_and_the_address_for_roce(tmp_path):
    sysfs(tmp_path, "mlx5_0", {"state": "4: ACTIVE", "rate": "200 Gb/sec (4X HDR)", "link_layer": "InfiniBand"})
    gids = [("IB/RoCE v1", "fe80:0000:0000:0000:0000:0000:0000:0001")]
    gids += [("RoCE v2", "fe80:0000:0000:0000:0000:0000:0000:0001")]
    gids += [("IB/RoCE v1", "0000:0000:0000:0000:0000:ffff:c0a8:0101")]
    gids += [("RoCE v2", "0000:0000:0000:0000:0000:ffff:c0a8:0101")]
    gids += [("", "0000:0000:0000:0000:0000:0000:0000:0000")] * 8
    files = {"state": "4: ACTIVE", "rate": "100 Gb/sec (2X HDR)", "link_layer": "Ethernet"}
    sysfs(tmp_path, "mlx5_1", files, gids)
    sysfs(tmp_path, "mlx5_2", {"state": "1: DOWN", "rate": "2.5 Gb/sec (1X SDR)", "link_layer": "Ethernet"})
    found = probe.infiniband(str(tmp_path))
    assert [(each["device"], each["state"], each["rate"], each["gid_index"]) for each in found] == [
        ("mlx5_0", "ACTIVE", 200.0, None),
        ("mlx5_1", "ACTIVE", 100.0, 3),
        ("mlx5_2", "DOWN", 2.5, None),
    ]


def test_the_probe_names_the_packages(tmp_path):
    for name in ("torch-2.13.0.dist-info", "flash_attn-2.8-py3.11.egg-info", "llamafactory-0.9.5.dist-info", "numpy"):
        (tmp_path / name).mkdir()
    (tmp_path / "my-tool.egg-link").touch()
    (tmp_path / "typing_extensions-4.16.0.dist-info").mkdir()
    assert probe.packages([str(tmp_path), str(tmp_path / "none")]) == [
        "flash_attn",
        "llamafactory",
        "my_tool",
        "torch",
        "typing_extensions",
    ]
