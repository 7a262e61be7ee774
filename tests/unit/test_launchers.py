"""Launchers: inputs and the plans that come of them lie side by side in ``tests/golden/launch_*.json``.

``CLUSTERCTL_GOLDEN=write pytest tests/unit/test_launchers.py`` writes the plans anew, for review in the diff.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path, PurePosixPath

import pytest

from provision.errors import ClusterctlError, PreflightError, UsageError
from provision.launchers import llamafactory
from provision.model import Node
from provision.run import Facts, RunSpec, Worker, new_run_id, plan_name

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("launch_*.json"))


def spec_of(given):
    """A golden file's ``spec``."""
    workers = tuple(
        Worker(Node(**worker["node"]), Facts.parse(json.dumps(worker["facts"]))) for worker in given["workers"]
    )
    paths = {key: PurePosixPath(given[key]) for key in ("prefix", "folder")}
    return RunSpec(**{**given, **paths, "workers": workers})


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden(path):
    case = json.loads(path.read_text())
    launch = llamafactory.launch(spec_of(case["spec"]))
    came = {"plans": list(launch.plans), "notices": [asdict(notice) for notice in launch.notices]}
    if os.environ.get("CLUSTERCTL_GOLDEN") == "write":
        path.write_text(json.dumps(case | came, indent=2) + "\n")
    assert json.loads(json.dumps(came)) == {key: case.get(key) for key in came}


def worker(number=0, *, gpus=None, **facts):
    """A node; ``gpus`` is what its inventory says."""
    name = f"gpu0{number + 1}"
    said = {"ip": f"10.0.0.{number + 1}", "interface": "eth0", "boot_id": f"boot-{number}", "gpus": 8, "cpus": 64}
    return Worker(Node(name, f"10.0.0.{number + 1}", gpus=gpus), Facts(rank=number, **(said | facts)))


def spec(*workers, **fields):
    given = {
        "id": "20261121-071500-sft-3f2a",
        "workers": workers or (worker(0), worker(1)),
        "prefix": PurePosixPath("/data/releases/0123456789ab"),
        "folder": PurePosixPath("/data/runs/20261121-071500-sft-3f2a"),
        "config": "sft.yaml",
        "master": "10.0.0.1",
        "port": 29500,
    }
    return RunSpec(**(given | fields))


def envs(spec):
    return [plan["env"] for plan in llamafactory.launch(spec).plans]


ACTIVE = ({"device": "mlx5_0", "port": 1, "state": "ACTIVE", "link_layer": "InfiniBand"},)
INITIALIZING = ({"device": "mlx5_0", "port": 1, "state": "INIT", "link_layer": "InfiniBand"},)


# --- argv ----------------------------------------------------------------------------------------


def test_no_argument_is_ever_split():
    folder = PurePosixPath("/data/our runs/$HOME")
    argv = llamafactory.launch(spec(prefix=PurePosixPath("/data/my envs/r"), folder=folder)).plans[1]["argv"]
    assert argv[0] == "/data/my envs/r/bin/python"
    assert argv[argv.index("--log-dir") + 1] == "/data/our runs/$HOME/logs/node1/ranks"
    assert argv[-3:] == ["-m", "llamafactory.launcher", "sft.yaml"]


def test_ranks_go_on_from_node_to_node():
    plans = llamafactory.launch(spec(worker(0, gpus=2), worker(1, gpus=4), worker(2))).plans
    assert [plan["first_rank"] for plan in plans] == [0, 2, 6]
    assert [plan["env"]["NPROC_PER_NODE"] for plan in plans] == ["2", "4", "8"]


@pytest.mark.parametrize(("gpus", "found", "processes"), [(None, 0, 1), (None, 4, 4), (2, 8, 2), (2, 0, 2)])
def test_processes(gpus, found, processes):
    assert Worker(Node("n", "n", gpus=gpus), Facts(gpus=found)).processes == processes


def test_nodes_may_share_the_run_folder():
    first, second = llamafactory.launch(spec()).plans
    assert first["logs"] != second["logs"]
    assert plan_name(0) != plan_name(1)


def test_only_rank_0_follows_the_trainers_log():
    plans = llamafactory.launch(spec(progress="job/out/trainer_log.jsonl")).plans
    assert [plan["progress"] for plan in plans] == ["job/out/trainer_log.jsonl", None]


# --- environment ---------------------------------------------------------------------------------


def test_each_node_has_its_own_interface():
    one, two = envs(spec(worker(0, interface="ens1f0"), worker(1, interface="ens2f0")))
    assert (one["NCCL_SOCKET_IFNAME"], one["GLOO_SOCKET_IFNAME"]) == ("=ens1f0", "ens1f0")
    assert (two["NCCL_SOCKET_IFNAME"], two["GLOO_SOCKET_IFNAME"]) == ("=ens2f0", "ens2f0")


