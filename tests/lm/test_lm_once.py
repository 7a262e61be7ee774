"""Samples of shards without replacement: each once per epoch, by number, on any number of ranks."""

import json
import shutil

import pytest
from trainings import HERE


@pytest.fixture(scope="module")
def found(gpt):
    result = gpt.run(HERE / "once.py")
    assert result.returncode == 0, result.stderr
    return {row["name"]: row for row in map(json.loads, result.stdout.splitlines())}


def test_permutation_of_any_size_has_every_place_once(found):
    assert found["permuted"]["wrong"] == 0
    assert found["permuted"]["orders"] == 2
    assert found["permuted"]["moved"] > 900


def test_no_token_is_seen_twice_in_an_epoch(found):
    assert found["epochs"]["repeated"] == [1, 1, 1]
    assert found["epochs"]["seen"] == [160, 160, 160]
    assert found["epochs"]["orders"] == 3
    assert found["epochs"]["same"]


def test_each_set_has_its_share_and_is_not_repeated(found):
    assert found["shares"]["shares"] == pytest.approx([0.7, 0.25, 0.05], abs=2e-4)
    assert found["shares"]["repeated"] == 1


def test_ranks_divide_the_same_samples(found):
    assert found["ranks"]["same"]


def test_documents_end_after_their_end_token_and_with_the_row(found):
    assert found["documents"]["lengths"] == 1
    assert found["documents"]["problems"] == 0


SHARDS = ["--data", "records", "--eval-interval", 4, "--eval-iters", 3, "--save-interval", 4, "--max-iters", 8]
ONCE = [*SHARDS, "--sampling", "without-replacement", "--separate-documents"]


@pytest.fixture(scope="module")
def trained(gpt):
    """Trainings on shards of short documents, of one rank and of two."""
    rows = [{"text": line} for line in (gpt.folder / "first.txt").read_text().splitlines()[:300]]
    (gpt.folder / "records.jsonl").write_text("\n".join(map(json.dumps, rows)))
    gpt.program("prepare", "records.jsonl", "--out", "records", "--tokens", "bpe", "--vocab-size", 300)
    (gpt.folder / "of-nanogpt").mkdir()
    shard = (gpt.folder / "records/train-00000.bin").read_bytes()
    (gpt.folder / "of-nanogpt/train.bin").write_bytes(shard)
    runs = {
        "default": SHARDS,
        "once": [*SHARDS, "--sampling", "without-replacement"],
        "documents": [*SHARDS, "--separate-documents"],
        "both": ONCE,
        "both-fsdp": [*ONCE, "--engine", "fsdp"],
        "epochs": [*SHARDS, "--epochs", 2],
        "one-epoch": [*SHARDS, "--epochs", 1, "--eval-interval", 0, "--save", "false"],
        "several": [*SHARDS, "--data", "records:0.75", "again:0.25", "--epochs", 1, "--eval-interval", 0],
        "nanogpt": ["--data", "of-nanogpt", "--separate-documents", "--max-iters", 1, "--eval-interval", 0],
        "characters": ["--data", "first", "--separate-documents"],
        "contradiction": [*SHARDS, "--sampling", "with-replacement", "--epochs", 1],
        "both>resumed": [*ONCE, "--resume", "once-both/iter_4"],
        "epochs>more": ["--data", "records", "--resume", "once-epochs/latest", "--max-iters", 30],
    }
    shutil.copytree(gpt.folder / "records", gpt.folder / "again")
    found = gpt.session([[*argv, "--out", f"once-{name}"] for name, argv in runs.items()])
    two = [*ONCE, "--batch-size", 2, "--accumulation", 2, "--eval-iters", 12, "--out", "once-two"]
    resumed = [*ONCE, "--resume", "once-both/iter_4", "--out", "once-two-resumed"]
    runs |= {"two": [], "two>resumed": []}
    return dict(zip(runs, [*found, *gpt.session([two, resumed], ranks=2)], strict=True))


def test_options_choose_other_samples_and_other_attention(trained):
    losses = [tuple(trained[name].losses.values()) for name in ("default", "once", "documents", "both")]
    assert len(set(losses)) == 4
    assert losses[0][0] != losses[2][0]  # the same samples
    evaluated = [trained[name].records("eval_loss")[4] for name in ("default", "documents")]
    assert evaluated[0] != evaluated[1]


@pytest.mark.parametrize("name", ["both-fsdp", "two"])
def test_losses_are_equal_on_any_number_of_ranks(trained, name):
    for key in ("loss", "eval_loss"):
        assert trained[name].records(key) == pytest.approx(trained["both"].records(key), rel=1e-5)


def test_a_resume_is_exact(trained):
    after = {step: loss for step, loss in trained["both"].losses.items() if step > 4}
    assert trained["both>resumed"].losses == after
    assert trained["two>resumed"].losses == pytest.approx(after, rel=1e-5)


def test_epochs_set_the_steps(gpt, trained):
    """They sample without replacement; a resume with a number of steps has that number instead."""
    tokens = (gpt.folder / "records/train-00000.bin").stat().st_size // 2
    samples = (tokens - 1) // 32
    assert f"an epoch has {samples} samples\n" in (trained["epochs"].out / "train.log").read_text()
    assert max(trained["one-epoch"].losses) == -(-samples // 8)
    assert max(trained["epochs"].losses) == -(-2 * samples // 8)
    assert trained["epochs"].losses[1] == trained["once"].losses[1]
    assert max(trained["epochs>more"].losses) == 30
    log = (trained["several"].out / "train.log").read_text()
    assert f"an epoch has {2 * samples} samples: records 1.50 times, again 0.50 times\n" in log


def test_nanogpts_data_has_gpt2s_end(trained):
    assert trained["nanogpt"].refused is None


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        (
            "characters",
            "--separate-documents: the vocabulary of first has no token that ends a document",
            "python -m trainer.lm.prepare TEXT --tokens bpe --out DIR; or remove the option",
        ),
        (
            "contradiction",
            "--epochs 1: --sampling with-replacement has no passes over the data",
            "--sampling without-replacement, or --epochs 0",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(trained, name, what, fix):
    assert (trained[name].refused["what"], trained[name].refused["fix"]) == (what, fix)
