"""Text to tokens on several cores: the same files on any number of them, and the tokens that the library gives."""

import json

import pytest
from trainings import HERE

VOCABULARIES = ("own", "prefix", "cut", "normalizer", "spaces", "strips", "older")


@pytest.fixture(scope="module")
def same(gpt):
    result = gpt.run(HERE / "same_tokens.py")
    assert result.returncode == 0, result.stderr
    return {line["name"]: line for line in map(json.loads, result.stdout.splitlines())}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_encoding_word_by_word_gives_the_tokens_of_the_whole_text(same, name):
    """If a vocabulary could join the text on both sides of a space, words are not encoded one by one."""
    assert same[name]["differ"] == 0
    assert same[name]["local"] == (name in ("own", "older"))
    assert len(same) == len(VOCABULARIES)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_any_number_of_processes_writes_the_same_files(gpt):
    text = (HERE.parents[1] / "LICENSE").read_text()
    (gpt.folder / "long.txt").write_text("".join(f"{number}. {text}" for number in range(2_600_000 // len(text))))
    gpt.program("prepare", "long.txt", "--out", "one", "--tokens", "bpe", "--vocab-size", 400, "--workers", 1)
    common = ("--vocabulary", "one", "--shard-tokens", 300_000)
    for workers in (1, 2):
        argv = ("prepare", "first.txt", "long.txt", "--out", f"workers-{workers}", *common, "--workers", workers)
        assert gpt.program(*argv).startswith(f"workers-{workers}: ")
    assert files(gpt.folder / "workers-1") == files(gpt.folder / "workers-2")
    assert len(list((gpt.folder / "workers-1").glob("train-*.bin"))) > 2


SEVERAL = """
import multiprocessing, os
from pathlib import Path
import numpy as np
from trainer.lm import prepare, tokens
vocabulary = tokens.load(Path("one"))
chunks = ((number, "a chunk of text. " * 1000) for number in range(20))
encoded = prepare.encode_chunks(chunks, vocabulary, np.uint16, 2)
numbers = [next(encoded)[0]]
at_work = len(multiprocessing.active_children())
numbers += [number for number, _, _ in encoded]
cores = len(os.sched_getaffinity(0))
print(at_work, numbers == list(range(20)), prepare.workers_for(0, vocabulary, prepare.LARGE) == cores,
      prepare.workers_for(0, vocabulary, prepare.LARGE - 1))
"""


def test_several_processes_encode_large_texts(gpt):
    if not (gpt.folder / "one").exists():
        gpt.program("prepare", "first.txt", "--out", "one", "--tokens", "bpe", "--vocab-size", 300)
    result = gpt.run("-c", SEVERAL, typed=True)
    assert result.stdout == "2 True True 1\n", result.stderr


SLOW = """
from trainer.lm import prepare
prepare.QUIET = 0
progress = prepare.Progress(10 << 20)
progress.add(5 << 20)
print(prepare.describe(25 << 20, 100 << 20, 5.0))
"""


def test_progress_shows_the_remaining_time(gpt):
    result = gpt.run("-c", SLOW, typed=True)
    assert result.stdout == "encoded 25 of 100 MiB (25 %), 5.0 MiB/s, 0:00:15 left\n"
    assert result.stderr.startswith("encoded 5 of 10 MiB (50 %), ")
