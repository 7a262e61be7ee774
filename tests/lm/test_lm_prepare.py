"""Text to tokens on several cores: the same files on any number of them, and the tokens that the library gives."""

import json

import pytest
from trainings import HERE

VOCABULARIES = ("own", "prefix", "cut", "normalizer", "spaces", "strips", "older", "qwen", "llama")


@pytest.fixture(scope="module")
def same(gpt):
    result = gpt.run(HERE / "same_tokens.py")
    assert result.returncode == 0, result.stderr
    return {line["name"]: line for line in map(json.loads, result.stdout.splitlines())}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_encoding_word_by_word_gives_the_tokens_of_the_whole_text(same, name):
    """If a vocabulary could join the text on both sides of a space, words are not encoded one by one."""
    assert same[name]["differ"] == 0
    assert same[name]["local"] == (name in ("own", "older", "qwen", "llama"))
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
from functools import partial
from operator import add
from trainer.lm import workers
results = workers.mapped(partial, (add, 7), ((number, number) for number in range(20)), 2)
found = [next(results)]
running = len(multiprocessing.active_children())
found += results
cores = len(os.sched_getaffinity(0))
print(running, found == [(number, number + 7) for number in range(20)], workers.count_for(0, workers.LARGE) == cores,
      workers.count_for(0, workers.LARGE - 1))
"""


def test_several_processes_encode_large_texts(gpt):
    result = gpt.run("-c", SEVERAL, typed=True)
    assert result.stdout == "2 True True 1\n", result.stderr


SLOW = """
from trainer.lm import progress
progress.QUIET = 0
shown = progress.Progress(10 << 20)
shown.add(5 << 20)
print(progress.describe(25 << 20, 100 << 20, 5.0))
"""


def test_progress_shows_the_remaining_time(gpt):
    result = gpt.run("-c", SLOW, typed=True)
    assert result.stdout == "encoded 25 of 100 MiB (25 %), 5.0 MiB/s, 0:00:15 left\n"
    assert result.stderr.startswith("encoded 5 of 10 MiB (50 %), ")
