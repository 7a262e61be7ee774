"""Every option with a number has a range, on every command line, and refuses other values."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import math

import click
import pytest
from case_table import every_case

from provision.cli import cli
from provision.cli.options import Number
from trainer.ds_config import ConfigError, Request, find, make
from trainer.ds_config.__main__ import main as ds_config
from trainer.ds_config.request import OPTIONS
from trainer.plan import BOUNDS, MODELS, Cluster, PlanError, Training, lines, plan

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 1, "vocab_size": 9, "n_positions": 9}
NONSENSE = ("nan", "NaN", "inf", "-inf", "1e999", "-1", "-0.5", "9" * 30, "9" * 5000, "1e30", "²", "", "0x10", "None")
NUMERIC = [each for each in OPTIONS if each.type in {int, float} and not each.choices]


def commands(group: click.Group, words: tuple[str, ...] = ()):
    """Every command below a group with its words."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from commands(command, (*words, name))
        else:
            yield " ".join((*words, name)), command


PARAMETERS = [(name, each) for name, command in commands(cli) for each in command.params]
NUMBERS = [(name, each) for name, each in PARAMETERS if isinstance(each.type, Number)]


def test_every_command_is_walked():
    assert len({name for name, _ in PARAMETERS}) > 30
    assert len(NUMBERS) > 30


@every_case("name, parameter", PARAMETERS, ids=lambda case: f"{case[0]} {case[1].name}")
def test_every_numeric_parameter_has_a_bound(name, parameter):
    """click's own numbers take nan, and its ranges take inf."""
    kinds = (click.types.IntParamType, click.types.FloatParamType)
    assert not isinstance(parameter.type, kinds), f"{name} {parameter.opts[0]}: use provision.cli.options"
    if isinstance(parameter.type, Number):
        assert parameter.type.bound.high is not None
        assert parameter.type.bound.low is not None or parameter.type.bound.above is not None


@every_case("name, parameter", NUMBERS, ids=lambda case: f"{case[0]} {case[1].name}")
def test_invalid_number_is_refused_without_a_traceback(name, parameter):
    for text in NONSENSE:
        with pytest.raises(click.BadParameter) as refused:
            parameter.type.convert(text, parameter, click.Context(cli))
        assert str(parameter.type.bound) in refused.value.message
        assert len(refused.value.message) < 200


@every_case("name, parameter", NUMBERS, ids=lambda case: f"{case[0]} {case[1].name}")
def test_the_help_shows_the_range(name, parameter):
    context = click.Context(click.Command("x", params=[parameter]))
    text = " ".join(context.get_help().split())
    assert parameter.type.brief_range in text
    if parameter.default is not None and not callable(parameter.default) and isinstance(parameter.default, int | float):
        assert parameter.type.bound.allows(parameter.default)


def test_every_numeric_option_of_ds_config_has_a_bound():
    numeric = {name for name, each in inspect.get_annotations(Request, eval_str=True).items() if "int" in str(each)}
    numeric |= {name for name, each in inspect.get_annotations(Request, eval_str=True).items() if "float" in str(each)}
    assert {each.field for each in NUMERIC} == numeric - {"stage"}
    for each in NUMERIC:
        assert each.bound is not None, each.flag


@pytest.mark.parametrize("option", NUMERIC, ids=lambda option: option.field)
def test_library_refuses_invalid_numbers(option):
    for value in (math.nan, math.inf, -math.inf, -1, -5, 10**30, 1e30):
        with pytest.raises(ConfigError, match=f"{option.flag} must be"):
            make(Request(optimizer=True, **{option.field: value}))


@pytest.mark.parametrize("option", NUMERIC, ids=lambda option: option.field)
def test_module_without_clusterctl_refuses_invalid_numbers(option):
    for text in NONSENSE:
        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            try:
                code = ds_config([f"{option.flag}={text}"])
            except SystemExit as ended:
                code = ended.code
        assert code == 2, text
        assert option.flag in err.getvalue()
        assert "Traceback" not in err.getvalue()


