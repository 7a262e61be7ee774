"""The plans of each launcher for one, two and three unequal nodes, and the same as scripts, in ``launchers/``.

``CLUSTERCTL_UPDATE_GOLDEN=1 scripts/test golden`` rewrites them, for review in the diff.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath

import pytest

from provision.launchers import filled, launch
from provision.model import Node
from provision.run import Facts, Job, RunSpec, shells
from provision.run.spec import workers

HERE = Path(__file__).parent / "launchers"
PACKAGES = ("accelerate", "deepspeed", "llamafactory", "tensorboard", "torch", "wandb")


def port(device, **fields):
    given = {"device": device, "port": 1, "state": "ACTIVE", "link_layer": "InfiniBand", "rate": 200.0}
    return given | {"gid_index": None} | fields


def facts(rank, gpus, **fields):
    given = {
        "rank": rank,
        "hostname": f"gpu0{rank + 1}",
        "ip": f"192.168.1.{rank + 1}",
        "interface": "ens1f0" if rank == 0 else "ens2f0",
        "gpus": gpus,
        "cpus": 64 if gpus else 2,
        "packages": PACKAGES,
        "boot_id": f"boot-{rank}",
    }
    return Facts(**(given | fields))


IB = (port("mlx5_0"), port("mlx5_1"), port("mlx5_2", state="DOWN"), port("mlx5_bond_0", link_layer="Ethernet"))
ROCE = (
    port("mlx5_0", link_layer="Ethernet", rate=100.0, gid_index=3),
    port("mlx5_1", link_layer="Ethernet", rate=25.0, gid_index=5),
)
CONFIG = Job("config", "sft.yaml")
SCRIPT = Job("script", "train.py", ("--lr", "1e-5", "--name", "two words"), resume_arg="--resume {checkpoint}")

CASES = {
    "llamafactory-1-node": (CONFIG, [8], {}, {}),
    "llamafactory-2-nodes-cpu": (CONFIG, [0, 0], {}, {}),
    "llamafactory-2-nodes-infiniband": (CONFIG, [8, 8], {"infiniband": IB}, {"resuming": True, "restarts": 3}),
    "llamafactory-3-nodes-unequal": (CONFIG, [8, 4, 2], {}, {"env": {"OMP_NUM_THREADS": "3", "HF_TOKEN": "hf_x"}}),
    "torchrun-1-node": (SCRIPT, [8], {}, {"output": "job/out"}),
    "torchrun-2-nodes-module": (Job("module", "pkg.train", ("--x", ""), code=Path()), [8, 8], {}, {}),
    "torchrun-2-nodes-roce": (SCRIPT, [8, 8], {"infiniband": ROCE}, {"output": "job/out"}),
    "torchrun-3-nodes-unequal": (SCRIPT, [8, 4, 2], {"infiniband": IB}, {"output": "/data/out"}),
    "deepspeed-1-node": (Job("script", "train.py", ("--deepspeed_config", "ds.json")), [8], {}, {}),
    "deepspeed-2-nodes-cpu": (Job("script", "train.py", ("--deepspeed_config", "ds.json"), per_node=2), [0, 0], {}, {}),
    "deepspeed-3-nodes-unequal": (
        Job("script", "train.py", ("--deepspeed", "ds.json"), include={"gpu01": ("1", "3"), "gpu02": (), "gpu03": ()}),
        [8, 4, 3],
        {},
        {},
    ),
    "plain-1-node": (replace(SCRIPT, launcher="plain"), [8], {}, {"output": "job/out"}),
    "plain-2-nodes-module": (Job("module", "pkg.train", ("--x", ""), "plain"), [8, 8], {"infiniband": IB}, {}),
    "plain-3-nodes-unequal": (replace(SCRIPT, launcher="plain"), [8, 4, 2], {}, {"output": "/data/out"}),
    "accelerate-1-node-1-process": (Job("script", "train.py", launcher="accelerate"), [1], {}, {}),
    "accelerate-2-nodes-cpu": (Job("script", "train.py", launcher="accelerate"), [0, 0], {}, {}),
    "accelerate-3-nodes-unequal": (
        Job("script", "train.py", ("--lr", "1"), launcher="accelerate", launcher_config=Path("ds.yaml")),
        [8, 4, 2],
        {},
        {"settings": {"distributed_type": "DEEPSPEED", "compute_environment": "LOCAL_MACHINE"}},
    ),
}


def spec_of(job, gpus, reported, fields):
    nodes = tuple(Node(f"gpu0{rank + 1}", f"192.168.1.{rank + 1}") for rank in range(len(gpus)))
    message = {node.name: facts(rank, gpus[rank], **reported) for rank, node in enumerate(nodes)}
    target = {"config": "sft.yaml", "script": "train.py", "module": "pkg.train"}[job.kind]
    given = {
        "id": "20261121-071500-sft-3f2a",
        "workers": workers(job, nodes, message, fields.get("env")),
        "prefix": PurePosixPath("/data/releases/0123456789ab"),
        "folder": PurePosixPath("/data/our runs/20261121-071500-sft-3f2a"),
        "config": target,
        "master": "192.168.1.1",
        "port": 29500,
        "progress": "job/out/trainer_log.jsonl" if job.kind == "config" else None,
        "job": job,
    }
    return RunSpec(**(given | fields))


def written(case):
    """What belongs into the golden files of a case, by suffix."""
    spec = spec_of(*CASES[case])
    launched = launch(spec)
    objects = [plan.to_object() for plan in launched.plans]
    plans = filled(launched.plans, {worker.node.name: worker.facts.interface for worker in spec.workers})
    notices = [asdict(notice) for notice in launched.notices]
    texts = {
        ".json": json.dumps({"notices": notices, "plans": objects}, indent=2) + "\n",
        ".sh": "\n".join(map(shells.as_sh, plans)),
    }
    if len(plans) == 1:
        texts |= {".ps1": shells.as_powershell(plans[0]), ".cmd": shells.as_cmd(plans[0])}
    return texts


@pytest.mark.parametrize("case", CASES)
def test_launchers(case):
    for suffix, text in written(case).items():
        path = HERE / f"{case}{suffix}"
        if os.environ.get("CLUSTERCTL_UPDATE_GOLDEN"):
            path.write_bytes(text.encode())
        assert path.read_bytes().decode() == text, path.name


def test_no_file_is_left_over():
    assert {path.name for path in HERE.iterdir()} == {f"{case}{suffix}" for case in CASES for suffix in written(case)}
