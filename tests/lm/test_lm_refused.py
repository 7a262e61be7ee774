"""What cannot be done is refused in one line: what, where, and what to type."""

import json
import os
import pickle
import shutil

import pytest


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.fixture(scope="module")
def refused(gpt):
    """The error of each of many wrong command lines, all in one process."""
    folder = gpt.folder
    one = ["--max-iters", 1, "--eval-interval", 1]
    gpt.session([["--out", "fine", *one], ["--out", "longest", "--max-iters", 2, "--eval-interval", 1]])
    gpt.program("prepare", "second.txt", "--out", "alien")  # with its own vocabulary
    gpt.program("export", "fine/final", "fine-hf")
    for name in ("empty", "odd", "foreign"):
        shutil.copytree(folder / "first", folder / name)
    (folder / "empty/train-00000.bin").write_bytes(b"")
    (folder / "odd/train-00000.bin").write_bytes(b"123")
    (folder / "foreign/train-00000.bin").write_bytes(b"\xff\x7f" * 100)
    (folder / "unsafe").mkdir()
    (folder / "unsafe/train.bin").write_bytes(bytes(1000))
    (folder / "unsafe/meta.pkl").write_bytes(pickle.dumps(Evil()))
    changes = {"no-heads": {"n_head": None}, "llama": {"model_type": "mamba"}, "wide": {"n_embd": 64}}
    changes |= {"texts": {"n_layer": "2"}, "below": {"n_layer": -1}, "uneven": {"n_head": 3}}
    for name, change in changes.items():
        shutil.copytree(folder / "fine-hf", folder / name)
        message = dict(json.loads((folder / name / "config.json").read_text()), **change)
        kept = {key: value for key, value in message.items() if value is not None}
        (folder / name / "config.json").write_text(json.dumps(kept))
    shutil.copytree(folder / "fine-hf", folder / "torn-hf")
    os.truncate(folder / "torn-hf/model.safetensors", 5000)
    (folder / "nested").mkdir()
    (folder / "nested/config.json").write_text("[" * 100_000)
    shutil.copytree(folder / "fine", folder / "torn")
    (part,) = (folder / "torn/iter_1").glob("part-*")
    part.unlink()
    (folder / "options.yaml").write_text("max_iter: 3\n")
    (folder / "stage3.json").write_text('{"zero_optimization": {"stage": 3}}')
    cases = {
        "folder": ["--data", "nowhere"],
        "empty": ["--data", "empty"],
        "odd": ["--data", "odd"],
        "foreign": ["--data", "foreign"],
        "unsafe": ["--data", "unsafe"],
        "mixed": ["--data", "first", "alien"],
        "block": ["--block-size", 100000],
        "batch": ["--batch-size", 3, "--global-batch", 8],
        "heads": ["--n-head", 3],
        "again": ["--out", "fine"],
        "resume": ["--resume", "latest"],
        "older": ["--resume", "longest/iter_1", "--out", "longest"],
        "vocabulary": ["--data", "alien", "--resume", "fine/final"],
        "longer": ["--init", "fine/final", "--block-size", 64],
        "missing": ["--init", "no-heads"],
        "llama": ["--init", "llama"],
        "wide": ["--init", "wide", "--n-embd", 64],
        "torn-hf": ["--init", "torn-hf"],
        "nested": ["--init", "nested"],
        "texts": ["--init", "texts"],
        "below": ["--init", "below"],
        "uneven": ["--init", "uneven"],
        "torn": ["--resume", "torn/latest"],
        "init": ["--init", "nothing-here"],
        "gpu": ["--device", "cuda"],
        "offload": ["--offload", "optimizer"],
        "coalesce": ["--engine", "zero1", "--coalesce"],
        "fp16": ["--engine", "zero2", "--dtype", "float16"],
        "stage": ["--engine", "zero2", "--deepspeed-config", "stage3.json"],
        "option": ["--config", "options.yaml"],
        "tracker": ["--trackers", "visdom"],
        "out": ["--out", "first/meta.json/out"],
    }
    argv = [["--out", f"out-{name}", *more] for name, more in cases.items()]
    return dict(zip(cases, (run.refused for run in gpt.session(argv)), strict=True))


