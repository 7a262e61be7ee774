"""Text to a trained model and on: vocabularies, weights of Hugging Face in and out, samples, another data set."""

import json
import pickle

import pytest
from trainings import HERE


@pytest.fixture(scope="module")
def trained(gpt):
    """Trained by two processes with ZeRO-3, whose parameters are sharded."""
    return gpt.session([["--out", "trained", "--engine", "zero3", "--learning-rate", "1e-2"]], ranks=2, typed=True)[0]


@pytest.fixture(scope="module")
def exported(gpt, trained):
    argv = ("-m", "trainer.lm.export", "trained/best", "hf")
    result = gpt.run(*argv, env={"PYTHONPROFILEIMPORTTIME": "1"}, typed=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "hf: step 6 of trained/iter_6\n"
    assert "trainer.lm.model\n" in result.stderr  # the modules that it imports
    assert "torch._dynamo" not in result.stderr  # torch's compiler, which takes as long to import as the rest
    return gpt.folder / "hf"


def test_transformers_loads_the_exported_model(gpt, trained, exported):
    result = gpt.run(HERE / "compare.py", "trained/best", exported)
    assert result.returncode == 0, result.stderr
    reported = json.loads(result.stdout.splitlines()[-1])
    assert reported.pop("apart") < 1e-4  # of how much logits differ from one another: other kernels round otherwise
    assert reported == {"equal": True, "count": 3 * 28, "types": ["torch.float32"], "missing": [], "parameters": True}


def test_a_training_starts_from_hugging_face_weights(gpt, trained, exported):
    """Their loss is that of the checkpoint, and the optimizer is new."""
    argv = ["--learning-rate", "1e-12", "--max-iters", 1, "--eval-interval", 1]
    runs = [[*argv, "--init", "hf", "--out", "from-hf"], [*argv, "--init", "trained/best", "--out", "from-ours"]]
    for run in gpt.session([*runs, [*argv, "--init", "hf", "--block-size", 16, "--out", "short"]])[:2]:
        assert run.records("eval_loss")[1] == pytest.approx(trained.records("eval_loss")[6], abs=0.05)
        reported = json.loads((run.out / "iter_1/complete.json").read_text())
        assert (reported["step"], reported["updates"]) == (1, 1)
    assert json.loads((gpt.folder / "short/iter_1/complete.json").read_text())["shape"]["block_size"] == 16


def test_a_second_data_set_continues_with_a_fresh_optimizer(gpt, trained):
    argv = ["--init", "trained/best", "--data", "second", "--eval-interval", 5, "--learning-rate", "3e-3"]
    (run,) = gpt.session([[*argv, "--out", "second-set", "--max-iters", 30, "--schedule", "constant"]])
    losses = run.losses
    assert min(losses) == 1
    assert losses[30] < losses[1] - 0.5  # it learns the second set


def test_samples_are_the_same_for_a_seed(gpt, trained, exported):
    common = ("trained/best", "--prompt", "the king", "--tokens", 30)
    texts = [gpt.program("sample", *common, "--seed", seed, typed=seed == 2) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("the king")


def test_generation_reads_each_token_once(gpt, trained):
    """The text equals the one without the cache. Beyond the block all tokens move, and all are read again."""
    result = gpt.run(HERE / "written.py", "trained/best")
    assert result.returncode == 0, result.stderr
    reported = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(reported) == 10
    for each in reported:
        assert each["ours"] == each["chosen"], each
        assert each["apart"] < 1e-4, each
        assert max(each["few"]) < 3  # a vocabulary may have fewer tokens than the model has rows
        within = range(each["length"], each["length"] + 24)
        first = min(each["length"], 32)
        assert each["given"] == [first, *(1 if length <= 32 else 32 for length in within[1:])]
    likeliest = [each["ours"] for each in reported if not each["temperature"]]
    assert len(set(map(tuple, likeliest))) > 1  # it depends on what was read
    assert all(len(set(each["ours"])) > 5 for each in reported if each["temperature"])


def test_trained_bpe_vocabulary(gpt):
    argv = ("--tokens", "bpe", "--vocab-size", 300, "--shard-tokens", 5000)
    message = gpt.program("prepare", "first.txt", "--out", "bpe", *argv)
    assert "vocabulary of " in message
    assert len(list((gpt.folder / "bpe").glob("train-*.bin"))) > 2
    meta = json.loads((gpt.folder / "bpe/meta.json").read_text())
    files = {split: sorted((gpt.folder / "bpe").glob(f"{split}-*.bin")) for split in ("train", "val")}
    sizes = {split: sum(path.stat().st_size for path in paths) for split, paths in files.items()}
    assert sizes == {split: 2 * count for split, count in meta["tokens"].items()}
    (run,) = gpt.session([["--data", "bpe", "--out", "bpe-run"]])
    assert run.losses[6] < run.losses[1]
    assert (run.out / "iter_6/tokenizer.json").exists()
    assert gpt.program("sample", "bpe-run/best", "--prompt", "the sea", "--tokens", 5).startswith("the sea")
    gpt.program("export", "bpe-run/best", "bpe-hf")
    end = json.loads((run.out / "iter_6/tokenizer.json").read_text())["model"]["vocab"]["<|endoftext|>"]
    for name in ("config.json", "generation_config.json"):
        reported = json.loads((gpt.folder / "bpe-hf" / name).read_text())
        assert (reported["bos_token_id"], reported["eos_token_id"]) == (end, end)
    loads = "import transformers; told = transformers.GenerationConfig.from_pretrained('bpe-hf')"
    assert gpt.run("-c", f"{loads}; print(told.eos_token_id)", typed=True).stdout == f"{end}\n"
    again = gpt.program("prepare", "second.txt", "--out", "bpe-2", "--vocabulary", "bpe-hf")
    assert json.loads((gpt.folder / "bpe-2/meta.json").read_text())["digest"] == meta["digest"], again


def test_shards_contain_the_text(gpt):
    import struct

    characters = json.loads((gpt.folder / "first/characters.json").read_text())
    raw = b"".join((gpt.folder / f"first/{split}-00000.bin").read_bytes() for split in ("train", "val"))
    tokens = struct.unpack(f"<{len(raw) // 2}H", raw)
    assert "".join(characters[token] for token in tokens) == (gpt.folder / "first.txt").read_text()
    counts = json.loads((gpt.folder / "first/meta.json").read_text())["tokens"]
    assert counts["val"] / len(tokens) == pytest.approx(0.1, abs=0.001)


def test_nanogpt_files_are_read(gpt):
    folder = gpt.folder / "nano"
    folder.mkdir()
    letters = json.loads((gpt.folder / "first/characters.json").read_text())
    for split in ("train", "val"):
        (folder / f"{split}.bin").write_bytes((gpt.folder / f"first/{split}-00000.bin").read_bytes())
    meta = {"vocab_size": len(letters), "itos": dict(enumerate(letters)), "stoi": {c: i for i, c in enumerate(letters)}}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    ours, theirs = gpt.session([["--out", "nano-ours"], ["--out", "nano-run", "--data", "nano"]])
    assert theirs.losses == ours.losses
    assert gpt.program("sample", "nano-run/best", "--prompt", "the", "--tokens", 3).startswith("the")