@pytest.mark.parametrize(
    ("ports", "disabled", "text"),
    [
        ((ACTIVE, ACTIVE), False, None),
        (((), ()), True, "no node has InfiniBand"),
        ((ACTIVE, INITIALIZING), True, "no active InfiniBand port on gpu02"),
        ((INITIALIZING, ACTIVE + INITIALIZING), True, "no active InfiniBand port on gpu01"),
    ],
)
def test_infiniband_is_used_when_all_have_it(ports, disabled, text):
    given = spec(*(worker(number, infiniband=each) for number, each in enumerate(ports)))
    assert [env.get("NCCL_IB_DISABLE") == "1" for env in envs(given)] == [disabled, disabled]
    told = [notice.text for notice in llamafactory.launch(given).notices]
    assert [text in each for each in told] == ([True] if text else [])


def test_the_user_wins_over_all_but_the_ranks():
    given = {"OMP_NUM_THREADS": "3", "HF_HUB_OFFLINE": "0", "PYTHONPATH": "/mine", "NODE_RANK": "7", "MASTER_PORT": "1"}
    launch = llamafactory.launch(spec(env=given))
    env = launch.plans[1]["env"]
    assert (env["OMP_NUM_THREADS"], env["HF_HUB_OFFLINE"], env["PYTHONPATH"]) == ("3", "0", "/mine")
    assert (env["NODE_RANK"], env["MASTER_PORT"]) == ("1", "29500")
    assert any("NODE_RANK, MASTER_PORT" in notice.text for notice in launch.notices)


@pytest.mark.parametrize(("cpus", "processes", "threads"), [(64, 8, "8"), (2, 8, "1"), (7, 2, "3")])
def test_threads(cpus, processes, threads):
    assert envs(spec(worker(gpus=processes, cpus=cpus)))[0]["OMP_NUM_THREADS"] == threads


def test_caches_are_of_this_user_and_this_release():
    plan = llamafactory.launch(spec(worker(uid=1234))).plans[0]
    assert plan["env"]["TRITON_CACHE_DIR"] == "/tmp/clusterctl-1234/0123456789ab/triton"
    assert plan["private"] == ["/tmp/clusterctl-1234", "/tmp/clusterctl-1234/0123456789ab"]


def test_optimized_torch_can_be_switched_off_as_in_llamafactory():
    assert envs(spec())[0]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in envs(spec(env={"OPTIM_TORCH": "0"}))[0]


def test_every_value_is_text():
    for env in envs(spec()):
        assert all(isinstance(value, str) for value in env.values())


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"error": "no route to rank 0"}, "no route to rank 0"),
        ({"interface": "lo", "ip": "127.0.1.1", "master_ip": "127.0.1.1"}, "10.0.0.1 means 127.0.1.1 there"),
        ({"ip": "10.0.0.1", "boot_id": "boot-0"}, "is the same machine as gpu01"),
    ],
)
def test_nodes_that_would_make_it_hang_are_refused(bad, reason):
    with pytest.raises(PreflightError) as caught:
        llamafactory.launch(spec(worker(0), worker(1, **bad)))
    assert list(caught.value.reasons) == ["gpu02"]
    assert reason in caught.value.reasons["gpu02"]


def test_one_node_may_use_loopback():
    assert envs(spec(worker(interface="lo", ip="127.0.0.1")))[0]["GLOO_SOCKET_IFNAME"] == "lo"


def test_nodes_in_network_namespaces_of_one_machine_are_different():
    llamafactory.launch(spec(worker(0, boot_id="same"), worker(1, boot_id="same")))


def test_a_container_bridge_is_pointed_out():
    (notice,) = [
        each
        for each in llamafactory.launch(spec(worker(0), worker(1, interface="docker0"))).notices
        if each.level == "warning"
    ]
    assert "gpu02" in notice.text
    assert "docker0" in notice.text


def test_v1_is_refused():
    with pytest.raises(UsageError, match="USE_V1"):
        llamafactory.launch(spec(env={"USE_V1": "1"}))


# --- names ---------------------------------------------------------------------------------------

NOW = datetime(2026, 11, 21, 7, 15, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("sft.yaml", "sft"),
        ("configs/Qwen2.5 LoRA (v2).yml", "qwen2-5-lora-v2"),
        ("$(rm -rf)/../x';.yaml", "x"),
        ("配置.yaml", "run"),
        ("a" * 80 + ".yaml", "a" * 24),
    ],
)
def test_run_ids_are_safe(name, word):
    made = new_run_id(NOW, name)
    stamp, _, rest = made.partition(f"-{word}-")
    assert stamp == "20261121-071500"
    assert len(rest) == 4
    assert set(rest) <= set("0123456789abcdef")


def test_run_ids_are_in_utc_and_differ():
    there = NOW.astimezone(timezone(timedelta(hours=8)))
    assert new_run_id(there, "x").startswith("20261121-071500-x-")
    assert len({new_run_id(NOW, "x") for _ in range(20)}) > 10


# --- facts ---------------------------------------------------------------------------------------


def test_facts_of_a_newer_agent_are_understood():
    facts = Facts.parse('{"error": null, "gpus": 2, "infiniband": [], "something_new": 1}')
    assert facts == replace(Facts(), gpus=2)


@pytest.mark.parametrize("text", ["", "[]", "Welcome to gpu01!", "3"])
def test_an_answer_that_is_no_answer(text):
    with pytest.raises(ClusterctlError, match="cannot be read"):
        Facts.parse(text)
