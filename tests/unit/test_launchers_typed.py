"""Nothing that is typed is dropped silently: every option of every launcher is used, replaced by name, or refused."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
from case_table import every_case
from hypothesis import example, given
from hypothesis import strategies as st

from provision import launchers
from provision.errors import UsageError
from provision.launchers import from_words
from provision.launchers.kit.options import VARIABLES
from provision.launchers.kit.replaced import BY
from provision.model import Node
from provision.run import Facts, Job, RunSpec, Worker
from provision.run.spec import count_nodes, workers

ROOT = Path(__file__).parents[2]
TABLES = {name: table for name in launchers.names() if (table := launchers.get(name).OPTIONS).flags}
COMMANDS = {"torchrun": ["torchrun"], "deepspeed": ["deepspeed"], "accelerate": ["accelerate", "launch"]}
SAMPLES = {"nodes": "2", "per_node": "3", "total": "6", "include": "node01", "exclude": "node02", "gpu_ids": "0"}
NODES = (Node("node01", "10.0.0.1"), Node("node02", "10.0.0.2"))
OPTIONS = [(launcher, name) for launcher, table in TABLES.items() for name in sorted(table.flags | table.values)]


def spec(job):
    message = {"gpus": 8, "cpus": 64, "interface": "eth0", "packages": ("deepspeed", "accelerate")}
    members = tuple(Worker(node, Facts(rank=rank, ip=node.address, **message)) for rank, node in enumerate(NODES))
    return RunSpec(
        "r1", members, PurePosixPath("/p"), PurePosixPath("/f"), "t.py", "10.0.0.1", 29500, job=job, launcher="auto"
    )


def shown(job):
    return [notice.text for notice in launchers.launch(spec(job)).notices if "replaced by" in notice.text]


@every_case("launcher, name", OPTIONS)
def test_every_option_is_used_or_replaced_by_name_or_refused(launcher, name):
    table = TABLES[launcher]
    value = [] if name in table.flags else [SAMPLES.get(table.used.get(name, ""), "7")]
    rest = ["pkg.t"] if table.used.get(name) == "module" else ["t.py"]
    words = [*COMMANDS[launcher], f"--{name}", *value, *rest]
    match table.use(name):
        case "refused":
            with pytest.raises(UsageError, match=f"--{name}.*not supported"):
                from_words(words)
        case "replaced":
            (notice,) = shown(from_words(words))
            assert notice.startswith(f"{launcher} --{name}{''.join(' ' + each for each in value)}: replaced by ")
        case "kept":
            job = from_words(words)
            assert job.launcher_args == (f"--{name}", *value)
            if name not in ("no_python", "no_local_rank"):  # deepspeed gives these itself
                argv = launchers.launch(spec(job)).plans[0].argv
                assert f"--{name}" in argv
        case "used":
            plain = from_words([*COMMANDS[launcher], "t.py"])
            assert replace(from_words(words), typed={}) != replace(plain, typed={})


def test_every_replaced_option_has_a_message():
    used = {key for table in TABLES.values() for key in table.replaced.values()} | set(VARIABLES.values())
    assert used <= set(BY)
    for table in TABLES.values():
        named = table.flags | table.values
        assert (set(table.replaced) | set(table.used) | set(table.refused) | table.files) <= named
        assert not table.flags & table.values


def test_tables_in_the_documentation_match_the_code():
    page = (ROOT / "docs/launchers.md").read_text(encoding="utf-8")
    for launcher, table in TABLES.items():
        (rows,) = re.findall(rf"^\| `{launcher}` \| (.*) \| (.*) \| (.*) \|$", page, re.MULTILINE)
        for use, cell in zip(("used", "replaced", "refused"), rows, strict=True):
            names = set(re.findall(r"--(\w+)", cell))
            assert names == {name for name in table.flags | table.values if table.use(name) == use}, (launcher, use)


def test_option_tables_match_the_installed_launchers(lab_env):
    """The options of torch, DeepSpeed and accelerate as they are installed, read from their sources."""
    (packages,) = lab_env.glob("lib/python3*/site-packages")
    files = {
        "torchrun": "torch/distributed/run.py",
        "deepspeed": "deepspeed/launcher/runner.py",
        "accelerate": "accelerate/commands/launch.py",
    }
    for launcher, file in files.items():
        calls = [
            node
            for node in ast.walk(ast.parse((packages / file).read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
        ]
        words = [str(each.value) for call in calls for each in call.args if isinstance(each, ast.Constant)]
        long = {word[2:].replace("-", "_") for word in words if word.startswith("--")} - {"help"}
        table = TABLES[launcher]
        assert long <= table.flags | table.values, launcher
        assert {word[1:] for word in words if re.fullmatch("-[a-zA-Z]", word)} - {"h"} <= set(table.short), launcher


@pytest.mark.parametrize(
    ("command", "notice"),
    [
        ("torchrun --master_addr 10.0.0.9 t.py", "torchrun --master_addr 10.0.0.9: replaced by 10.0.0.1 (node01)"),
        ("torchrun --master_port=1 t.py", "torchrun --master_port 1: replaced by 29500, a free port of node01"),
        ("torchrun --node_rank 1 t.py", "torchrun --node_rank 1: replaced by each node's own, 0 to 1 on node[01-02]"),
        ("torchrun --rdzv_endpoint h:1 t.py", "torchrun --rdzv_endpoint h:1: replaced by 10.0.0.1:29500 (node01)"),
        (
            "torchrun --standalone t.py",
            "torchrun --standalone: replaced by 2 of the inventory's nodes: node[01-02]",
        ),
        ("torchrun --nproc_per_node gpu t.py", "torchrun --nproc_per_node gpu: replaced by 8 on each of node[01-02]"),
        ("deepspeed -H hosts t.py", "deepspeed -H hosts: replaced by 2 of the inventory's nodes: node[01-02]"),
        ("accelerate launch --main_process_ip h t.py", "accelerate --main_process_ip h: replaced by 10.0.0.1 (node01)"),
        ("MASTER_ADDR=h torchrun t.py", "MASTER_ADDR=h: replaced by 10.0.0.1 (node01)"),
        ("PET_MASTER_PORT=1 torchrun t.py", "PET_MASTER_PORT=1: replaced by 29500, a free port of node01"),
    ],
)
def test_a_notice_names_the_value_that_is_used(command, notice):
    assert shown(from_words(command.split())) == [notice]


@pytest.mark.parametrize("command", ["torchrun --master_addr 10.0.0.1 --master_port 29500 t.py", "torchrun t.py"])
def test_unchanged_option_gives_no_notice(command):
    assert shown(from_words(command.split())) == []


def test_ignored_variables_of_the_inventory_are_named_with_the_used_values():
    given = replace(spec(Job("script", "t.py")), env={"NNODES": "4", "MASTER_ADDR": "h"})
    (notice,) = [each.text for each in launchers.launch(given).notices if "ignored" in each.text]
    assert "NNODES: 2 of the inventory's nodes: node[01-02]" in notice
    assert "MASTER_ADDR: 10.0.0.1 (node01)" in notice


# --- how many nodes and processes ----------------------------------------------------------------


def test_a_typed_number_of_nodes_is_used_or_refused_or_replaced_by_name():
    job = from_words(["torchrun", "--nnodes", "4", "t.py"])
    with pytest.raises(UsageError, match=r"torchrun --nnodes 4: there are 2 nodes: node\[01-02\]") as caught:
        count_nodes(job, None, NODES)
    assert "--nodes 2" in caught.value.hint
    count, reported = count_nodes(job, 2, NODES)
    assert (count, reported.notices) == (2, ("torchrun --nnodes 4: replaced by --nodes 2",))
    one = from_words(["NNODES=1", "lmf", "train", "a.yaml"])
    count, reported = count_nodes(one, None, NODES)
    assert (count, reported.notices) == (1, ("NNODES=1: the first 1 of 2 nodes: node01",))
    assert from_words(["PET_NPROC_PER_NODE=4", "PET_TEE=3", "torchrun", "t.py"]).per_node == 4
    assert count_nodes(from_words(["t.py"]), None, NODES)[0] is None
    assert count_nodes(from_words(["torchrun", "--nnodes", "2", "t.py"]), 2, NODES)[1].notices == ()


def test_variables_and_options_that_contradict_each_other_are_refused():
    with pytest.raises(UsageError, match="NNODES=2 and torchrun --nnodes 4 contradict"):
        from_words(["NNODES=2", "torchrun", "--nnodes", "4", "t.py"])
    with pytest.raises(UsageError, match="NNODES=x: not a number"):
        from_words(["NNODES=x", "torchrun", "t.py"])


def test_processes_of_all_nodes_together_are_shared_or_refused():
    facts = {"node01": Facts(gpus=8), "node02": Facts(gpus=4)}

    def processes(total):
        job = from_words(["accelerate", "launch", "--num_processes", str(total), "t.py"])
        return [each.processes for each in workers(job, NODES, facts)]

    assert processes(12) == [8, 4]
    assert processes(4) == [2, 2]
    with pytest.raises(UsageError, match="--num_processes 7 cannot be divided equally among 2 nodes"):
        processes(7)


def test_options_of_one_launcher_are_not_passed_to_another():
    with pytest.raises(UsageError, match="accelerate may not have these options"):
        from_words(["torchrun", "--numa-binding", "node", "t.py"], launcher="accelerate")


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("torchrun --nnode 2 t.py", "--nnodes"),
        ("accelerate launch --num_procesess 2 t.py", "--num_processes"),
        ("deepspeed --hostfle h t.py", "--hostfile"),
    ],
)
def test_a_misspelled_option_is_refused_with_a_suggestion(command, meant):
    with pytest.raises(UsageError, match=f"did you mean {meant}"):
        from_words(command.split())


# --- whatever is typed ---------------------------------------------------------------------------

WORDS = st.one_of(
    st.sampled_from(
        [
            *("torchrun", "deepspeed", "accelerate", "launch", "python", "-m", "lmf", "train", "env", "t.py", "a.yaml"),
            *("--", "=", "-", "A=", "NNODES=2", "NNODES=x", "--nnodes", "--nnodes=1:2", "--num_gpus", "--include"),
            *("torch.distributed.launch", "2", "0", "-1", "gpu", "a@b:1,2", "--hub_token", "x" * 5000, "9" * 5000),
        ]
    ),
    st.sampled_from(OPTIONS).map(lambda each: f"--{each[1]}"),
    st.text(st.characters(exclude_characters="\0"), max_size=12),
)


@given(st.lists(WORDS, max_size=8))
@example(["torchrun", "--nnodes", "9" * 5000, "t.py"])
@example(["x" * 5000])
@example(["torchrun", "--nnodes=²", "t.py"])
@example(["Ä=1", "t.py"])
@example(["env"])
def test_any_command_line_is_a_job_or_a_usage_error(words):
    try:
        job = from_words(words)
    except UsageError:
        return
    assert isinstance(job, Job)
    if job.kind != "config" and not (job.include or job.exclude):
        try:
            launched = launchers.launch(spec(job))
        except UsageError:
            return
        assert all(isinstance(word, str) for plan in launched.plans for word in plan.argv)
