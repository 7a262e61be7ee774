"""LoRA computes what peft computes, trains, resumes exactly, and exports adapters and merged weights."""

import json
import shutil

import pytest
from adapted_cases import ADAPTED
from trainings import HERE

LORA = ["--lora-rank", "4", "--learning-rate", "3e-2", "--weight-decay", "0", "--init", "base/latest"]


@pytest.fixture(scope="module")
def compared(gpt, tmp_path_factory):
    result = gpt.run(HERE / "adapted.py", tmp_path_factory.mktemp("adapted"))
    assert result.returncode == 0, result.stderr
    return {row["case"]: row for row in map(json.loads, result.stdout.splitlines()) if "case" in row}


@pytest.mark.parametrize("case", ADAPTED)
def test_it_computes_what_peft_computes(compared, case):
    row = compared[case]
    assert max(row["logits"], row["gradient"]) < 5e-6, row
    assert row["unlike"] == []
    assert row["trained"][0] == row["trained"][1] == row["stored"]


@pytest.mark.parametrize("case", ADAPTED)
def test_exports_are_what_peft_reads_and_merges(compared, case):
    row = compared[case]
    assert max(row["adapter"], row["merged logits"]) < 1e-5, row
    assert row["merged"] < 1e-6


@pytest.fixture(scope="module")
def trained(gpt):
    """A base, and trainings of adapters for it: of six steps, of three and three more, and with dropout."""
    runs = [
        ["--out", "base", "--max-iters", "30", "--eval-interval", "30", "--learning-rate", "1e-2"],
        ["--out", "adapted", *LORA, "--max-iters", "12"],
        ["--out", "dropped", *LORA, "--lora-dropout", "0.2"],
        ["--out", "halves", *LORA, "--lora-dropout", "0.2", "--max-iters", "3", "--decay-iters", "6"],
        ["--out", "halves", "--resume", "latest", "--max-iters", "6"],
    ]
    found = gpt.session(runs)
    assert [each.refused for each in found] == [None] * len(runs)
    return found


def test_the_loss_falls_from_that_of_the_base(trained):
    base, adapted, *_ = trained
    losses = adapted.losses
    assert abs(losses[1] - base.losses[30]) < 0.5
    assert losses[12] < losses[1] - 0.02
    assert "LoRA: rank 4, all, 4,096 trained parameters\n" in (adapted.out / "train.log").read_text()


def test_a_checkpoint_contains_the_adapters_only(trained):
    _, adapted, *_ = trained
    record = json.loads((adapted.out / "iter_12/complete.json").read_text())
    # 2 layers: qkv 32+96, out 32+32, up 32+128, down 128+32, of rank 4.
    assert record["files"] == {"part-00000-of-00001.safetensors": 2 * 4 * (128 + 64 + 160 + 160)}
    assert record["base"]["folder"].endswith("base/iter_30")


def test_a_resume_is_exact(trained, gpt):
    _, _, whole, _, halves = trained
    assert {step: whole.losses[step] for step in (4, 5, 6)} == {step: halves.losses[step] for step in (4, 5, 6)}
    stored = [
        (gpt.folder / name / "iter_6/part-00000-of-00001.safetensors").read_bytes() for name in ("dropped", "halves")
    ]
    assert stored[0] == stored[1]


def test_two_ranks_share_the_adapters(trained, gpt):
    _, adapted, *_ = trained
    whole = [*LORA, "--global-batch", "8", "--batch-size", "4", "--max-iters", "12"]
    two, sharded, plain, fsdp, more = gpt.session(
        [
            ["--out", "lora-two", *whole, "--save-interval", "6"],
            ["--out", "lora-two-fsdp", *whole, "--save-interval", "6", "--engine", "fsdp"],
            [
                "--out",
                "lora-two-fsdp>plain",
                "--resume",
                "lora-two-fsdp/iter_6",
                "--max-iters",
                "12",
                "--engine",
                "plain",
            ],
            ["--out", "lora-two>fsdp", "--resume", "lora-two/iter_6", "--max-iters", "12", "--engine", "fsdp"],
            ["--out", "adapted", "--resume", "latest", "--max-iters", "15"],
        ],
        ranks=2,
    )
    assert two.refused is sharded.refused is more.refused is None
    for step, loss in two.losses.items():
        assert loss == pytest.approx(adapted.losses[step], abs=2e-3)
    for key in ("loss", "grad_norm", "eval_loss"):
        assert sharded.records(key) == pytest.approx(two.records(key), rel=1e-5)
    for resumed in (plain, fsdp):
        assert resumed.losses == pytest.approx({step: two.losses[step] for step in range(7, 13)}, rel=1e-5)
    assert max(more.losses) == 15


