"""Checking a DeepSpeed configuration: every finding, with its line, its column and what resolves it."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.ds_config import PRESETS, Request, find, make, text
from trainer.ds_config.check import OWN, TRAINER, UNKNOWN, Context, check, fails, matching, parse, table

# A configuration from a guide for a 7B model, with its command line.
GUIDE = """{
  "train_batch_size": "auto",
  "gradient_accumulation_steps": "auto",
  "optimizer": {
    "type": "AdamW",
    "params": {
      "lr": 2e-5,
      "weight_decay": 0.0
    }
  },
  "scheduler": {
    "type": "WarmupDecayLR",
    "params": {
      "warmup_min_lr": 0,
      "warmup_max_lr": 2e-5,
      "warmup_num_steps": 1000
    }
  },
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "offload_param": {"device": "cpu", "pin_memory": true},
    "contiguous_gradients": true,
    "overlap_comm": true
  },
  "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
  "bf16": {"enabled": false},
  "gradient_clipping": 1.0,
  "steps_per_print": 50
}
"""
TYPED = "--per_device_train_batch_size 2 --gradient_accumulation_steps 8 --deepspeed ds_config.json --output_dir out"
BASE = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}


def trainer(typed="", **more):
    return Context(program=TRAINER, arguments=parse(typed.split()), **more)


def of(config, context=Context()):  # noqa: B008 - frozen
    return check(config if isinstance(config, str) else json.dumps(config), context)


def changed(**changes):
    return {**copy.deepcopy(BASE), **changes}


def zero(**keys):
    return changed(zero_optimization={"stage": 2, **keys})


def test_the_guide_contradicts_its_own_command_line_in_four_values():
    errors = [each for each in of(GUIDE, trainer(TYPED, world=4)) if each.level == "error"]
    assert [(each.line, each.key, each.fix.partition("; or")[0]) for each in errors] == [
        (7, "optimizer.params.lr", "--learning_rate 2e-5"),
        (13, "scheduler.params", 'add "total_num_steps": "auto" to scheduler.params'),
        (15, "scheduler.params.warmup_max_lr", "--learning_rate 2e-5"),
        (16, "scheduler.params.warmup_num_steps", "--warmup_steps 1000"),
        (26, "fp16.enabled", "--fp16"),
    ]


def test_the_resolving_arguments_resolve_every_contradiction():
    repaired = GUIDE.replace('"warmup_num_steps": 1000', '"warmup_num_steps": 1000, "total_num_steps": "auto"')
    typed = f"{TYPED} --learning_rate 2e-5 --warmup_steps 1000 --fp16"
    assert not fails(of(repaired, trainer(typed, world=4)))


SYNTAX = {
    "trailing comma": ('{\n "train_batch_size": 8,\n}', 2, 23, "comma", "remove the comma in line 2"),
    "trailing comma in a list": ('{"train_batch_size": 8, "x": [1, 2,]}', 1, 35, "comma", "remove the comma"),
    "comment //": ('{\n// sizes\n "train_batch_size": 8}', 2, 1, "a comment (//)", "remove it"),
    "comment /* */": ('{"train_batch_size": /* all */ 8}', 1, 22, "a comment (/* */)", "remove it"),
    "comment #": ('{"train_batch_size": 8 # all\n}', 1, 24, "a comment (#)", "remove it"),
    "comment without end": ('{"train_batch_size": 8 /* all }', 1, 24, "without its end", "remove it"),
    "single quotes": ("{'train_batch_size': 8}", 1, 2, "single quotes", 'write "train_batch_size"'),
    "typographic quotes": ("{“train_batch_size”: 8}", 1, 2, "typographic quotes", 'write "train_batch_size"'),
    "full-width comma": ('{"train_batch_size": 8，"steps_per_print": 1}', 1, 23, "full-width", "write ,"),  # noqa: RUF001
    "True": ('{"train_batch_size": 8, "fp16": {"enabled": True}}', 1, 45, "True is Python", "write true"),
    "None": ('{"train_batch_size": 8, "optimizer": None}', 1, 38, "None is Python", "write null"),
    "unquoted key": ("{train_batch_size: 8}", 1, 2, "has no quotes", 'write "train_batch_size"'),
    "duplicate key": ('{"train_batch_size": 8,\n "train_batch_size": 9}', 2, 2, "twice", "remove one of lines 1 and 2"),
    "BOM": ('\ufeff{"train_batch_size": 8}', 1, 1, "byte order mark", "without BOM"),
    "NaN": ('{"train_batch_size": NaN}', 1, 22, "NaN", "write a number"),
    "infinity": ('{"gradient_clipping": -Infinity}', 1, 23, "Infinity", "write a number"),
    "underscores": ('{"train_batch_size": 1_000}', 1, 22, "not written as a number", "write 1000"),
    ".5": ('{"gradient_clipping": .5}', 1, 23, "not written as a number", "write 0.5"),
    "missing comma": ('{"train_batch_size": 8\n "steps_per_print": 1}', 2, 2, "comma is missing", "add a comma"),
    "missing colon": ('{"train_batch_size" 8}', 1, 21, "colon is missing", "VALUE"),
    "missing brace": ('{"train_batch_size": 8', 1, 23, "a { has no }", "add the }"),
    "open string": ('{"train_batch_size: 8}', 1, 2, "no closing quote", "add the quote"),
    "a second value": ('{"train_batch_size": 8} x', 1, 25, "after the end", "remove it"),
    "a list": ("[8]", 1, 1, "not a JSON object", "{ }"),
    "nothing": ("  \n", 2, 1, "empty", "ds-config"),
    "a bad escape": ('{"train_batch_size": 8, "x": "C:\\data"}', 1, 33, "no escape", "write / instead"),
    "no value": ('{"train_batch_size": }', 1, 22, "value is missing", "train_batch_size"),
}


@pytest.mark.parametrize("name", SYNTAX)
def test_a_mistake_of_syntax_is_named_with_its_place(name):
    content, line, column, what, fix = SYNTAX[name]
    found = [each for each in of(content) if what in each.what]
    assert [(each.line, each.column) for each in found] == [(line, column)], of(content)
    assert fix in found[0].fix
    assert found[0].level == ("warning" if name == "duplicate key" else "error")
    if name not in {"duplicate key", "a list", "NaN", "infinity"}:  # which Python accepts
        with pytest.raises(json.JSONDecodeError):
            json.loads(content)


@pytest.mark.parametrize("name", ["trailing comma", "comment #", "comment //", "single quotes", "unquoted key", "BOM"])
def test_deepspeed_itself_reads_what_hjson_accepts(name):
    assert not fails(of(SYNTAX[name][0], Context(program=OWN)))
    assert fails(of(SYNTAX[name][0], Context(program=OWN, reads_json=True)))


def test_all_mistakes_of_a_file_are_found_at_once():
    content = '{\n \'train_batch_size\': 8, // all\n "fp16": {"enabled": True,},\n bf16: {"enabled": false}\n}'
    assert [each.line for each in of(content)] == [2, 2, 3, 3, 4]


KEYS = {
    "unknown at the top": (changed(gradient_cliping=1.0), "warning", "gradient_cliping", "write gradient_clipping"),
    "unknown in zero": (zero(reduce_buckt_size=1), "error", "reduce_buckt_size", "write reduce_bucket_size"),
    "dotted": (
        changed(**{"zero_optimization.reduce_bucket_size": 5e8}), "warning", "zero_optimization.reduce_bucket_size",
        "write it as reduce_bucket_size in the section zero_optimization",
    ),
    "gradient_checkpointing": (changed(gradient_checkpointing=True), "warning", "gradient_checkpointing", "--grad"),
    "wrong level": (changed(reduce_bucket_size=1), "warning", "reduce_bucket_size", "move it into zero_optimization"),
    "wrong level, up": (zero(gradient_clipping=1), "error", "zero_optimization.gradient_clipping", "to the top"),
    "stage 4": (changed(zero_optimization={"stage": 4}), "error", "zero_optimization.stage", "one of 0, 1, 2, 3"),
    "negative bucket": (zero(reduce_bucket_size=-1), "error", "reduce_bucket_size", "more than 0"),
    "string": (zero(reduce_bucket_size="5e8"), "error", "reduce_bucket_size", "write 500000000 without quotes"),
    "whole string": (zero(reduce_bucket_size="500"), "warning", "reduce_bucket_size", "write 500 without quotes"),
    "string at the top": (changed(train_batch_size="8"), "error", "train_batch_size", "write 8 without quotes"),
    "word for bool": (zero(overlap_comm="yes"), "error", "overlap_comm", "write true without quotes"),
    "true for a section": (changed(fp16=True), "error", "fp16", '{ "enabled": true }'),
    "fraction": (zero(reduce_bucket_size=1.5), "error", "reduce_bucket_size", "whole number"),
    "negative clip": (changed(gradient_clipping=-1), "error", "gradient_clipping", "at least 0"),
    "no batch": (changed(train_micro_batch_size_per_gpu=0), "error", "train_micro_batch_size_per_gpu", "more than 0"),
    "unknown device": (zero(offload_optimizer={"device": "gpu"}), "error", "device", "write"),
    "removed": (changed(elasticity={}), "error", "elasticity", "remove it"),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_keys_types_and_ranges(name):
    config, level, key, fix = KEYS[name]
    found = of(config)
    assert [each.level for each in found] == [level], found
    assert found[0].key.endswith(key)
    assert fix in found[0].fix
    assert found[0].line == 1


ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}


def scheduled(kind, **params):
    return changed(optimizer=ADAM, scheduler={"type": kind, "params": params})


RULES = {
    "decay without steps": (scheduled("WarmupDecayLR"), "total_num_steps"),
    "cosine without steps": (scheduled("WarmupCosineLR"), "total_num_steps"),
    "unknown scheduler": (scheduled("WarmupDecay"), 'write "WarmupDecayLR"'),
    "unknown parameter": (scheduled("WarmupLR", warmup_steps=1), "warmup_"),
    "unknown optimizer": (changed(optimizer={"type": "AdmW"}), "adamw"),
    "removed optimizer": (changed(optimizer={"type": "OneBitAdam"}), 'write "AdamW"'),
    "max_grad_norm": (changed(optimizer={"type": "Adam", "params": {"max_grad_norm": 1}}), "gradient_clipping"),
    "fp16 and bf16": (changed(fp16={"enabled": True}), "false"),
    "nvme without a path": (changed(zero_optimization={"stage": 3, "offload_param": {"device": "nvme"}}), "nvme_path"),
    "offload in stage 0": (
        changed(zero_optimization={"stage": 0, "offload_optimizer": {"device": "cpu"}}), 'write "stage": 2',
    ),
    "the batch": (changed(train_batch_size=30, gradient_accumulation_steps=2), "write 16"),
    "a batch without accumulation": (changed(train_batch_size=30), "write 32"),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_rules_of_deepspeed(name):
    config, fix = RULES[name]
    errors = [each for each in of(config, Context(program=OWN, world=4)) if each.level == "error"]
    assert len(errors) == 1, errors
    assert fix.lower() in errors[0].fix.lower()


def test_a_remark_is_no_unknown_key():
    assert of(changed(_comment="for 8 GPUs", **{"//comment1": "x"})) == []


def test_offload_of_parameters_needs_stage_3_and_a_device():
    found = of(zero(offload_param={"device": "cpu"}, offload_optimizer={}))
    assert [(each.level, each.key.rpartition(".")[2]) for each in found] == [
        ("warning", "offload_param"), ("warning", "offload_optimizer"),
    ]  # fmt: skip


def test_bf16_needs_a_gpu_that_has_it():
    (found,) = of(BASE, Context(gpu=find("V100")))
    assert (found.level, found.fix) == ("error", "use fp16")
    assert of(BASE, Context(gpu=find("A100"))) == []


def test_auto_is_an_error_in_a_script_without_transformers():
    config = make(Request(stage=3))
    found = of(config, Context(program=OWN, named="train.py"))
    assert {each.key: each.level for each in found if "auto" in each.what} == {
        "train_batch_size": "error", "train_micro_batch_size_per_gpu": "error", "gradient_accumulation_steps": "error",
        "gradient_clipping": "error", "fp16.enabled": "warning", "bf16.enabled": "warning",
        "zero_optimization.reduce_bucket_size": "warning", "zero_optimization.stage3_prefetch_bucket_size": "warning",
        "zero_optimization.stage3_param_persistence_threshold": "warning",
    }  # fmt: skip
    assert all("train.py" in each.what for each in found if "auto" in each.what)
    assert of(config, trainer()) == of(config) == []


@pytest.mark.parametrize(
    ("key", "value", "typed", "fix"),
    [
        ("train_micro_batch_size_per_gpu", 4, "", "--per_device_train_batch_size 4"),
        ("gradient_accumulation_steps", 4, "--gradient_accumulation_steps 2", "--gradient_accumulation_steps 4"),
        ("gradient_clipping", 0.5, "", "--max_grad_norm 0.5"),
        ("optimizer", {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}, "", "--adam_beta1 0.9 --adam_beta2 0.95"),
        ("optimizer", {"type": "AdamW", "params": {"eps": 1e-6}}, "", "--adam_epsilon 1e-6"),
        ("optimizer", {"type": "AdamW", "params": {"weight_decay": 0.1}}, "--weight-decay=0.2", "--weight_decay 0.1"),
        ("bf16", {"enabled": False}, "--bf16", "--bf16 False"),
        ("bf16", {"enabled": True}, "--bf16 false", "--bf16"),
        ("train_batch_size", 64, "", "--gradient_accumulation_steps 2"),
    ],
)
def test_contradictions_with_arguments_and_their_defaults(key, value, typed, fix):
    (found,) = [each for each in of({key: value}, trainer(typed, world=4)) if each.level == "error"]
    assert found.fix == f'{fix}; or write "auto"'


def test_a_value_that_is_not_known_contradicts_nothing():
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 2e-5}}, "gradient_clipping": 0.5}
    unknown = frozenset({"learning_rate", "max_grad_norm"})
    assert of(config, trainer(unknown=unknown)) == []
    assert of(config, trainer("--learning_rate rate --max_grad_norm x")) == []
    assert of({"train_micro_batch_size_per_gpu": 3}, trainer("--auto_find_batch_size")) == []


def test_the_arguments_of_a_yaml_file_are_named_as_its_keys():
    (found,) = of({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, Context(TRAINER, arguments={}, yaml=True))
    assert found.fix == 'learning_rate: 1.0e-5; or write "auto"'


def test_every_preset_agrees_with_its_matching_arguments():
    for name, request in PRESETS.items():
        config = make(request)
        words = " ".join(matching(config)).split()
        context = trainer(" ".join(words)) if request.auto else Context(OWN, world=1)
        assert not fails(check(text(config), context)), name
    assert matching(make(PRESETS["llama-7b"])) == [
        "--max_grad_norm 1", "--learning_rate 2e-5", "--weight_decay 0", "--warmup_steps 1000", "--fp16",
    ]  # fmt: skip


def test_a_file_that_is_too_large_or_too_deep_is_refused():
    assert "larger than" in of('{"x": "' + "a" * 300_000 + '"}')[0].what
    assert "nested" in of('{"x":' * 100 + "1" + "}" * 100)[0].what
    assert len(of("{" + "a:1," * 5000 + "}")) <= 5200


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8) | st.just("auto"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*sorted(table()["keys"]), "stage", "params", "type", "device", "enabled", "x.y"]), inner
        )
    ),
    max_leaves=12,
)
CONTEXTS = [Context(program, arguments={}, world=4, gpu=find("V100")) for program in (OWN, TRAINER, UNKNOWN)]


@given(st.text(alphabet="{}[]:,\"'#/*\\ \n-+.0123456789eEuTrNaN“，xauto", max_size=60), st.sampled_from(CONTEXTS))  # noqa: RUF001
def test_no_text_breaks_the_check(content, context):
    for each in check(content, context):
        assert each.what
        assert "\n" not in each.text("ds.json")


@given(JSON, st.sampled_from(CONTEXTS))
def test_no_value_breaks_the_check(value, context):
    for each in check(json.dumps(value), context):
        assert each.what


@given(
    st.lists(
        st.text(max_size=12) | st.sampled_from(["--learning_rate", "1e400", "--fp16", "--max_steps=9"]), max_size=8
    )
)
def test_no_command_line_breaks_the_check(words):
    check(GUIDE, Context(program=TRAINER, arguments=parse(words), world=2))
