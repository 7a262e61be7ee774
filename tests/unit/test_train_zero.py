"""``clusterctl train --zero``: a DeepSpeed configuration for a config that has none."""

import json

import pytest
import yaml

from provision.errors import UsageError
from provision.launchers import from_words
from provision.tasks.train import ZERO_CHOICES, pack_files
from trainer.ds_config import autos

CONFIG = "stage: sft  # of LLaMA-Factory\nmodel_name_or_path: /models/x\ndo_train: true"


@pytest.fixture
def job(tmp_path):
    def make(text, *arguments, name="train.yaml"):
        (tmp_path / name).write_text(text)
        return from_words((str(tmp_path / name), *arguments), launcher="auto")

    return make


@pytest.mark.parametrize("zero", ZERO_CHOICES)
def test_configuration_is_written_and_referenced(job, zero):
    luggage = pack_files(job(CONFIG), zero)
    message = luggage.texts["job/train.yaml"].decode()
    assert message == f"{CONFIG}\ndeepspeed: ds_zero{zero}.json\n"
    config = json.loads(luggage.texts[f"job/ds_zero{zero}.json"])
    assert config["zero_optimization"]["stage"] == int(zero[0])
    assert ("offload_optimizer" in config["zero_optimization"]) == zero.endswith("-offload")
    assert "train_micro_batch_size_per_gpu" in autos(config)
    assert luggage.settings["deepspeed"] == f"ds_zero{zero}.json"


def test_without_the_option_the_config_is_sent_unchanged(job):
    luggage = pack_files(job(CONFIG), None)
    assert luggage.texts["job/train.yaml"].decode() == CONFIG
    assert not [name for name in luggage.texts if "ds_" in name]


@pytest.mark.parametrize("given", ["ds.json", "/etc/ds.json", "{zero_optimization: {stage: 1}}"])
def test_configuration_of_the_user_is_never_changed(job, given):
    with pytest.raises(UsageError, match="has a DeepSpeed configuration"):
        pack_files(job(f"{CONFIG}\ndeepspeed: {given}\n"), "2")


def test_an_argument_counts_as_given(job):
    with pytest.raises(UsageError, match="has a DeepSpeed configuration: mine"):
        pack_files(job(CONFIG, "deepspeed=mine.json"), "2")


def test_empty_value_counts_as_missing(job):
    luggage = pack_files(job(f"{CONFIG}\ndeepspeed: null\n"), "3")
    assert yaml.safe_load(luggage.texts["job/train.yaml"])["deepspeed"] == "ds_zero3.json"


def test_option_for_a_script_is_refused_with_another_command(job):
    with pytest.raises(UsageError, match="goes with a LLaMA-Factory config") as refused:
        pack_files(job("print()", name="train.py"), "2")
    assert "ds-config --for own --stage 2" in refused.value.hint
