"""The optimizers: what they compute, exact resumes, and what several ranks and sharded parameters make of them."""

import json

import pytest
from trainings import HERE

SMALL = ("adamw-bf16", "adamw8bit")
STEADY = ["--learning-rate", "1e-2", "--decay-iters", "8", "--eval-interval", "4"]


@pytest.fixture(scope="module")
def found(gpt):
    result = gpt.run(HERE / "optimized.py")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["signed", "square"])
def test_eight_bits_are_close_and_do_not_change_when_they_are_rounded_again(found, kind):
    assert found["levels"] == [256, 256]
    row = found[kind]
    assert row["stays"]
    assert row["error"] < 0.01
    assert row["zeros"] == row["fresh"] == 0


@pytest.mark.parametrize("name", SMALL)
def test_small_averages_train_like_fp32(found, name):
    assert found["losses"][name] == pytest.approx(found["losses"]["adamw"], abs=5e-3)
    assert found["losses"][name] != found["losses"]["adamw"]


def test_muon_is_torchs_on_each_matrix_of_the_layers_and_adamw_on_the_rest(found):
    assert found["muon"] < 1e-3
    assert found["buckets"] == [[True], [False], [False]]
    assert found["losses"]["muon"][-1] < found["losses"]["adamw"][-1]


@pytest.fixture(scope="module")
def halves(gpt):
    """For each optimizer a training of eight steps, and one of four that is resumed."""
    runs = []
    for name in (*SMALL, "muon"):
        whole = ["--optimizer", name, *STEADY]
        runs += [
            ["--out", f"{name} whole", *whole, "--max-iters", "8"],
            ["--out", f"{name} half", *whole, "--max-iters", "4"],
            ["--out", f"{name} half", "--resume", "latest", "--max-iters", "8"],
        ]
    found = gpt.session(runs)
    assert [each.refused for each in found] == [None] * len(found)
    return gpt.folder


@pytest.mark.parametrize("name", [*SMALL, "muon"])
def test_a_resume_is_exact(halves, name):
    (whole,), (half,) = (list((halves / f"{name} {part}/iter_8").glob("part-*")) for part in ("whole", "half"))
    assert whole.read_bytes() == half.read_bytes()


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_ranks_have_the_same_losses(gpt, ranks):
    names = (*SMALL, "muon")
    options = [*STEADY, "--max-iters", "8", "--global-batch", "12", "--batch-size", "2"]
    runs = [["--out", f"{name} {ranks}", "--optimizer", name, *options] for name in names]
    runs.append(["--out", f"muon {ranks} again", "--resume", f"muon {ranks}/iter_4", "--max-iters", "8"])
    found = gpt.session(runs, ranks=ranks)
    runs = [["--out", f"{name} beside {ranks}", "--optimizer", name, *options] for name in names]
    runs.append(["--out", f"muon {ranks}>one", "--resume", f"muon {ranks}/iter_4", "--max-iters", "8"])
    alone = gpt.session(runs)
    for one, several in zip(alone[:3], found[:3], strict=True):
        assert several.refused is None
        assert several.losses == pytest.approx(one.losses, abs=5e-3)
    again = {step: found[2].losses[step] for step in (5, 6, 7, 8)}
    assert found[3].losses == again
    assert alone[3].losses == pytest.approx(again, abs=1e-3)


def test_the_matrices_of_muon_are_whole_and_shared_evenly(found):
    for world, row in found["shares"].items():
        assert row["cut"] == 0, world
        assert sorted(row["names"]) == sorted(row["all"])
        assert row["padding"] < 0.35


@pytest.mark.parametrize("name", SMALL)
def test_sharded_parameters_have_the_same_losses_and_resume_exactly(gpt, name):
    """Its rows have 44 numbers, so few shares are whole blocks."""
    model = {"model_type": "qwen3", "vocab_size": 22, "hidden_size": 44, "intermediate_size": 37, "head_dim": 4}
    model |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model |= {"max_position_embeddings": 64, "tie_word_embeddings": False}
    folder = gpt.folder / f"qwen {name}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model))
    fixed = ["--data", "first", "--model", folder.name, "--block-size", "32", "--batch-size", "4", "--keep", "0"]
    fixed += ["--eval-interval", "4", "--max-iters", "8", "--learning-rate", "1e-2", "--trackers", "none"]
    fixed += ["--optimizer", name]
    plain, fsdp, again, crossed = gpt.session(
        [
            [*fixed, "--out", f"{name} plain"],
            [*fixed, "--out", f"{name} fsdp", "--engine", "fsdp"],
            ["--data", "first", "--out", f"{name} again", "--resume", f"{name} fsdp/iter_4"],
            ["--data", "first", "--out", f"{name} crossed", "--resume", f"{name} plain/iter_4", "--engine", "fsdp"],
        ],
        ranks=2,
        tiny=False,
    )
    assert fsdp.losses == pytest.approx(plain.losses, abs=2e-5 if name == "adamw-bf16" else 5e-3)
    assert again.losses == {step: fsdp.losses[step] for step in (5, 6, 7, 8)}
    stored = [sorted((run.out / "iter_8").glob("part-*")) for run in (fsdp, again)]
    assert [path.read_bytes() for path in stored[0]] == [path.read_bytes() for path in stored[1]]
    assert crossed.losses == pytest.approx({step: plain.losses[step] for step in (5, 6, 7, 8)}, abs=5e-3)


def test_another_adamw_resumes_it_but_not_muon(halves, gpt):
    more = ["--resume", "latest", "--max-iters", "10"]
    runs = [
        ["--out", "adamw8bit whole", *more, "--optimizer", "adamw"],
        ["--out", "adamw-bf16 whole", *more, "--optimizer", "muon"],
    ]
    other, muon = gpt.session(runs)
    assert other.refused is None
    assert max(other.losses) == 10
    said = "--optimizer muon: adamw-bf16 whole/iter_8 has the averages of adamw-bf16"
    assert muon.refused["what"] == said
