"""The meaning of a command line: kinds, launchers, and commands of launchers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from provision.errors import PreflightError, UsageError
from provision.launchers import choose, from_words
from provision.model import Node
from provision.run import Facts, Job
from provision.run.spec import choose_nodes, visible, workers


@pytest.mark.parametrize(
    ("words", "launcher", "kind"),
    [
        (["sft.yaml"], "llamafactory", "config"),
        (["sft.yml", "max_steps=3"], "llamafactory", "config"),
        (["train.py", "--lr", "1"], "torchrun", "script"),
        (["train.py", "--deepspeed", "ds.json"], "deepspeed", "script"),
        (["train.py", "--deepspeed_config=ds.json"], "deepspeed", "script"),
        (["train.py", "--deepspeed_stage", "2"], "torchrun", "script"),
    ],
)
def test_the_launcher_follows_from_the_arguments(words, launcher, kind):
    job = from_words(words)
    assert (choose(job), job.kind, job.target, job.args) == (launcher, kind, words[0], tuple(words[1:]))


def test_an_accelerate_config_asks_for_accelerate():
    job = from_words(["train.py", "--deepspeed", "x"], accelerate_config=Path("a.yaml"), launcher="auto")
    assert choose(job) == "accelerate"


def test_a_module():
    job = from_words(["--x", "1"], module="pkg.train")
    assert (job.kind, job.target, job.args, choose(job)) == ("module", "pkg.train", ("--x", "1"), "torchrun")


@pytest.mark.parametrize(
    ("words", "options", "text", "hint"),
    [
        ([], {}, "nothing to run", "CONFIG.yaml"),
        (["run.sh"], {}, "run.sh cannot be read: No such file", "clusterctl train -- ./SCRIPT.sh"),
        (["c.json"], {}, "JSON", "YAML"),
        (["pkg.train"], {}, "neither a YAML", "-m pkg.train"),
        (["notes.txt"], {}, "neither a YAML", "SCRIPT.py"),
        ([], {"module": "a/b.py"}, "not a module name", "package.train"),
        (["sft.yaml"], {"launcher": "torchrun"}, "only llamafactory", "omit --launcher"),
        (["train.py"], {"launcher": "llamafactory"}, "configs only", "omit --launcher"),
        (["train.py"], {"launcher": "mpi"}, "unknown launcher mpi", "torchrun"),
        (["train.py"], {"launcher": "torchrun", "accelerate_config": Path("a")}, "does not use it", "accelerate"),
        (["train.py"], {"per_node": 0}, "at least one", "--gpus-per-node 1"),
        (["bash", "run.sh"], {}, "run.sh cannot be read: No such file", "clusterctl train -- ./SCRIPT.sh"),
        (["ssh", "node01", "torchrun", "t.py"], {}, "ssh cannot be run on the nodes", "command that it would start"),
        (["python", "-c", "print()"], {}, "python -c cannot", "SCRIPT.py"),
        (["python"], {}, "python alone", "SCRIPT.py"),
        (["A=1"], {}, "no command", "NAME=VALUE"),
        (["torchrun", "--nproc_per_node", "8"], {}, "no script", "SCRIPT.py"),
        (["torchrun", "--nproc_per_node"], {}, "a value is missing", "VALUE"),
        (["torchrun", "--nproc", "8", "t.py"], {}, "no option --nproc", "after the script's name"),
        (["torchrun", "--nnodes", "1:4", "t.py"], {}, "fixed number of nodes", "--nodes N"),
        (["torchrun", "--nnodes", "two", "t.py"], {}, "not a number", ""),
        (["torchrun", "sft.yaml"], {}, "not a script", "clusterctl train sft.yaml"),
        (["deepspeed", "--elastic_training", "t.py"], {}, "not supported", "--restarts"),
        (["deepspeed", "--autotuning", "run", "t.py"], {}, "not supported", "by hand"),
        (["deepspeed", "--include", "a:x", "t.py"], {}, "NODE:GPU,GPU", "gpu01@gpu02:0,1"),
        (["accelerate", "config"], {}, "only `launch`", "launch SCRIPT.py"),
        (["accelerate", "launch", "--tpu", "t.py"], {}, "not supported", "TPU"),
        (["accelerate", "launch", "--num_machines=2", "--num_processes=9", "t.py"], {}, "equally", "--gpus-per-node"),
        (["llamafactory-cli", "chat", "x.yaml"], {}, "only `train", "clusterctl train"),
    ],
)
def test_invalid_job_is_refused_with_a_hint(words, options, text, hint):
    with pytest.raises(UsageError) as caught:
        from_words(words, **options)
    assert text in str(caught.value)
    assert hint in caught.value.hint


def typed(command, **options):
    return from_words(command.split(), **options)


@pytest.mark.parametrize(
    ("command", "job", "dropped"),
    [
        ("torchrun --nproc_per_node 8 train.py --lr 1", Job("script", "train.py", ("--lr", "1"), per_node=8), []),
        (
            "torchrun --nnodes=2 --nproc-per-node=gpu --node_rank 1 --master_addr 10.0.0.1 --master_port 29500 t.py",
            Job("script", "t.py", nodes=2),
            ["--nproc-per-node gpu", "--node_rank 1", "--master_addr 10.0.0.1", "--master_port 29500"],
        ),
        (
            "python -m torch.distributed.run --standalone --numa-binding node -m pkg.train --x",
            Job("module", "pkg.train", ("--x",), launcher_args=("--numa-binding", "node")),
            ["--standalone"],
        ),
        (
            "python3.11 -u -m torch.distributed.launch --nproc_per_node=2 t.py -x",
            Job("script", "t.py", ("-x",), per_node=2, local_rank=True),
            [],
        ),
        ("torch.distributed.launch --use_env t.py", Job("script", "t.py"), []),
        (
            "deepspeed --hostfile h --num_gpus 4 --num_nodes 2 --master_port=1 --bind_cores_to_rank t.py --deepspeed",
            Job("script", "t.py", ("--deepspeed",), "deepspeed", ("--bind_cores_to_rank",), per_node=4, nodes=2),
            ["--hostfile h", "--master_port 1"],
        ),
        (
            "deepspeed -i gpu01@gpu02:0,2 --module pkg.t",
            Job("module", "pkg.t", launcher="deepspeed", include={"gpu01": (), "gpu02": ("0", "2")}),
            [],
        ),
        ("deepspeed -e gpu01:0 t.py", Job("script", "t.py", launcher="deepspeed", exclude={"gpu01": ("0",)}), []),
        (
            (
                "accelerate launch --multi_gpu --num_machines 2 --num_processes 16 --machine_rank 0 --dynamo_mode x"
                " --config_file a.yaml t.py"
            ),
            Job(
                "script",
                "t.py",
                launcher="accelerate",
                launcher_args=("--dynamo_mode", "x"),
                launcher_config=Path("a.yaml"),
                nodes=2,
                per_node=8,
            ),
            ["--multi_gpu", "--machine_rank 0"],
        ),
        (
            "accelerate-launch --num_processes 8 --gpu_ids 0,1 t.py",
            Job("script", "t.py", launcher="accelerate", env={"CUDA_VISIBLE_DEVICES": "0,1"}, total=8),
            [],
        ),
        ("llamafactory-cli train a.yaml x=1", Job("config", "a.yaml", ("x=1",), "llamafactory"), []),
        (
            "FORCE_TORCHRUN=1 NNODES=2 NODE_RANK=1 MASTER_ADDR=h NPROC_PER_NODE=4 lmf train a.yaml",
            Job("config", "a.yaml", launcher="llamafactory", nodes=2, per_node=4),
            ["NODE_RANK=1", "MASTER_ADDR=h"],
        ),
        ("env A=b python t.py", Job("script", "t.py"), []),
        ("A=b t.py --c", Job("script", "t.py", ("--c",)), []),
        ("/opt/env/bin/torchrun -- t.py", Job("script", "t.py"), []),
        ("python -m pkg.train", Job("module", "pkg.train"), []),
    ],
)
def test_commands_as_people_type_them(command, job, dropped):
    found = typed(command)
    if "torch" in command:
        job = replace(job, launcher="torchrun")
    if "=" in command.split()[0]:
        assert found.env
    assert replace(found, replaced=(), typed={}, env={}) == replace(job, env={})
    if job.env:
        assert found.env == job.env
    assert sorted(each.typed.removeprefix(f"{job.launcher} ") for each in found.replaced) == sorted(dropped)


def test_options_of_clusterctl_override_typed_ones_with_a_notice():
    job = typed("torchrun --nproc_per_node 8 t.py", per_node=2, launcher="auto")
    assert (job.per_node, choose(job)) == (2, "torchrun")
    assert job.notices == ("torchrun --nproc_per_node 8: replaced by --gpus-per-node 2",)
    job = typed("torchrun t.py", launcher="accelerate")
    assert (choose(job), job.notices) == ("accelerate", ("torchrun: replaced by --launcher accelerate",))
    job = typed("accelerate launch --num_processes 8 t.py", per_node=2)
    assert (job.per_node, job.total) == (2, None)
    assert job.notices == ("accelerate --num_processes 8: replaced by --gpus-per-node 2",)
    assert typed("torchrun --nproc_per_node 2 t.py", per_node=2).notices == ()


def test_file_with_the_name_of_a_command_is_no_command():
    assert from_words(["deepspeed.py"]).kind == "script"


# --- nodes and GPUs ------------------------------------------------------------------------------

NODES = tuple(Node(f"gpu0{number}", f"10.0.0.{number}") for number in (1, 2, 3))
SAID = {node.name: Facts(gpus=8) for node in NODES}


def names(nodes):
    return [node.name for node in nodes]


def test_nodes_that_include_and_exclude_leave():
    assert names(choose_nodes(Job(include={"gpu03": (), "gpu01": ("1",)}), NODES)) == ["gpu01", "gpu03"]
    assert names(choose_nodes(Job(exclude={"gpu02": (), "gpu01": ("1",)}), NODES)) == ["gpu01", "gpu03"]
    assert names(choose_nodes(Job(), NODES)) == ["gpu01", "gpu02", "gpu03"]


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (Job(include={"gpu09": ()}), "gpu09 is not one of"),
        (Job(include={"localhost": ("1",)}), "localhost is not one of"),
        (Job(include={"gpu01": ()}, exclude={"gpu02": ()}), "cannot be combined"),
        (Job(exclude=dict.fromkeys(SAID, ())), "removes all nodes"),
    ],
)
def test_nodes_that_cannot_be_chosen(job, text):
    with pytest.raises(UsageError, match=text):
        choose_nodes(job, NODES)


@pytest.mark.parametrize(
    ("job", "env", "processes", "devices"),
    [
        (Job(), {}, [8, 8, 8], [None] * 3),
        (Job(per_node=2), {}, [2, 2, 2], [None] * 3),
        (Job(), {"CUDA_VISIBLE_DEVICES": "2,3"}, [2, 2, 2], [("2", "3")] * 3),
        (Job(env={"CUDA_VISIBLE_DEVICES": "5"}), {"CUDA_VISIBLE_DEVICES": "2,3"}, [1, 1, 1], [("5",)] * 3),
        (Job(), {"CUDA_VISIBLE_DEVICES": "GPU-8a56a4bc, GPU-1f"}, [2, 2, 2], [("GPU-8a56a4bc", "GPU-1f")] * 3),
        (Job(), {"CUDA_VISIBLE_DEVICES": ""}, [1, 1, 1], [()] * 3),
        (Job(), {"CUDA_VISIBLE_DEVICES": "0,-1,2"}, [1, 1, 1], [("0",)] * 3),
        (Job(include={"gpu01": ("1", "3"), "gpu02": (), "gpu03": ()}), {}, [2, 8, 8], [("1", "3"), None, None]),
        (Job(exclude={"gpu01": ("0", "7")}), {}, [6, 8, 8], [("1", "2", "3", "4", "5", "6"), None, None]),
    ],
)
def test_gpus_that_are_used(job, env, processes, devices):
    found = workers(job, NODES, SAID, env)
    assert [worker.processes for worker in found] == processes
    assert [worker.devices for worker in found] == devices


def test_number_of_gpus_defaults_to_the_inventory():
    node = Node("n", "n", gpus=4)
    assert workers(Job(), [node], {"n": Facts(gpus=8)})[0].processes == 4
    assert workers(Job(per_node=2), [node], {"n": Facts(gpus=0)})[0].processes == 2


@pytest.mark.parametrize(
    ("job", "env", "text"),
    [
        (Job(per_node=9), {}, "can use 8 GPUs, but 9 processes"),
        (Job(per_node=2), {"CUDA_VISIBLE_DEVICES": "3"}, "can use 1 GPUs, but 2 processes"),
        (Job(), {"CUDA_VISIBLE_DEVICES": "7,8"}, "GPU 8 does not exist"),
        (Job(include=dict.fromkeys(SAID, ("9",))), {}, "GPU 9 does not exist"),
        (Job(exclude={"gpu01": tuple("01234567")}), {}, "all its GPUs are excluded"),
    ],
)
def test_missing_gpus(job, env, text):
    with pytest.raises(PreflightError) as caught:
        workers(job, NODES, SAID, env)
    assert text in caught.value.reasons["gpu01"]


def test_two_ways_to_choose_gpus():
    with pytest.raises(UsageError, match="both choose"):
        workers(Job(include={"gpu01": ("1",)}), NODES, SAID, {"CUDA_VISIBLE_DEVICES": "1"})


def test_visible_gpus_are_known_before_the_nodes_are_asked():
    assert visible(Job(), NODES, {}) == {}
    assert visible(Job(), NODES[:2], {"CUDA_VISIBLE_DEVICES": "1,2"}) == {"gpu01": "1,2", "gpu02": "1,2"}
    assert visible(Job(include={"gpu01": ("1", "3"), "gpu02": ()}), NODES, {}) == {"gpu01": "1,3"}