WORDS = {
    "folder": ("--data nowhere: no such folder", "trainer.lm.prepare"),
    "empty": ("empty/train-00000.bin is empty", "trainer.lm.prepare"),
    "odd": ("odd/train-00000.bin has 3 bytes, not a multiple of 2", "trainer.lm.prepare"),
    "foreign": ("foreign contains token 32767, but its vocabulary has", "prepare the data again"),
    "unsafe": ("unsafe/meta.pkl is not a vocabulary of nanoGPT: it refers to posix.mkdir", "trainer.lm.prepare"),
    "mixed": ("first and alien have different vocabularies", "--vocabulary first"),
    "block": ("first/train-00000.bin has", "a smaller --block-size"),
    "batch": ("--global-batch 8 is not divisible by --batch-size 3 x 1 ranks", "--global-batch 6 or 9"),
    "heads": ("--n-embd 32 must be a multiple of --n-head 3", ""),
    "again": ("--out fine already contains checkpoints", "--resume latest, or another --out"),
    "resume": ("out-resume/latest: there is no such file", "--init"),
    "older": ("longest/iter_2 is newer than longest/iter_1", "--resume latest, or another --out"),
    "vocabulary": ("the vocabularies of alien and fine/iter_1 differ", "--vocabulary fine/iter_1"),
    "longer": ("--block-size 64: fine/iter_1 has 32 positions", "--block-size 32"),
    "missing": ("no-heads/config.json has no n_head", "config.json that came with the weights"),
    "llama": ("llama/config.json: a model of type mamba; known are gpt2, llama, qwen2, qwen3", "these types"),
    "wide": ("wide: transformer.wte.weight is [22, 32], config.json says [22, 64]", "config.json that came"),
    "torn-hf": ("torn-hf cannot be read: ", "copy the folder again"),
    "nested": ("nested/config.json cannot be read: ", "a folder with config.json"),
    "texts": ("texts/config.json: n_layer '2' must be at least 1", "the config.json"),
    "below": ("below/config.json: n_layer -1 must be at least 1", "the config.json"),
    "uneven": ("uneven/config.json: n_embd 32 must be a multiple of n_head 3", "the config.json"),
    "torn": ("torn/iter_1: part-00000-of-00001.safetensors is missing", "copy it from the node"),
    "init": ("--init nothing-here: no such folder", "config.json"),
    "gpu": ("--device cuda: torch ", "--device cpu"),
    "offload": ("--offload optimizer needs FSDP or DeepSpeed, not --engine plain (default)", "--engine zero2"),
    "coalesce": ("--coalesce True: only zero2, zero3 and fsdp", "--engine zero2"),
    "fp16": ("DeepSpeed supports fp16 only on GPUs", "--dtype bfloat16"),
    "stage": ("stage3.json is for stage 3", "--engine zero3"),
    "option": ("options.yaml: unknown option max_iter", "did you mean max_iters?"),
    "tracker": ("--trackers visdom: unknown tracker visdom", "tensorboard"),
    "out": ("--out first/meta.json/out: Not a directory", "a writable folder"),
}


@pytest.mark.parametrize("name", WORDS)
def test_refused(gpt, refused, name):
    assert refused[name] is not None, f"{name} was not refused"
    what, fix = WORDS[name]
    assert what in refused[name]["what"]
    assert fix in refused[name]["fix"]
    assert refused[name]["code"] == 2
    assert "\n" not in refused[name]["what"]
    assert not (gpt.folder / "evil").exists()


def test_programs_print_the_error_in_one_line(gpt, refused):
    lines = {}
    (gpt.folder / "void.txt").write_text("")
    (gpt.folder / "nowhere-else").mkdir()
    (gpt.folder / "nowhere-else/train.bin").write_bytes(b"of nanoGPT")
    for program, *argv in (
        ("prepare", "nowhere.txt", "--out", "x"),
        ("prepare", "first/train-00000.bin", "--out", "x", "--tokens", "bpe", "--vocab-size", "9"),
        ("prepare", "first.txt", "--out", "nowhere-else"),
        ("prepare", "first.txt", "--out", "first.txt"),
        ("prepare", "void.txt", "--out", "x"),
        ("sample", "first"),
        ("sample", "fine"),
        ("export", "fine/final", "fine-hf"),
    ):
        result = gpt.run("-m", f"trainer.lm.{program}", *argv)
        assert result.returncode == 2
        (lines[" ".join([program, *argv])],) = result.stderr.splitlines()
    assert (gpt.folder / "nowhere-else/train.bin").exists()
    assert list(lines.values()) == [
        "error: nowhere.txt: No such file or directory; check the path of the text",
        "error: --vocab-size must be at least 257, not 9",
        "error: nowhere-else: train.bin does not belong to a data set; use a new folder for --out",
        "error: first.txt: File exists; a writable folder with free space",
        "error: void.txt: no text",
        "error: first: no complete checkpoint; ls .",
        "error: fine: no complete checkpoint; the folder contains checkpoints; name one: fine/final",
        "error: fine-hf already exists; use another folder, or rm -r fine-hf",
    ]


def test_options_come_from_a_file_and_the_command_line_wins(gpt, refused):
    (gpt.folder / "good.json").write_text(json.dumps({"max_iters": 50, "seed": 5, "learning_rate": "1e-3"}))
    (gpt.folder / "good.yaml").write_text("max_iters: 50\nseed: 5\nlearning_rate: 1e-3\n")
    runs = [["--config", name, "--max-iters", 2, "--out", name[5:]] for name in ("good.json", "good.yaml")]
    for run in gpt.session(runs):
        assert run.refused is None
        reported = json.loads((run.out / "iter_2/complete.json").read_text())["config"]
        assert (reported["max_iters"], reported["seed"], reported["learning_rate"]) == (2, 5, 1e-3)
