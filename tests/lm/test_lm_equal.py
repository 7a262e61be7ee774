"""The same training with one process or two, torch alone or DeepSpeed, with or without an interruption."""

import itertools
import json
import statistics

import pytest

ENGINES = ("plain", "fsdp", "zero0", "zero1", "zero2", "zero3")
# Each engine writes for torch alone and reads what torch alone wrote: the format is one, so other pairs add little.
PAIRS = [("plain", engine) for engine in ENGINES] + [(engine, "plain") for engine in ENGINES[1:]]
PAIRS += [("zero3", "zero2"), ("zero1", "zero3"), ("fsdp", "zero3"), ("zero3", "fsdp"), ("fsdp", "fsdp")]
TWO = ("--batch-size", 2, "--accumulation", 2)  # of each of two ranks: eight samples a step


@pytest.fixture(scope="module")
def alone(gpt):
    """Trainings of one process, by name."""
    runs = {
        "eight": ["--batch-size", 8],
        "accumulated": ["--batch-size", 2, "--accumulation", 4],
        "fsdp": ["--engine", "fsdp", "--batch-size", 8],
        "fsdp-full": ["--engine", "fsdp", "--batch-size", 4, "--accumulation", 2, "--checkpointing", "full"],
        "fsdp-selective": ["--engine", "fsdp", "--batch-size", 8, "--checkpointing", "selective"],
        "global": ["--batch-size", 4, "--global-batch", 8],
        "checkpointing": ["--batch-size", 8, "--checkpointing", "full"],
        "compiled": ["--batch-size", 8, "--compile", "whole"],
        "compiled-layers": ["--batch-size", 8, "--compile", "blocks"],
        "bfloat16": ["--batch-size", 8, "--dtype", "bfloat16"],
        "bfloat16-fsdp": ["--batch-size", 8, "--dtype", "bfloat16", "--engine", "fsdp"],
        "float16-fsdp": ["--batch-size", 8, "--dtype", "float16", "--engine", "fsdp"],
        "float16": ["--batch-size", 8, "--dtype", "float16"],
        "dropout": ["--batch-size", 8, "--dropout", 0.1],
        "dropout-resumed": ["--batch-size", 8, "--dropout", 0.1, "--resume", "alone-dropout/iter_3"],
        "tracked": ["--batch-size", 8, "--trackers", "tensorboard"],
        "weighted": ["--batch-size", 8, "--data", "first:0.3", "second:0.7"],
    }
    found = gpt.session([[*argv, "--out", f"alone-{name}"] for name, argv in runs.items()])
    return dict(zip(runs, found, strict=True))


@pytest.fixture(scope="module")
def together(gpt, alone):
    """Trainings of two processes: each engine, and each resumed from the third step of another one."""
    runs = {engine: ["--engine", engine, "--save-async", "on"] for engine in ENGINES}
    runs["offload-2"] = ["--engine", "zero2", "--offload", "optimizer"]
    runs["offload-3"] = ["--engine", "zero3", "--offload", "all"]
    runs["offload-fsdp"] = ["--engine", "fsdp", "--offload", "all"]
    runs["coalesced-fsdp"] = ["--engine", "fsdp", "--coalesce"]
    runs["coalesced-2"] = ["--engine", "zero2", "--coalesce"]
    runs["coalesced-3"] = ["--engine", "zero3", "--coalesce"]
    runs["bfloat16"] = ["--dtype", "bfloat16"]
    runs["bfloat16-narrow"] = ["--dtype", "bfloat16", "--reduce-dtype", "bfloat16"]
    runs["bfloat16-fsdp"] = ["--dtype", "bfloat16", "--engine", "fsdp", "--reduce-dtype", "bfloat16"]
    runs["bfloat16-zero0"] = ["--dtype", "bfloat16", "--engine", "zero0"]
    runs["bfloat16-zero2"] = ["--dtype", "bfloat16", "--engine", "zero2"]
    for before, after in PAIRS:
        runs[f"{before}>{after}"] = ["--engine", after, "--resume", f"two-{before}/iter_3"]
    for before, after in (("bfloat16", "zero2"), ("bfloat16-zero2", "plain"), ("bfloat16-zero0", "zero0")):
        argv = ["--dtype", "bfloat16", "--engine", after, "--resume", f"two-{before}/iter_3"]
        runs[f"{before}>{after}"] = argv
    runs["one>two"] = ["--resume", "alone-eight/iter_3"]
    runs["one>two-fsdp"] = ["--resume", "alone-fsdp/iter_3"]
    found = gpt.session([[*TWO, *argv, "--out", f"two-{name}"] for name, argv in runs.items()], ranks=2)
    return dict(zip(runs, found, strict=True))


