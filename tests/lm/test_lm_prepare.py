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


RECORDS = """
import gzip, json
import pyarrow, pyarrow.parquet
rows = [{"body": f"text {number} " * (number % 7 + 1), "other": number} for number in range(3000)]
lines = "".join(json.dumps(row) + "\\n" for row in rows)
for name in ("rows.jsonl", "lines.txt"):
    open(name, "w").write(lines)
open("rows.json", "w").write(json.dumps(rows))
gzip.open("rows.jsonl.gz", "wt").write(lines)
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "rows.parquet")
open("rows.txt", "w").write("<|endoftext|>".join(row["body"] for row in rows))
"""


@pytest.fixture(scope="module")
def rows(gpt):
    assert gpt.run("-c", RECORDS, typed=True).returncode == 0
    gpt.program("prepare", "rows.txt", "--out", "rows-bpe", "--tokens", "bpe", "--vocab-size", 300)
    return gpt


def prepared(gpt, name, *more):
    gpt.program("prepare", name, "--out", f"set-{name}", "--vocabulary", "rows-bpe", *more)
    return files(gpt.folder / f"set-{name}")


def test_records_are_the_same_in_every_format(rows):
    of_lines = prepared(rows, "rows.jsonl", "--field", "body")
    assert set(of_lines) == {"train-00000.bin", "val-00000.bin", "meta.json", "tokenizer.json"}
    for name in ("rows.json", "rows.jsonl.gz", "rows.parquet"):
        assert prepared(rows, name, "--field", "body") == of_lines
    train, val = (np_tokens(of_lines[f"{split}-00000.bin"]) for split in ("train", "val"))
    end = json.loads(of_lines["tokenizer.json"])["added_tokens"][0]["id"]
    assert train.count(end) + val.count(end) == 3000
    assert 200 < val.count(end) < 400
    assert train[-1] == end


def np_tokens(data):
    return [int.from_bytes(data[place : place + 2], "little") for place in range(0, len(data), 2)]


def test_records_have_the_tokens_of_a_text(rows):
    of_text = prepared(rows, "rows.txt", "--val", 0)["train-00000.bin"]
    assert prepared(rows, "rows.jsonl", "--field", "body", "--val", 0)["train-00000.bin"] == of_text


def test_record_without_the_field_is_refused_with_its_line(rows):
    for workers in (1, 2):
        argv = ("prepare", "rows.jsonl", "--out", "none", "--vocabulary", "rows-bpe", "--workers", workers)
        result = rows.run("-m", f"trainer.lm.{argv[0]}", *argv[1:])
        assert result.returncode == 2
        assert result.stderr.startswith("error: rows.jsonl: line 1 has no field 'text'; it has 'body', 'other'")


KILLED = """
import os, sys
from trainer.lm import prepare, records
prepare.CHUNK, records.GROUP, prepare.PAUSE = 5000, 20_000, 0
left = int(sys.argv[1])
add = prepare.Writer.add
def killed(self, numbers):
    global left
    left -= 1
    if left == 0:
        self._file.flush()
        os._exit(9)
    add(self, numbers)
prepare.Writer.add = killed
prepare.main(sys.argv[2:])
"""


@pytest.mark.parametrize("name", ["rows.jsonl", "lines.txt"])
def test_killed_prepare_continues_and_writes_the_same_files(rows, name):
    argv = (name, "--field", "body", "--vocabulary", "rows-bpe", "--shard-tokens", 10_000, "--out")
    (rows.folder / "killed.py").write_text(KILLED)
    whole, parts = f"whole-{name}", f"parts-{name}"
    assert rows.run("killed.py", -1, *argv, whole).returncode == 0
    first = rows.run("killed.py", 12, *argv, parts)
    assert first.returncode == 9
    assert not (rows.folder / parts / "meta.json").exists()
    second = rows.run("killed.py", 7, *argv, parts)
    assert (second.returncode, "continuing after" in second.stderr) == (9, True)
    third = rows.run("killed.py", -1, *argv, parts)
    assert (third.returncode, "continuing after" in third.stderr) == (0, True), third.stderr
    assert files(rows.folder / parts) == files(rows.folder / whole)
    assert len(list((rows.folder / parts).glob("train-*.bin"))) > 2


def test_other_options_start_a_killed_prepare_anew(rows):
    argv = ("rows.jsonl", "--field", "body", "--vocabulary", "rows-bpe", "--out", "rows-changed")
    (rows.folder / "killed.py").write_text(KILLED)
    assert rows.run("killed.py", 5, *argv).returncode == 9
    again = rows.run("killed.py", -1, *argv, "--val", 0)
    assert (again.returncode, "continuing" in again.stderr) == (0, False)
    assert not list((rows.folder / "rows-changed").glob("val-*"))