def test_sharded_adapters_train_a_base_in_sixteen_bits(trained, gpt):
    assert trained
    options = [*LORA, "--dtype", "bfloat16", "--lora-targets", "c_fc,c_attn"]
    plain, fsdp, again = gpt.session(
        [
            ["--out", "lora-bfloat16", *options],
            ["--out", "lora-bfloat16-fsdp", *options, "--engine", "fsdp", "--offload", "all"],
            ["--out", "lora-bfloat16-fsdp-again", "--resume", "lora-bfloat16-fsdp/iter_3"],
        ],
        ranks=2,
    )
    assert fsdp.losses == pytest.approx(plain.losses, abs=3e-3)
    assert again.losses == {step: fsdp.losses[step] for step in (4, 5, 6)}
    gpt.program("export", "lora-bfloat16-fsdp/latest", "lora-bfloat16-merged")


def test_it_is_sampled_and_exported_with_its_base(trained, gpt):
    gpt.program("export", "dropped/latest", "dropped-merged")
    options = ["--tokens", "20", "--temperature", "0"]
    assert gpt.program("sample", "dropped/latest", *options) == gpt.program("sample", "dropped-merged", *options)
    shutil.copytree(gpt.folder / "dropped-merged", gpt.folder / "moved")
    again, unlike = gpt.session(
        [
            ["--out", "again", "--init", "dropped-merged", "--lora-rank", "2", "--lora-targets", "c_attn"],
            ["--out", "other", "--init", "dropped-merged"],
        ]
    )
    assert again.refused is unlike.refused is None
    shutil.move(gpt.folder / "dropped-merged", gpt.folder / "away")
    gone = gpt.run("-m", "trainer.lm.export", "again/latest", "gone")
    assert gone.returncode == 2
    assert "its base model" in gone.stderr
    assert not list(gpt.folder.glob("*gone*"))
    gpt.program("export", "again/latest", "found", "--base", "moved")
    not_adapters = gpt.run("-m", "trainer.lm.export", "other/latest", "whole", "--adapter")
    assert "other/iter_6 contains no adapters; export it without --adapter" in not_adapters.stderr


@pytest.mark.parametrize(
    ("options", "what", "fix"),
    [
        (
            [*LORA, "--lora-targets", "c_attn,q_proj"],
            "--lora-targets c_attn,q_proj: a gpt2 model has no q_proj",
            "--lora-targets all, or some of c_attn,c_proj,c_fc",
        ),
        (
            ["--init", "halves/latest"],
            "halves/iter_6 contains adapters, not a whole model",
            "python -m trainer.lm.export halves/iter_6 MERGED, then --init MERGED",
        ),
        (
            [*LORA, "--quantize", "nf4"],
            "--quantize nf4 needs the package bitsandbytes, which is not installed",
            "pip install bitsandbytes; or --quantize none",
        ),
    ],
)
def test_it_is_refused(trained, gpt, options, what, fix):
    assert trained
    (refused,) = gpt.session([["--out", "refused", *options]])
    assert (refused.refused["what"], refused.refused["fix"]) == (what, fix)


def test_a_resume_with_other_adapters_or_another_base_is_refused(trained, gpt):
    base, *_ = trained
    shutil.copytree(gpt.folder / "dropped", gpt.folder / "kept")
    shutil.copytree(base.out, gpt.folder / "changed")
    (path,) = (gpt.folder / "changed/iter_30").glob("part-*")
    content = path.read_bytes()
    path.write_bytes(content[:-4] + bytes(4))
    more = ["--out", "kept", "--resume", "latest", "--max-iters", "9"]
    rank, other, same = gpt.session(
        [[*more, "--lora-rank", "8"], [*more, "--init", "changed/latest"], [*more, "--init", "base/latest"]]
    )
    assert rank.refused["what"] == "--lora-rank 8: kept/iter_6 has 4"
    assert "its adapters belong to another model than the one in changed" in other.refused["what"]
    assert same.refused is None
