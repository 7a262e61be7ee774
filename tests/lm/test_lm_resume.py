"""Resumed trainings: inherited options, messages, refusals, vocabularies and evaluations."""

import json
import shutil

import pytest
from trainings import TINY

# Without the options of ``TINY``: a resumed training has them from its checkpoint.
LATER = ["--max-iters", 8]
FOUR = ["--batch-size", 2, "--accumulation", 2, "--learning-rate", "1e-3", "--max-iters", 4]


def config(run, step):
    return json.loads((run.out / f"iter_{step}/complete.json").read_text())["config"]


@pytest.fixture(scope="module")
def saved(gpt):
    """A checkpoint of two ranks with 8 samples a step at step 4, and trainings of one rank that start from it."""
    (run,) = gpt.session([["--out", "four", *FOUR]], ranks=2)
    return run


@pytest.fixture(scope="module")
def resumed(gpt, saved):
    folder = gpt.folder
    shutil.copytree(folder / "first", folder / "no-val")
    (folder / "no-val/val-00000.bin").unlink()
    (folder / "as-many.txt").write_text("".join(map(chr, range(200, 200 + vocabulary(folder / "first")))) * 40)
    gpt.program("prepare", "as-many.txt", "--out", "as-many")
    gpt.program("prepare", "second.txt", "--out", "alone")
    shutil.copytree(folder / "first", folder / "swapped")
    shutil.copy(folder / "as-many/characters.json", folder / "swapped")
    gpt.program("export", "four/final", "four-hf")
    shutil.copytree(folder / "four-hf", folder / "bare-hf")
    (folder / "bare-hf/characters.json").unlink()
    message = json.loads((folder / "bare-hf/config.json").read_text())
    del message["vocabulary_digest"]
    (folder / "bare-hf/config.json").write_text(json.dumps(message))
    tiny = ["--n-layer", 2, "--n-head", 2, "--n-embd", 32]
    resume = ["--resume", "four/latest", *LATER]
    new = ["--init", "four/final", "--max-iters", 4, "--trackers", "none", "--data", "first"]
    cases = {
        "inherits": resume,
        "repeats": [*resume, *tiny, "--data", "first", "--batch-size", 4],
        "changes": [*resume, "--learning-rate", "5e-4", "--keep", 1],
        "batch": [*resume, "--batch-size", 2, "--accumulation", 2],
        "batch-allowed": [*resume, "--batch-size", 2, "--accumulation", 2, "--allow-changes"],
        "odd": [*resume, "--batch-size", 3],
        "data": [*resume, "--data", "second"],
        "data-allowed": [*resume, "--data", "second", "--allow-changes"],
        "layers": [*resume, "--n-layer", 3],
        "model": [*resume, "--model", "gpt2-xl"],
        "init": [*resume, "--init", "four-hf"],
        "done": ["--resume", "four/latest"],
        "below": ["--resume", "four/latest", "--max-iters", 2],
        "init-model": [*new, "--model", "gpt2-xl"],
        "init-shape": new,
        "init-as-many": [*new, "--data", "as-many"],
        "hf-as-many": [*new, "--init", "four-hf", "--data", "as-many"],
        "hf-bare": [*new, "--init", "bare-hf", "--data", "alone"],
        "swapped": [*new, "--data", "swapped"],
        "some-val": [*new, "--data", "first", "no-val", "--eval-interval", 2, "--eval-iters", 2],
        "no-val": [*new, "--data", "no-val", "--eval-interval", 2, "--eval-iters", 2],
    }
    argv = [["--out", f"r-{name}", *more] for name, more in cases.items()]
    eight = [*TINY, "--out", "eight", "--batch-size", 8, "--max-iters", 2, "--eval-interval", 1]
    return dict(zip([*cases, "eight"], gpt.session([*argv, eight], tiny=False), strict=True))


@pytest.fixture(scope="module")
def by_two(gpt, resumed):
    """Trainings of two ranks that start from checkpoints of two and of one."""
    two = ["--out", "r-two", "--resume", "four/latest", *LATER]
    eight = ["--out", "r-eight", "--resume", "eight/latest", "--max-iters", 4]
    return gpt.session([two, eight], ranks=2, tiny=False)


def vocabulary(folder):
    return json.loads((folder / "meta.json").read_text())["vocab_size"]


def test_a_resumed_training_has_the_options_of_its_checkpoint(saved, resumed):
    before, after = config(saved, 4), config(resumed["inherits"], 8)
    own = {"out", "resume", "max_iters", "accumulation"}
    assert {name: before[name] for name in before if name not in own} == {
        name: after[name] for name in after if name not in own
    }
    assert resumed["repeats"].losses == pytest.approx(resumed["inherits"].losses, rel=1e-5)


def test_one_rank_takes_as_many_samples_as_two_did(resumed, by_two):
    """Not 4 instead of 8: the micro-steps follow. So the losses are those of two ranks."""
    reported = config(resumed["inherits"], 8)
    assert (reported["batch_size"], reported["accumulation"]) == (2, 4)
    assert resumed["inherits"].losses == pytest.approx(by_two[0].losses, rel=1e-5)


