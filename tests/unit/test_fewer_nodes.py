"""``train --min-nodes`` with DeepSpeed's ZeRO, whose checkpoints need as many ranks as saved them."""

import json
from pathlib import Path, PurePosixPath

import pytest

from provision.errors import ClusterctlError, UsageError
from provision.launchers import from_words
from provision.model import LOCAL, CommandLine, Inventory, Node, Notice
from provision.run.fewer_nodes import Zero, obstacles, zero_of, zero_of_accelerate
from provision.session import Session
from provision.tasks.ds_files import check_job, fewer_nodes
from provision.tasks.gate import GateOptions
from provision.tasks.train import Training, pack_files, train

CONFIG = "stage: sft  # of LLaMA-Factory\nmodel_name_or_path: /models/x\ndo_train: true\noutput_dir: out\n"
TRAINER = "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
OWN = "import deepspeed\nconfig = 'ds.json'\n"


def deepspeed(stage, **more):
    return json.dumps({"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": stage}, **more})


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(*words, zero=None):
    job = from_words(words)
    files = pack_files(job, zero)
    checked, files = check_job(job, files, world=2, env={})
    return [(each.certain, each.text) for each in fewer_nodes(job, files, checked)]


@pytest.mark.parametrize(
    ("config", "zero"),
    [
        ({}, Zero("x", 0)),
        ({"zero_optimization": {"stage": 3}}, Zero("x", 3)),
        ({"zero_optimization": {}}, Zero("x", 0)),
        ({"zero_optimization": True}, Zero("x", 1)),
        ({"zero_optimization": {"stage": 2}, "checkpoint": {"load_universal": True}}, Zero("x", 2, universal=True)),
        ({"zero_optimization": {"stage": 2}, "checkpoint": {"load_universal": "yes"}}, Zero("x", 2)),
        ({"zero_optimization": {"stage": "2"}, "checkpoint": []}, Zero("x", None)),
    ],
)
def test_a_configuration_says_which_stage_it_uses(config, zero):
    assert zero_of("x", config) == zero


def test_accelerate_has_a_stage_of_its_own():
    uses = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}
    assert zero_of_accelerate("a.yaml", uses, {}) == Zero("a.yaml", 3)
    assert zero_of_accelerate("a.yaml", uses, {"zero_stage": "1"}) == Zero("--zero_stage", 1)
    assert zero_of_accelerate("a.yaml", {"distributed_type": "DEEPSPEED"}, {}) == Zero("a.yaml", 2)
    assert zero_of_accelerate("a.yaml", {}, {"use_deepspeed": True}) == Zero("a.yaml", 2)
    assert zero_of_accelerate("a.yaml", {"distributed_type": "FSDP"}, {"zero_stage": "2"}) is None


@pytest.mark.parametrize("saves", [{"save_only_model": True}, {"save_strategy": "no"}, {"save_strategy": False}])
def test_a_trainer_without_the_states_of_the_optimizer_starts_from_the_first_step(saves):
    zeros = {"ds.json": Zero("ds.json", 2)}
    assert list(obstacles(zeros, trainer=True, arguments=saves)) == []
    assert len(list(obstacles(zeros, trainer=False, arguments=saves))) == 1
    assert len(list(obstacles(zeros, trainer=True, arguments={"save_strategy": "epoch"}))) == 1


@pytest.mark.parametrize(("zero", "certain"), [("0", []), ("1", [True]), ("2", [True]), ("3-offload", [True])])
def test_a_config_with_zero_cannot_continue_on_fewer_nodes(here, zero, certain):
    Path("train.yaml").write_text(CONFIG)
    assert [each for each, _ in found("train.yaml", zero=zero)] == certain


def test_a_config_without_deepspeed_can(here):
    Path("train.yaml").write_text(CONFIG)
    assert found("train.yaml") == []


def test_a_configuration_inside_the_config_counts_and_one_on_the_nodes_may(here):
    Path("train.yaml").write_text(CONFIG + "deepspeed: {zero_optimization: {stage: 3}}\n")
    ((certain, text),) = found("train.yaml")
    assert certain
    assert text.startswith("train.yaml: deepspeed uses ZeRO stage 3: DeepSpeed resumes a ZeRO checkpoint only on as ")
    Path("train.yaml").write_text(CONFIG + "deepspeed: /shared/ds.json\n")
    ((certain, text),) = found("train.yaml")
    assert not certain
    assert text.startswith("/shared/ds.json is not read on this machine. If it uses ZeRO: ")


def test_universal_checkpoints_are_a_warning(here):
    Path("ds.json").write_text(deepspeed(2, checkpoint={"load_universal": True}))
    Path("train.yaml").write_text(CONFIG + "deepspeed: ds.json\n")
    ((certain, text),) = found("train.yaml")
    assert not certain
    assert "ds_to_universal.py" in text


def test_scripts(here):
    Path("ds.json").write_text(deepspeed(1))
    Path("train.py").write_text(TRAINER)
    assert [each for each, _ in found("train.py", "--deepspeed", "ds.json", "--output_dir", "out")] == [True]
    assert found("train.py", "--deepspeed", "ds.json", "--save_strategy", "no") == []
    Path("train.py").write_text(OWN)  # how it saves is not known
    ((certain, text),) = found("train.py")
    assert not certain
    assert text.endswith("This holds if its checkpoints are DeepSpeed's")
    Path("train.py").write_text("print(1)")
    assert found("train.py") == []


def session_of(tmp_path, count, events, *options):
    nodes = tuple(Node(f"gpu0{each}", LOCAL) for each in range(1, count + 1))
    inventory = Inventory(path=tmp_path / "inventory.yaml", prefix=PurePosixPath("/none/current"), nodes=nodes)
    typed = CommandLine("train", options=dict(options), words=("train.yaml",))
    return Session(inventory, nodes, emit=events.append, typed=typed)


def test_train_refuses_and_shows_the_command_with_a_spare(here):
    Path("train.yaml").write_text(CONFIG)
    asked = Training(from_words(("train.yaml",)), zero="2", min_nodes=2, gate=GateOptions(asked=3))
    options = (("--nodes", ("3",)), ("--min-nodes", ("2",)), ("--zero", ("2",)))
    with session_of(here, 3, [], *options) as session, pytest.raises(UsageError) as refused:
        train(session, asked)
    assert str(refused.value).startswith("--min-nodes 2: ds_zero2.json uses ZeRO stage 2: ")
    assert "with a spare node: clusterctl train --nodes 2 --zero 2 --spares 1 train.yaml;" in refused.value.hint
    assert refused.value.hint.endswith("--force train.yaml")


@pytest.mark.parametrize(("force", "min_nodes", "warned"), [(True, 1, True), (False, 2, False)])
def test_train_only_warns_with_force_and_says_nothing_of_all_nodes(here, force, min_nodes, warned):
    Path("train.yaml").write_text(CONFIG)
    asked = Training(from_words(("train.yaml",)), zero="2", min_nodes=min_nodes, gate=GateOptions(force=force))
    events = []
    with session_of(here, 2, events) as session, pytest.raises(ClusterctlError, match="nothing was started"):
        train(session, asked)
    texts = [each.text for each in events if isinstance(each, Notice) and each.level == "warning"]
    assert any("uses ZeRO stage 2" in text for text in texts) == warned