def test_module_without_clusterctl_shows_the_ranges(capsys):
    with pytest.raises(SystemExit):
        ds_config(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for option in NUMERIC:
        assert f"{option.help} [{option.bound}]" in shown


def test_a_warm_up_is_no_longer_than_the_training():
    with pytest.raises(ConfigError, match="--warmup 50 must be at most --steps, which is 20"):
        make(Request(optimizer=True, lr=1e-4, schedule="WarmupDecayLR", warmup=50, steps=20))
    assert make(Request(optimizer=True, lr=1e-4, schedule="WarmupDecayLR", warmup=20, steps=20))


FIELDS = {
    "--nodes": "nodes", "--gpus": "gpus", "--gpu-memory": "memory", "--link": "link", "--host-memory": "host",
    "--cores": "cores", "--seq": "seq", "--global-batch": "global_batch", "--lora-rank": "rank",
    "--efficiency": "efficiency", "--disk": "disk", "--failures": "failures",
}  # fmt: skip


def test_every_bound_of_plan_is_tested():
    assert FIELDS.keys() == BOUNDS.keys()


@pytest.mark.parametrize("option", BOUNDS)
def test_plan_with_invalid_numbers_is_refused(option):
    for value in (math.nan, math.inf, -math.inf, -1, 10**30):
        cluster = {"nodes": 1, "gpus": 8, "gpu": find("A100"), "memory": 80}
        training = {"shape": MODELS["gpt2"], "seq": 1024, "global_batch": 256}
        (cluster if FIELDS[option] in Cluster.__dataclass_fields__ else training)[FIELDS[option]] = value
        with pytest.raises(PlanError, match=f"{option} must be"):
            plan(Training(**training), Cluster(**cluster))


def test_the_rank_of_lora_is_no_larger_than_the_model():
    with pytest.raises(PlanError, match="--lora-rank 1000 is larger than the width of gpt2, 768"):
        plan(Training(MODELS["gpt2"], "lora", 1024, 256, rank=1000), Cluster(1, 8, find("A100"), 80))


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("nan", "--link must be at least 0.001"),
        ("inf", "--link must be at least 0.001"),
        ("-3", "--link must be at least 0.001"),
        ('{"rows": [{"op": "all_reduce", "bytes": 8, "busbw": NaN}]}', "must be at least 0.001"),
        ('{"rows": [{"op": "all_reduce", "bytes": 8, "busbw": "fast"}]}', "not the output of bench nccl --json"),
        ("[" * 5000, "not the output of bench nccl --json"),
    ],
)
def test_invalid_link_is_refused(run, tmp_path, text, printed):
    word = text
    if text[0] in "{[":
        (tmp_path / "bench.json").write_text(text)
        word = "bench.json"
    code, _, err = run("plan", "gpt2", "-n", 2, f"--link={word}")
    assert code == 2
    assert printed in " ".join(err.split())


@pytest.mark.parametrize(
    ("config", "printed"),
    [
        ("[" * 5000 + "]" * 5000, "is nested"),
        ('{"model_type": "gpt2", "n_layer": %s}' % ("9" * 5000), "digits"),
        (
            json.dumps({**GPT2, "n_layer": 999999999999}),
            "n_layer must be at least 1 and at most 100000000, not 999999999999",
        ),
    ],
)
def test_a_hostile_config_is_refused(run, tmp_path, config, printed):
    (tmp_path / "config.json").write_text(config)
    code, _, err = run("plan", "config.json", "-n", 1)
    assert code == 2
    assert printed in " ".join(err.split())


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b"])
@pytest.mark.parametrize("edge", ["low", "high"])
def test_plan_at_the_bounds_is_readable(name, edge):
    ends = {option: getattr(bound, edge) for option, bound in BOUNDS.items()}
    batch = max(ends["--global-batch"], ends["--nodes"] * ends["--gpus"])
    cluster = Cluster(ends["--nodes"], ends["--gpus"], find("A100"), ends["--gpu-memory"], ends["--link"])
    seq = min(ends["--seq"], MODELS[name].context)
    made = plan(Training(MODELS[name], "full", seq, batch, efficiency=ends["--efficiency"]), cluster)
    assert all(len(text) <= 90 for text, _ in lines(made))
