"""Every number that the trainer takes has a bound, on the command line and in files; what contradicts is refused."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
from pathlib import Path

import pytest
import yaml
from case_table import every_case

from trainer.lm import config, families, rules
from trainer.lm.errors import RefusedError
from trainer.lm.options import from_arguments, merge, option, read

ROOT = Path(__file__).parents[2]
NUMBERS = [each for each in dataclasses.fields(config.Config) if each.type in ("int", "float")]
HUGE = 10**400


def outside(bound, kind):
    """Values that a bound does not allow: next to each of its limits, and values that no bound allows."""
    step = 1 if kind is int else 1e-3
    near = [limit - step for limit in (bound.low, bound.above) if limit is not None]
    near += [max(limit + step, math.nextafter(limit, math.inf)) for limit in (bound.high,) if limit is not None]
    near += [limit for limit in (bound.above, bound.below) if limit is not None]
    most = [HUGE, -HUGE] if kind is int else [math.nan, math.inf, -math.inf, 1e308, -1e308]
    return [kind(value) if math.isfinite(value) else value for value in near if value not in bound.also] + most


@every_case("each", NUMBERS, ids=lambda each: each.name)
def test_every_number_has_a_bound_that_the_command_line_and_files_keep(each, tmp_path):
    bound = each.metadata.get("bound")
    assert bound is not None, f"{each.name} has no bound"
    kind = type(each.default)
    assert bound.allows(each.default)
    assert not bound.allows(HUGE)
    assert not bound.allows(-HUGE)
    word = option(each.name)
    wrong = outside(bound, kind)
    assert len(wrong) >= 3
    for number, value in enumerate([*wrong, *([str(HUGE), "nan", ".inf"] if kind is float else [])]):
        if not isinstance(value, str):
            with pytest.raises(RefusedError) as refused:
                from_arguments(["--data", "x", f"{word}={value}"])
            assert str(refused.value).startswith(f"{word} {bound.problem(value)}")
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump({"data": "x", each.name: value}))
        with pytest.raises(RefusedError) as refused:
            from_arguments(["--config", str(path)])
        assert str(refused.value).startswith(f"{path}: {each.name}")
        assert len(str(refused.value)) < 300 + len(str(path))
    path = tmp_path / "options.json"
    path.write_text(json.dumps({"data": "x", each.name: wrong[0]}))
    with pytest.raises(RefusedError) as refused:
        from_arguments(["--config", str(path)])
    assert str(refused.value).startswith(f"{path}: {each.name} {bound.problem(wrong[0])}")


@every_case("each", NUMBERS, ids=lambda each: each.name)
def test_a_checkpoint_of_a_version_without_bounds_is_refused_too(each):
    wrong = outside(each.metadata["bound"], type(each.default))[0]
    with pytest.raises(RefusedError, match=rf"^out/iter_5: {each.name} must be "):
        merge(read(["--data", "x"]), {each.name: wrong}, "out/iter_5")


def test_help_shows_every_range_and_every_relation(capsys):
    with pytest.raises(SystemExit) as ended:
        from_arguments(["--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for each in NUMBERS:
        assert f"({each.default}; {each.metadata['bound']})" in shown, each.name
    for relation in rules.RELATIONS:
        assert relation.rule in shown


def test_help_names_the_published_sizes(capsys):
    with pytest.raises(SystemExit):
        from_arguments(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"a published size ({', '.join(families.PUBLISHED)})" in shown


CONTRADICTIONS = [
    (["--n-head", "5"], "--n-embd 768 (default) must be a multiple of --n-head 5"),
    (["--warmup-iters", "11", "--max-iters", "10"], "--warmup-iters 11 must be at most --max-iters 10"),
    (["--warmup-iters", "9", "--decay-iters", "5"], "--decay-iters 5 must be 0 or at least --warmup-iters 9"),
    (["--min-lr", "1e-3"], "--min-lr 0.001 must be at most --learning-rate 0.0003 (default)"),
    (
        ["--patience", "2", "--eval-interval", "0"],
        "--patience 2 counts evaluations, but --eval-interval 0 turns them off",
    ),
    (["--offload", "optimizer"], "--offload optimizer needs FSDP or DeepSpeed, not --engine plain (default)"),
    (
        ["--offload", "all", "--engine", "zero2"],
        "--offload all: only FSDP and ZeRO-3 shard parameters, not --engine zero2",
    ),
    (
        ["--offload", "optimizer", "--engine", "zero0"],
        "--offload optimizer: --engine zero0 cannot shard the optimizer",
    ),
    (
        ["--offload", "optimizer", "--engine", "fsdp"],
        "--offload optimizer: with --engine fsdp parameters and optimizer are in the same memory",
    ),
    (["--compile", "whole", "--engine", "fsdp"], "--compile whole: --engine fsdp gathers weights between"),
    (["--coalesce"], "--coalesce True: only zero2, zero3 and fsdp"),
    (["--engine", "zero1", "--reduce-dtype", "bfloat16"], "--reduce-dtype bfloat16 needs the engine plain or fsdp"),
    (["--deepspeed-config", "x"], "--deepspeed-config x needs DeepSpeed, not --engine plain (default)"),
    (
        ["--lora-rank", "8", "--init", "x", "--engine", "zero2"],
        "--lora-rank 8 needs the engine plain or fsdp, not --engine",
    ),
    (["--lora-rank", "8"], "--lora-rank 8: adapters need a trained model, not --init scratch (default)"),
    (["--quantize", "nf4"], "--quantize nf4: only frozen weights can have 4 bits, but --lora-rank 0 (default)"),
    (
        ["--quantize", "nf4", "--lora-rank", "8", "--init", "x", "--engine", "fsdp"],
        "--quantize nf4: weights in 4 bits are whole on each rank, but --engine fsdp shards them",
    ),
    (["--fp8", "auto", "--engine", "zero1"], "--fp8 auto needs the engine plain or fsdp, and all weights trained,"),
    (["--fp8", "auto", "--compile", "off"], "--fp8 auto needs a compiled model in bfloat16, not --compile off"),
    (["--optimizer", "muon", "--engine", "zero1"], "--optimizer muon needs the engine plain or fsdp, not --engine"),
    (["--optimizer", "muon", "--engine", "fsdp"], "--optimizer muon needs whole matrices, but --engine fsdp"),
    (
        ["--optimizer", "muon", "--lora-rank", "8", "--init", "x"],
        "--optimizer muon is for whole matrices, not for adapters of --lora-rank 8",
    ),
    (["--parts", "vision,vision"], "--parts vision,vision: not all, and not some of vision,projector,language"),
    (
        ["--parts", "language", "--projector-lr", "1e-3"],
        "--vision-lr -1.0 (default), --projector-lr 0.001: --parts language freezes this part",
    ),
    (["--parts", "vision", "--lora-rank", "8", "--init", "x"], "--parts vision: --lora-rank 8 freezes all weights"),
    (["--vision", "v"], "--vision v: a tower needs a trained language model, not --init scratch (default)"),
    (["--vision", "v", "--init", "x", "--lora-rank", "8"], "--vision v: its new projector is no adapter of --lora"),
    (["--profile-steps", "5:2"], "--profile-steps 5:2: not FIRST:LAST, from 1, at most 100 steps"),
    (
        ["--epochs", "2", "--sampling", "with-replacement"],
        "--epochs 2: --sampling with-replacement has no passes over the data",
    ),
    (["--model", "gpt2", "--n-layer", "3"], "--n-layer 3: gpt2 has 12"),
]


@every_case("options, what", CONTRADICTIONS)
def test_options_that_contradict_each_other_are_refused(options, what):
    with pytest.raises(RefusedError) as refused:
        from_arguments(["--data", "x", *options])
    assert str(refused.value).startswith(what)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("4:6", (4, 6)),
        ("1:100", (1, 100)),
        ("1:101", None),
        ("0:1", None),
        ("6:4", None),
        ("4", None),
        ("9" * 10 + ":1", None),
    ],
)
def test_the_steps_to_profile_are_bounded(text, steps):
    assert config.steps_to_profile(text) == steps


def test_every_relation_is_tested():
    assert len(CONTRADICTIONS) == len(rules.RELATIONS) + 1


def test_a_relation_names_the_file_and_the_checkpoint(tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text("warmup_iters: 50\ndata: x\n")
    with pytest.raises(RefusedError) as refused:
        merge(read(["--config", str(path)]), {"max_iters": 20}, "out/iter_5")
    assert str(refused.value) == f"{path}: warmup_iters 50 must be at most --max-iters 20 (out/iter_5)"


@pytest.mark.parametrize("text", ["data: 5", "data: [1, 2]", "data: {a: b}", "max_iters: [1]", "grad_clip: true", "{"])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    (tmp_path / "options.yaml").write_text(text + "\n")
    with pytest.raises(RefusedError, match=r"options\.yaml"):
        from_arguments(["--config", str(tmp_path / "options.yaml")])


def test_an_accumulation_that_contradicts_the_global_batch_is_refused():
    reported = from_arguments(["--data", "x", "--batch-size", "4", "--accumulation", "4", "--global-batch", "64"])
    assert config.accumulation(reported, 4) == 4
    with pytest.raises(RefusedError, match=r"--accumulation 4: --global-batch 64 is --batch-size 4 x 2 ranks x 8"):
        config.accumulation(reported, 2)


def parsers(program):
    """The number options of a program whose imports this machine may lack, from its source."""
    tree = ast.parse((ROOT / f"trainer/lm/{program}.py").read_text())
    (made,) = (each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "make_parser")
    return [each for each in ast.walk(made) if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)]


@pytest.mark.parametrize("program", ["prepare", "sample", "export"])
def test_the_other_programs_declare_numbers_with_bounds_only(program):
    calls = parsers(program)
    kinds = [
        keyword.value.id
        for call in calls
        if call.func.attr == "add_argument"
        for keyword in call.keywords
        if keyword.arg == "type"
    ]
    assert set(kinds) <= {"Path"}
    count = sum(call.func.attr == "number" for call in calls)
    assert count == {"prepare": 4, "sample": 5, "export": 0}[program]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--grad-clip", "-1"], "--grad-clip must be at least 0"),
        (["--learning-rate", "nan"], "--learning-rate must be more than 0"),
        (["--dropout", "2"], "--dropout must be at least 0 and less than 1"),
        (["--dropout", "1"], "--dropout must be at least 0 and less than 1"),
        (["--beta1", "1.5"], "--beta1 must be at least 0 and less than 1"),
        (["--beta2", "1"], "--beta2 must be at least 0 and less than 1"),
        (["--max-iters", "10", "--warmup-iters", "20"], "--warmup-iters 20 must be at most --max-iters 10"),
        (["--eval-interval", "-1"], "--eval-interval must be at least 1"),
        (["--save-interval", "-1"], "--save-interval must be at least 1"),
        (["--log-interval", "-1"], "--log-interval must be at least 1"),
        (["--log-interval", "0"], "--log-interval must be at least 1"),
        (["--keep", "-1"], "--keep must be at least 0"),
        (["--weight-decay", "-1"], "--weight-decay must be at least 0"),
        (["--epsilon", "0"], "--epsilon must be more than 0"),
        (["--min-lr", "-2"], "--min-lr must be at least 0"),
        (["--n-layer", "0"], "--n-layer must be at least 1"),
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["--eval-iters", "0"], "--eval-iters must be at least 1"),
        (["--seed", "-1"], "--seed must be at least 0"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_values_that_train_the_wrong_model_silently_are_refused(words, error):
    """The ranges themselves: a bound that allows such a value is a mistake too."""
    with pytest.raises(RefusedError) as refused:
        from_arguments(["--data", "x", *words])
    assert str(refused.value).startswith(error)