def rounding(losses):
    """Sums in another order may differ by this: a thousandth of what one step changes, so no sample was lost."""
    values = [losses[step] for step in sorted(losses)]
    return 1e-3 * statistics.mean(abs(after - before) for before, after in itertools.pairwise(values))


def test_every_split_of_a_batch_gives_the_same_step(alone, together):
    expected = alone["eight"].losses
    assert sorted(expected) == list(range(1, 7))
    assert len(set(expected.values())) == 6
    fsdp = (alone["fsdp"], alone["fsdp-full"], alone["fsdp-selective"])
    for run in (
        alone["accumulated"],
        alone["global"],
        alone["checkpointing"],
        alone["compiled"],
        alone["compiled-layers"],
        together["plain"],
        *fsdp,
    ):
        assert run.losses == pytest.approx(expected, abs=rounding(expected))
        assert run.records("grad_norm") == pytest.approx(alone["eight"].records("grad_norm"), rel=1e-4)


OTHERS = [*ENGINES[1:], "offload-2", "offload-3", "offload-fsdp", "coalesced-2", "coalesced-3", "coalesced-fsdp"]


@pytest.mark.parametrize("engine", OTHERS)
def test_every_engine_gives_the_losses_of_the_default_one(together, engine):
    for key in ("loss", "eval_loss", "grad_norm", "lr"):
        assert together[engine].records(key) == pytest.approx(together["plain"].records(key), rel=1e-5)
    # Only DeepSpeed's coalesced gradients are sent separately, after the last micro-step.
    assert bool(together[engine].records("communication_ms")) == (engine in ("coalesced-2", "coalesced-3"))


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_every_engine_resumes_from_every_other(together, before, after):
    whole = together["plain"]
    resumed = together[f"{before}>{after}"]
    assert resumed.losses == pytest.approx({step: whole.losses[step] for step in (4, 5, 6)}, rel=1e-5)
    assert resumed.records("eval_loss") == pytest.approx({6: whole.records("eval_loss")[6]}, rel=1e-5)


def test_sharded_training_resumes_to_the_last_bit(together):
    for key in ("loss", "grad_norm"):
        whole, resumed = together["fsdp"].records(key), together["fsdp>fsdp"].records(key)
        assert resumed == {step: whole[step] for step in (4, 5, 6)}


@pytest.fixture(scope="module")
def three(gpt):
    """Trainings of three processes: a model whose output is no embedding, and no size a multiple of three."""
    model = {"model_type": "qwen3", "vocab_size": 22, "hidden_size": 32, "intermediate_size": 37, "head_dim": 4}
    model |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model |= {"max_position_embeddings": 64, "tie_word_embeddings": False}
    (gpt.folder / "qwen").mkdir()
    (gpt.folder / "qwen/config.json").write_text(json.dumps(model))
    fixed = ["--data", "first", "--model", "qwen", "--block-size", 32, "--batch-size", 2, "--accumulation", 2]
    fixed += ["--eval-interval", 3, "--eval-iters", 3, "--max-iters", 6, "--keep", 0, "--trackers", "none"]
    runs = {engine: ["--engine", engine] for engine in ("plain", "fsdp")}
    runs["plain>fsdp"] = ["--engine", "fsdp", "--resume", "three-plain/iter_3"]
    runs["fsdp>plain"] = ["--engine", "plain", "--resume", "three-fsdp/iter_3"]
    argv = [[*fixed, *more, "--out", f"three-{name}"] for name, more in runs.items()]
    found = dict(zip(runs, gpt.session(argv, ranks=3, tiny=False), strict=True))
    alone = [*fixed[:6], "--max-iters", 6, "--trackers", "none", "--out", "three>one", "--resume", "three-fsdp/iter_3"]
    return {**found, "three>one": gpt.session([alone], tiny=False)[0]}


def test_shares_may_be_uneven_and_empty(three):
    """Of the four rows of a norm of heads, the third rank has none."""
    whole = three["plain"]
    for key in ("loss", "eval_loss", "grad_norm"):
        assert three["fsdp"].records(key) == pytest.approx(whole.records(key), rel=1e-5)
    for name in ("plain>fsdp", "fsdp>plain", "three>one"):
        assert three[name].losses == pytest.approx({step: whole.losses[step] for step in (4, 5, 6)}, rel=1e-5)


