"""The commands of the documentation that start a program of the trainer, made small enough for a test.

A page's command stays as the reader types it, except for what ``smaller`` replaces: sizes, numbers of steps and ranks.
"""

import itertools
import re
import shlex
from dataclasses import dataclass

import yaml
from doc_blocks import PAGES, ROOT, blocks, lines

from trainer.lm.families import PUBLISHED

PROGRAM = re.compile(r"-m (trainer\.(?:lm|vlm)[\w.]*)")
TRAININGS = ("trainer.lm", "trainer.vlm")
RANKS = {"--nproc-per-node": 1, "--nodes": 2}  # of these words at most so many, whatever the page has
FILE = re.compile(r"# (\S+\.yaml)\n")  # the first line of a block that is a file
# An environment for tests has no GPU: these commands are refused, by exactly this reason.
NEED_MORE = {"--quantize nf4": "bitsandbytes", "--fp8": "fp8 needs a GPU"}
REPLACED = {
    "model": lambda value: f"sizes/{value}" if value in PUBLISHED else value,
    "block_size": lambda value: min(int(value), 128),
    "batch_size": lambda _: 2,
    "global_batch": lambda _: 8,
    "accumulation": lambda _: 2,
    "max_iters": lambda value: 2 + min(int(value), 20_000) // 3000,  # many more steps stay more steps
    "warmup_iters": lambda _: 1,
    "eval_interval": lambda _: 100,  # the last step is evaluated
    "eval_iters": lambda _: 2,
    "dtype": lambda value: "float32" if value == "float16" else value,  # DeepSpeed has fp16 only on GPUs
}


@dataclass(frozen=True)
class Command:
    """A line of a page: the program that it starts, its words, and the ranks of a training."""

    line: str
    program: str
    argv: tuple[str, ...]
    ranks: int

    @property
    def refusal(self):
        """What its refusal contains in an environment without GPUs, or None."""
        return next((reason for words, reason in NEED_MORE.items() if words in self.line), None)


def pages():
    """The pages that have such commands, by their path in the repository."""
    return [page.relative_to(ROOT).as_posix() for page in PAGES if commands(page)]


def commands(page):
    """The commands of a page, in its order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [_read(line) for block in blocks(text) for line in lines(block) if PROGRAM.search(line)]


def files(page):
    """The files that a page shows, by name, made small."""
    found = {}
    for block in blocks((ROOT / page).read_text(encoding="utf-8")):
        named = FILE.match(block)
        if named:
            options = {"block_size": 128, **yaml.safe_load(block)}
            found[named[1]] = yaml.safe_dump({key: _replaced(key, value) for key, value in options.items()})
    return found


def _read(line):
    before, program, after = PROGRAM.split(line)
    ranks = 1
    words = shlex.split(before)
    for word, number in itertools.pairwise(words):
        ranks = min(int(number), RANKS[word]) if word in RANKS else ranks
    argv = shlex.split(after.partition("  #")[0])
    argv = argv[argv.index("--") + 1 :] if words[0] == "clusterctl" else argv
    return Command(line, program, tuple(smaller(argv, program)), ranks)


def smaller(argv, program):
    """The words of a command, with values that a test replaces."""
    found = list(argv)
    for at, word in enumerate(found[:-1]):
        if word.startswith("--"):
            found[at + 1] = str(_replaced(word[2:].replace("-", "_"), found[at + 1]))
    if program not in TRAININGS:
        return found
    if not {"--model", "--init", "--resume", "--config", "--n-layer"}.intersection(found):
        found += ["--n-layer", "2", "--n-head", "2", "--n-embd", "32"]
    if not {"--resume", "--config"}.intersection(found):
        found += [] if "--block-size" in found else ["--block-size", "128"]
        found += [] if "--batch-size" in found else ["--batch-size", "2"]
        found += [] if {"--max-iters", "--epochs"}.intersection(found) else ["--max-iters", "2"]
        found += [] if "--eval-iters" in found else ["--eval-iters", "2"]
    return [*found, "--trackers", "none"]


def _replaced(option, value):
    return REPLACED[option](value) if option in REPLACED else value
