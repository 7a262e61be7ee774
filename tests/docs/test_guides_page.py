"""The figures of docs/guides.md that need no GPU and no training environment are what clusterctl computes."""

import io
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from doc_blocks import ROOT, blocks, lines

from provision.cli import cli
from provision.output import Reporter
from trainer.ds_config.gpus import find
from trainer.plan.inputs import Cluster, Setup, Training
from trainer.plan.models import MODELS
from trainer.plan.search import examine

PAGE = (ROOT / "docs/guides.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")]
GIB = 2**30
A100 = find("NVIDIA A100-SXM4-40GB")
# The guide's configuration: ZeRO-3, all state on the CPU, DeepSpeed's default buckets, overlap_comm.
SETTINGS = Setup(
    3, optimizer_at="cpu", parameters_at="cpu", micro_batch=2, bucket=500_000_000, overlap=True, live=1_000_000_000
)
TYPED = "deepspeed --num_gpus=4 --module training.run_clm --model_name_or_path llama-7b --dataset_name wikitext"
TYPED += " --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --deepspeed ds_config.json --output_dir out"


def option(**changes):
    """What the plan says of the guide's settings with changes."""
    training = Training(MODELS["llama-7b"], "full", 1024, 64, precision=changes.pop("precision", "fp16"))
    return examine(training, Cluster(1, 4, A100, 40.0), SETTINGS.with_(**changes))


def gib(**changes):
    return round(option(**changes).memory.total / GIB, 1)


def row(claim):
    (found,) = [each for each in ROWS if claim in each.split("|")[1]]
    return found


def output(*argv):
    """What a command prints."""
    out = io.StringIO()
    reporter = Reporter(out=out, err=out)
    CliRunner().invoke(cli, argv, obj=reporter)
    reporter.finish()
    return out.getvalue()


@pytest.fixture(scope="module")
def plan():
    (command,) = [line for block in blocks(PAGE) for line in lines(block) if line.startswith("clusterctl plan")]
    return output(*shlex.split(command)[1:])


def test_the_plan_prints_the_lines_of_the_page(plan):
    shown = [line[4:] for block in blocks(PAGE) for line in block.splitlines() if re.match(r" {4}[> ] ZeRO", line)]
    assert len(shown) == 4
    assert set(shown) <= set(plan.splitlines())


def test_the_plan_rejects_what_the_page_says_does_not_fit(plan):
    assert "ZeRO-1 does not fit: a GPU lacks 17.2 GiB" in plan
    assert "ZeRO-2 does not fit: a GPU lacks 7.4 GiB" in plan
    assert "ZeRO-1 lacks 17.2 GiB and ZeRO-2 7.4" in row("need ZeRO-3 with offload")
    saved = [re.search(rf"\d {what} +([\d.]+)", plan)[1] for what in ("parameters on the CPU", "Adam on the CPU")]
    assert "{} GiB for the parameters, {} for the optimizer".format(*saved) in row("more offload")


def test_the_guides_settings_need_what_the_page_says():
    found = option()
    shown = f"{gib()} GiB of a GPU, {found.host / GIB:.1f} GiB of\nthe host, and {found.speed.tokens:,.0f} tokens/s"
    assert shown in PAGE
    batches = "{} GiB for 2 samples, {} for 4, {} for 8".format(*(gib(micro_batch=size) for size in (2, 4, 8)))
    assert batches in row("2 to 4 samples in fp16")
    assert gib(precision="bf16") == gib()


def test_what_saves_memory_saves_what_the_page_says():
    slower = option(checkpointing=True).speed.tokens / option().speed.tokens
    assert f"{gib(checkpointing=True)} instead of {gib()} GiB, at {slower:.2f} of the speed" in PAGE
    saved = gib() - gib(bucket=73_000_000, live=100_000_000)
    assert f"save {saved:.1f} GiB" in row("stage3_max_live_parameters")


def test_the_guides_files_have_the_errors_that_the_page_names(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "examples/run_clm", tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    config = Path("ds_config.json")
    check = ("ds-config", "--check", str(config), "--world", "4", "--", *TYPED.split())
    assert output(*check).count(": error: ") == 5
    keys = {"gradient_checkpointing": True, "zero_optimization.reduce_bucket_size": 5e8}
    config.write_text(json.dumps({**json.loads(config.read_text(encoding="utf-8")), **keys}), encoding="utf-8")
    found = output(*check)
    assert "gradient_checkpointing is no key of DeepSpeed" in found
    assert '"zero_optimization.reduce_bucket_size" is no key' in found


@pytest.mark.parametrize(
    "line",
    [
        "iter 20: loss 2.4519, time 81.20ms, lr 3.0000e-04, norm 0.8123",
        "step 20: train loss 2.4410, val loss 2.4620, perplexity 11.73",
        "{'loss': '5.781', 'grad_norm': '3.722', 'learning_rate': '0.005', 'epoch': '0.125'}",
    ],
)
def test_the_guides_parser_of_logs_finds_no_pair_in_these_lines(line):
    assert "loss" in line
    assert not (re.search(r"step (\d+)", line) and re.search(r"loss: (\d+\.\d+)", line))
