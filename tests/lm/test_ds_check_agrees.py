"""The check of DeepSpeed's files finds what transformers and DeepSpeed report, and knows the keys of this release."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.ds_config.check import OWN, TRAINER, Context, check, parse

LAB = Path(__file__).parents[2] / "scripts/lab"
KEYS = Path(__file__).parents[2] / "trainer/ds_config/check/keys.json"
ARGUMENTS = ("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "8", "--output_dir", "out")
CONFIGS = {
    "guide": {
        "train_batch_size": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.0}},
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "warmup_min_lr": 0, "warmup_max_lr": 2e-5, "warmup_num_steps": 1000}},
        "zero_optimization": {"stage": 3}, "fp16": {"enabled": True}, "bf16": {"enabled": False},
    },
    "everything": {
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5, "bf16": {"enabled": True}, "fp16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": 0}},
    },
    "nothing": {"train_batch_size": 16, "gradient_clipping": 1, "optimizer": {"type": "AdamW", "params": {"lr": 5e-5}}},
}  # fmt: skip
PROGRAM = """
import json, sys
from transformers import HfArgumentParser, TrainingArguments
from transformers.integrations import HfTrainerDeepSpeedConfig
found = {}
for name, config in json.loads(sys.argv[1]).items():
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(sys.argv[2:])
    made = HfTrainerDeepSpeedConfig(config)
    made.trainer_config_process(arguments)
    try:
        made.trainer_config_finalize(arguments, None, 100)
        found[name] = ""
    except ValueError as error:
        found[name] = str(error)
print("FOUND " + json.dumps(found))
"""
# What DeepSpeed refuses when it reads a file.
REFUSED = {
    "stage": {"zero_optimization": {"stage": 4}},
    "unknown": {"zero_optimization": {"reduce_bucket": 1}},
    "bucket": {"zero_optimization": {"stage": 2, "reduce_bucket_size": -1}},
    "string": {"zero_optimization": {"stage": 2, "reduce_bucket_size": "5e8"}},
    "both": {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
    "batch": {"train_batch_size": 30, "gradient_accumulation_steps": 4},
    "removed": {"elasticity": {"enabled": True}},
    "fine": {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}, "steps_per_print": 10},
}
READ = """
import json, sys, deepspeed
found = {}
for name, config in json.loads(sys.argv[1]).items():
    try:
        deepspeed.DeepSpeedConfig({"train_micro_batch_size_per_gpu": 2, **config})
        found[name] = ""
    except Exception as error:
        found[name] = str(error)
print("FOUND " + json.dumps(found))
"""


@pytest.fixture(scope="module")
def ask(lab_env):
    def run(program, *words):
        env = {**os.environ, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        argv = [lab_env / "bin/python", *program, *words]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run


def found(output):
    return json.loads(re.search(r"^FOUND (.*)$", output, re.MULTILINE)[1])


def test_the_contradictions_are_those_of_transformers(ask):
    reported = found(ask(("-c", PROGRAM), json.dumps(CONFIGS), *ARGUMENTS))
    context = Context(program=TRAINER, arguments=parse(ARGUMENTS), world=1)
    for name, config in CONFIGS.items():
        theirs = re.findall(r"^- ds (\S+?)=", reported[name], re.MULTILINE)
        ours = [each.key for each in check(json.dumps(config), context) if "but" in each.what and each.fix]
        assert sorted(ours) == sorted(theirs), name
    assert len(re.findall("^- ds", reported["guide"], re.MULTILINE)) == 4


def test_what_deepspeed_refuses_is_an_error(ask):
    reported = found(ask(("-c", READ), json.dumps(REFUSED)))
    for name, config in REFUSED.items():
        content = json.dumps({"train_micro_batch_size_per_gpu": 2, **config})
        errors = [each for each in check(content, Context(program=OWN, world=1)) if each.level == "error"]
        assert bool(errors) == bool(reported[name]), (name, reported[name], errors)


def test_the_table_of_keys_is_that_of_the_release(ask):
    output = ask((LAB / "ds_keys.py",))
    assert output[output.index("{\n") :] == KEYS.read_text(), f"{sys.executable} scripts/lab/ds_keys.py writes it again"