def test_sixteen_bits_stay_near(alone, together):
    exact = alone["eight"].losses
    named = ("bfloat16", "bfloat16-fsdp", "float16", "float16-fsdp")
    for run in (*(alone[name] for name in named), together["bfloat16"], together["bfloat16-zero2"]):
        assert run.losses == pytest.approx(exact, abs=3e-3)
        assert run.losses != exact
    for name in ("bfloat16-narrow", "bfloat16-fsdp"):
        assert together[name].losses == pytest.approx(exact, abs=3e-3)
    for name in ("bfloat16>zero2", "bfloat16-zero2>plain", "bfloat16-zero0>zero0"):
        assert together[name].losses == pytest.approx({step: exact[step] for step in (4, 5, 6)}, abs=3e-3)


# The table "Equal losses" of docs/training.md: options of two ranks, and how far their losses may be from fp32's.
BOUNDS = {
    ("--engine", "plain"): 1e-5,
    ("--engine", "fsdp"): 1e-5,
    ("--engine", "zero2"): 1e-5,
    ("--dtype", "float16"): 2e-4,
    ("--dtype", "float16", "--engine", "fsdp"): 2e-4,
    ("--dtype", "bfloat16"): 2e-3,
    ("--dtype", "bfloat16", "--engine", "fsdp"): 2e-3,
    ("--dtype", "bfloat16", "--engine", "zero2"): 2e-3,
    ("--optimizer", "adamw-bf16"): 2e-4,
    ("--optimizer", "adamw8bit"): 2e-3,
}


@pytest.fixture(scope="module")
def fifty(gpt):
    """Losses of fifty steps: of one rank in fp32, and of two ranks for each key of ``BOUNDS``."""
    fixed = ["--max-iters", 50, "--learning-rate", "3e-3", "--eval-interval", 0, "--save", "false"]
    (alone,) = gpt.session([[*fixed, "--batch-size", 8, "--out", "fifty"]])
    argv = [[*fixed, "--batch-size", 4, *more, "--out", f"fifty-{n}"] for n, more in enumerate(BOUNDS)]
    found = gpt.session(argv, ranks=2)
    return alone.losses, {more: run.losses for more, run in zip(BOUNDS, found, strict=True)}


@pytest.mark.parametrize("more", BOUNDS, ids=" ".join)
def test_losses_stay_within_the_documented_bound(fifty, more):
    exact, losses = fifty[0], fifty[1][more]
    assert exact[50] < exact[1] - 1
    assert losses == pytest.approx(exact, rel=BOUNDS[more])
    if BOUNDS[more] > 1e-5:  # the option has an effect
        assert losses != pytest.approx(exact, rel=1e-5)


def test_dropout_is_the_same_after_a_resume(alone):
    assert alone["dropout"].losses != alone["eight"].losses
    resumed = alone["dropout-resumed"].losses
    assert resumed == {step: alone["dropout"].losses[step] for step in (4, 5, 6)}


def test_checkpoint_resumes_with_any_number_of_processes(gpt, alone, together):
    expected = {step: together["plain"].losses[step] for step in (4, 5, 6)}
    assert together["one>two"].losses == pytest.approx(expected, rel=1e-5)
    assert together["one>two-fsdp"].losses == pytest.approx(expected, rel=1e-6)
    runs = [["--batch-size", 8, "--out", f"{engine}>one", "--resume", f"two-{engine}/iter_3"] for engine in ENGINES]
    for run in gpt.session(runs):
        assert run.losses == pytest.approx(expected, rel=1e-5)


def test_several_sets_are_mixed(alone):
    only = alone["eight"].losses
    assert alone["weighted"].losses != only
    reported = json.loads((alone["weighted"].out / "iter_6/complete.json").read_text())
    assert reported["config"]["data"] == ["first:0.3", "second:0.7"]


def test_tensorboard_receives_the_metrics(alone):
    (events,) = (alone["tracked"].out / "tensorboard").iterdir()
    assert b"eval_loss" in events.read_bytes()
    assert not (alone["eight"].out / "tensorboard").exists()


def test_log_is_readable_by_the_agent_and_by_people(alone):
    records = [json.loads(line) for line in (alone["eight"].out / "trainer_log.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert {"current_steps", "total_steps", "lr", "grad_norm", "tokens_per_second", "ms"} <= set(steps[0])
    assert all(record["total_steps"] == 6 for record in records)
    for record in steps:
        parts = [record[f"{part}_ms"] for part in ("forward", "backward", "optimizer", "communication")]
        assert all(part >= 0 for part in parts)
        assert sum(parts) <= record["ms"]
    lines = (alone["eight"].out / "train.log").read_text()
    assert "iter 6: loss " in lines
    assert "step 6: train loss " in lines
    assert "perplexity" in lines