def test_more_ranks_take_smaller_micro_batches(resumed, by_two):
    reported = config(by_two[1], 4)
    assert (reported["batch_size"], reported["accumulation"]) == (4, 1)
    assert (reported["eval_iters"], config(resumed["eight"], 2)["eval_iters"]) == (
        6,
        3,
    )  # as many samples are evaluated
    text = (by_two[1].out / "train.log").read_text()
    assert "resume: batch_size: 4 instead of 8 (for as many samples as before)\n" in text


def test_differences_are_printed(resumed):
    text = (resumed["changes"].out / "train.log").read_text()
    lines = [line.partition(": ")[2] for line in text.splitlines() if line.startswith("resume: ")]
    assert lines == [
        "accumulation: 4 instead of 2 (for as many samples as before)",
        "max_iters: 8 instead of 4 (--max-iters)",
        "learning_rate: 0.0005 instead of 0.001 (--learning-rate)",
        "keep: 1 instead of 0 (--keep)",
    ]
    assert config(resumed["changes"], 8)["learning_rate"] == 5e-4


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("batch", "a step of four/iter_4 has 8 samples, but 1 ranks x --batch-size 2 give 4", "--global-batch 8; or"),
        ("odd", "a step of four/iter_4 has 8 samples, but 1 ranks x --batch-size 3 give no whole", "--allow-changes"),
        ("data", "--data second (", "or --allow-changes"),
        ("layers", "--n-layer 3: four/iter_4 has 2", "remove --n-layer"),
        ("model", "--model gpt2-xl has n_layer 48, four/iter_4 has 2", "remove --model"),
        ("init", "--init four-hf: four/iter_4 started from scratch", "remove --init"),
        ("done", "--max-iters 4: four/iter_4 is at step 4, so the training is already finished", "--max-iters 8"),
        ("below", "--max-iters 2: four/iter_4 is at step 4, so the training is already finished", "--max-iters 8"),
        ("init-model", "--model gpt2-xl has n_layer 48, four/iter_4 has 2", "remove --model"),
        ("init-as-many", "the vocabularies of as-many and four/iter_4 differ", "--vocabulary four/iter_4"),
        ("hf-as-many", "the vocabularies of as-many and four-hf differ", "--vocabulary four-hf"),
        ("hf-bare", "the vocabularies of alone and bare-hf may differ: ", "copy the tokenizer.json of the model"),
        ("swapped", "swapped/characters.json is not the vocabulary of the shards", "restore the characters.json"),
    ],
)
def test_options_that_contradict_the_checkpoint_are_refused(gpt, resumed, name, what, fix):
    refused = resumed[name].refused
    assert refused is not None, f"{name} was not refused"
    assert refused["what"].startswith(what)
    assert fix in refused["fix"]
    assert refused["code"] == 2
    assert not list((gpt.folder / f"r-{name}").glob("iter_*"))


def test_a_flag_allows_another_batch_and_other_data(resumed):
    assert [resumed[name].refused for name in ("batch-allowed", "data-allowed")] == [None, None]
    assert config(resumed["batch-allowed"], 8)["accumulation"] == 2
    assert config(resumed["data-allowed"], 8)["data"] == ["second"]
    assert config(resumed["data-allowed"], 8)["allow_changes"] is True


def test_the_shape_of_init_needs_no_options(resumed):
    reported = config(resumed["init-shape"], 4)
    assert [reported[name] for name in ("n_layer", "n_head", "n_embd", "block_size")] == [2, 2, 32, 32]


def test_a_set_without_val_is_named_and_the_others_are_evaluated(resumed):
    some, none = ((resumed[name].out / "train.log").read_text() for name in ("some-val", "no-val"))
    assert "warning: no-val: no val-*.bin, so it is not evaluated; evaluations use first\n" in some
    assert "step 2: train loss " in some
    assert "val loss" in some
    assert "warning: no-val: no val-*.bin, so it is not evaluated; evaluations use training data\n" in none
    assert "val loss" not in none


def test_restart_of_a_finished_training_exits_0(gpt, saved):
    argv = ("-m", "trainer.lm", "--out", "four", "--max-iters", 4)
    done = gpt.run(*argv, env={"CLUSTERCTL_CHECKPOINT": str(saved.out / "iter_4")})
    assert done.returncode == 0, done.stderr
    assert "resume: the training is already finished\n" in done.stdout
    assert (saved.out / "final").read_text() == "iter_4\n"


def test_a_sample_of_another_vocabulary_is_refused(gpt, saved, resumed):
    for folder in ("four-hf", "four/iter_4"):
        shutil.copytree(gpt.folder / folder, gpt.folder / f"mixed/{folder}")
        shutil.copy(gpt.folder / "as-many/characters.json", gpt.folder / f"mixed/{folder}")
        result = gpt.run("-m", "trainer.lm.sample", f"mixed/{folder}", "--tokens", 2)
        assert result.returncode == 2
        what = f"error: mixed/{folder}: characters.json is not the vocabulary of the model: its digest is "
        assert result.stderr.startswith(what), result.stderr
