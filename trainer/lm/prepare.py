"""Converts text files to shards of tokens (``data.py``): ``python -m trainer.lm.prepare TEXT… --out DIR``."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from array import array
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Deque, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

import numpy as np

from trainer.bounds import COUNT, Bound
from trainer.lm import tokens
from trainer.lm.config import Parser
from trainer.lm.errors import FailedError, RefusedError, exit_with

CHUNK = 1 << 20  # characters in memory at a time
SHARD = 1 << 30  # tokens per file
# Files that prepare writes, also when it is killed. It never removes anything else.
OURS = re.compile(r"(train|val)-\d{5}\.bin|meta\.json|characters\.json|tokenizer\.json|\..*\.part")


def chunks(path: Path) -> Iterator[str]:
    """Yield a file's text in chunks that end at line ends, so that BPE sees whole words.

    Raises:
        RefusedError: the file cannot be read, or is not UTF-8.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while True:
                text = file.read(CHUNK)
                if not text:
                    return
                yield text + file.readline()
    except OSError as error:
        raise RefusedError("%s: %s" % (path, error.strerror), "check the path of the text") from error
    except UnicodeDecodeError as error:
        what = "%s is not UTF-8 (byte %d)" % (path, error.start)
        raise RefusedError(what, "iconv -f latin1 -t utf-8 %s" % path) from error


def splits(path: Path, held_back: float) -> Iterator[Tuple[str, str]]:
    """Yield the chunks of a file with their splits. The end of the file is held back for evaluation."""
    left = round(path.stat().st_size * (1 - held_back))  # remaining bytes of the training split
    for text in chunks(path):
        size = len(text.encode())
        if size <= left:
            yield "train", text
        else:
            cut = len(text.encode()[:left].decode(errors="ignore"))
            if cut:
                yield "train", text[:cut]
            yield "val", text[cut:]
        left = max(0, left - size)


def pieces(texts: Sequence[Path], held_back: float) -> Iterator[Tuple[Tuple[str, bool], str]]:
    """Yield the chunks of all texts with their split and whether a text, or its part of a split, ends with them."""
    for path in texts:
        last: Optional[Tuple[str, str]] = None
        for split, text in splits(path, held_back):
            if last:
                yield (last[0], last[0] != split), last[1]
            last = (split, text)
        if last:
            yield (last[0], True), last[1]


class Writer:
    """Writes the shards of one split. A shard gets its name only when it is complete."""

    def __init__(self, folder: Path, split: str, kind: Any, limit: int) -> None:
        self.total = 0
        self._named = (folder, split)
        self._kind = kind
        self._limit = limit
        self._paths: List[Path] = []
        self._file: Any = None
        self._room = 0

    def add(self, numbers: Sequence[int]) -> None:
        """Append tokens."""
        rest = np.asarray(numbers, dtype=self._kind)
        while len(rest):
            if not self._room:
                self._next()
            part, rest = rest[: self._room], rest[self._room :]
            part.tofile(self._file)
            self._room -= len(part)
            self.total += len(part)

    def close(self) -> None:
        """Give all shards their final names."""
        self._end()
        folder, split = self._named
        for number, path in enumerate(self._paths):
            path.replace(folder / ("%s-%05d.bin" % (split, number)))

    def _next(self) -> None:
        self._end()
        folder, split = self._named
        self._paths.append(folder / (".%s-%05d.bin.part" % (split, len(self._paths))))
        self._file = self._paths[-1].open("wb")
        self._room = self._limit

    def _end(self) -> None:
        if self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def prepare(
    texts: Sequence[Path],
    out: Path,
    vocabulary: tokens.Tokens,
    held_back: float,
    limit: int = SHARD,
    workers: int = 0,
) -> Dict[str, int]:
    """Write the shards and their meta.json. Return the number of tokens by split. ``workers`` 0 means automatic.

    Raises:
        RefusedError: a text is unreadable or empty, or the folder contains other files.
        OSError: the folder is not writable.
    """
    out.mkdir(parents=True, exist_ok=True)
    existing = sorted(out.iterdir())
    unknown = [path.name for path in existing if not OURS.fullmatch(path.name)]
    if unknown:
        raise RefusedError("%s: %s does not belong to a data set" % (out, unknown[0]), "use a new folder for --out")
    for old in existing:
        old.unlink()
    kind = "uint16" if vocabulary.size <= 1 << 16 else "uint32"
    token = np.dtype("<u2" if kind == "uint16" else "<u4")
    writers = {split: Writer(out, split, token, limit) for split in ("train", "val")}
    size = sum(path.stat().st_size for path in texts if path.is_file())
    progress = Progress(size)
    count = workers_for(workers, vocabulary, size)
    for (split, ends), numbers, length in encode_chunks(pieces(texts, held_back), vocabulary, token, count):
        writers[split].add(numbers)
        if ends and vocabulary.end is not None:
            writers[split].add([vocabulary.end])
        progress.add(length)
    progress.close()
    counts = {split: writer.total for split, writer in writers.items()}
    if not counts["train"]:
        raise RefusedError("%s: no text" % ", ".join(map(str, texts)))
    for writer in writers.values():
        writer.close()
    vocabulary.save(out)
    meta = {"format": 1, "dtype": kind, "vocab_size": vocabulary.size, "digest": vocabulary.digest, "tokens": counts}
    part = out / ".meta.json.part"
    part.write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    part.replace(out / "meta.json")
    return counts


def characters_of(texts: Sequence[Path]) -> tokens.Characters:
    """Return every character in the texts, in Unicode order, like nanoGPT."""
    found: Set[str] = set()
    for path in texts:
        for text in chunks(path):
            found.update(text)
    return tokens.Characters(sorted(found))


def make_parser() -> Parser:
    """Return the option parser."""
    parser = Parser("trainer.lm.prepare", __doc__)
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXT")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--tokens", choices=("characters", "bpe"), default="characters")
    size = Bound(low=257, high=1 << 24)  # 256 bytes and the end token
    parser.number("--vocab-size", 8192, size, "tokens of the BPE trained on the texts")
    parser.add_argument(
        "--vocabulary", type=Path, metavar="PATH", help="an existing vocabulary: a folder or tokenizer.json"
    )
    parser.number("--val", 0.1, Bound(low=0, below=1), "share of each text held back for evaluation")
    parser.number("--shard-tokens", SHARD, COUNT, "tokens per file")
    parser.number("--workers", 0, Bound(low=1, high=1024, also=(0,)), "encoding processes (0: one per core)")
    return parser


def main(argv: Optional[List[str]] = None) -> None:
    """Run the program."""
    options = argparse.Namespace(**make_parser().read(argv))
    vocabulary: Optional[tokens.Tokens]
    if options.vocabulary:
        path = options.vocabulary
        vocabulary = tokens.load(path) if path.is_dir() else tokens.read_bpe(path)
        if vocabulary is None:
            raise RefusedError("%s: no vocabulary found" % path, "name a folder with %s" % tokens.BPE)
    elif options.tokens == "bpe":
        pieces = (text for path in options.texts for text in chunks(path))
        vocabulary = tokens.train_bpe(pieces, options.vocab_size)
    else:
        vocabulary = characters_of(options.texts)
    try:
        counts = prepare(options.texts, options.out, vocabulary, options.val, options.shard_tokens, options.workers)
    except OSError as error:
        raise RefusedError("%s: %s" % (options.out, error.strerror), "a writable folder with free space") from error
    counted = ", ".join("%d tokens in %s" % (count, split) for split, count in counts.items())
    sys.stdout.write("%s: %s, vocabulary of %d\n" % (options.out, counted, vocabulary.size))


LARGE = 16 << 20  # bytes of text from which starting more processes pays off
KNOWN = 1 << 17  # words in the cache of a process: about 20 MB
LONG = 64  # longer words are not cached
AHEAD = 3  # chunks in memory per process
QUIET = 2.0  # seconds until the first line of progress
# Before a space that follows another character. Characters that some library may treat as a space do not count.
_CUT = re.compile("(?<=[^\\s\u180e\u200b\ufeff])(?=[ \\t\\n\\r])")


def is_local(tokenizer: Dict[str, Any]) -> bool:
    """Whether a ``tokenizer.json`` gives the same tokens if a text is split before its spaces.

    GPT-2's splitting does: none of its pieces continues from another character into a space. A normalizer, a prefix
    or an added token with a space may prevent it.
    """
    cut, model = tokenizer.get("pre_tokenizer") or {}, tokenizer.get("model") or {}
    plain = ("lstrip", "rstrip", "single_word")
    return (
        cut.get("type") == "ByteLevel"
        and cut.get("use_regex", True) is True
        and not cut.get("add_prefix_space")
        and model.get("type", "BPE") == "BPE"
        and not model.get("dropout")
        and not tokenizer.get("normalizer")
        and not tokenizer.get("truncation")
        and not tokenizer.get("padding")
        and not any(
            re.search(r"\s", each["content"]) or any(each.get(key) for key in plain)
            for each in tokenizer.get("added_tokens", [])
        )
    )


class Encoder:
    """Encodes chunks to arrays. It caches words if that gives the same tokens."""

    def __init__(self, vocabulary: tokens.Tokens, kind: Any) -> None:
        self._vocabulary = vocabulary
        self._kind = kind
        self._code = next(code for code in "HIL" if array(code).itemsize == np.dtype(kind).itemsize)
        self.known: Dict[str, bytes] = {}
        tokenizer = vocabulary.tokenizer if isinstance(vocabulary, tokens.Bpe) else None
        self.is_local = tokenizer is not None and is_local(json.loads(tokenizer.to_str()))

    def encode(self, text: str) -> Any:
        """Return the tokens of a chunk."""
        if not self.is_local:
            return np.asarray(self._vocabulary.encode(text), dtype=self._kind)
        known = self.known
        fresh: Dict[str, bytes] = {}
        words: List[str] = _CUT.split(text)
        for word in dict.fromkeys(words):
            if word not in known:
                encoded_word = array(self._code, self._vocabulary.encode(word)).tobytes()
                (known if len(known) < KNOWN and len(word) <= LONG else fresh)[word] = encoded_word
        found = known if not fresh else {**{word: known[word] for word in set(words) - set(fresh)}, **fresh}
        joined = b"".join(map(found.__getitem__, words))
        return np.frombuffer(joined, dtype=self._code).astype(self._kind)


_encoder: Optional[Encoder] = None  # set in a worker process


def _start(text: str, kind: str) -> None:
    global _encoder  # noqa: PLW0603 - a pool's process keeps its encoder here
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process handles Ctrl-C and stops the others
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core already
    _encoder = Encoder(tokens.parse_bpe(text), np.dtype(kind))


def _encode(text: str) -> Any:
    assert _encoder is not None
    return _encoder.encode(text)


def workers_for(requested: int, vocabulary: tokens.Tokens, size: int) -> int:
    """Return the number of processes for texts of ``size`` bytes. ``requested`` is 0 for an automatic choice."""
    if not isinstance(vocabulary, tokens.Bpe):
        return 1  # single characters: reading the file takes longer than encoding
    return requested or (len(os.sched_getaffinity(0)) if size >= LARGE else 1)


def encode_chunks(
    chunks: Iterable[Tuple[Any, str]], vocabulary: tokens.Tokens, kind: Any, workers: int
) -> Iterator[Tuple[Any, Any, int]]:
    """Encode chunks in order. A chunk comes with a tag; yield the tag, the tokens and the size in bytes.

    Raises:
        FailedError: a process was killed.
    """
    if workers == 1 or not isinstance(vocabulary, tokens.Bpe):
        encoder = Encoder(vocabulary, kind)
        for tag, text in chunks:
            yield tag, encoder.encode(text), len(text.encode())
        return
    start = (vocabulary.tokenizer.to_str(), np.dtype(kind).str)
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start, initargs=start)
    waiting: Deque[Tuple[Any, Future[Any], int]] = deque()
    try:
        for tag, text in chunks:
            waiting.append((tag, pool.submit(_encode, text), len(text.encode())))
            if len(waiting) >= AHEAD * workers:
                first, future, size = waiting.popleft()
                yield first, future.result(), size
        while waiting:
            first, future, size = waiting.popleft()
            yield first, future.result(), size
    except BrokenProcessPool as error:
        raise FailedError("an encoding process was killed", "--workers 1 needs the least memory") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class Progress:
    """Progress on stderr after two seconds: one line that updates on a terminal, else a line every ten seconds."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._began = time.monotonic()
        self._next = QUIET
        self._pause = 1.0 if sys.stderr.isatty() else 10.0
        self._shown = False

    def add(self, size: int) -> None:
        """Count encoded bytes."""
        self._done += size
        spent = time.monotonic() - self._began
        if spent < self._next:
            return
        self._next = spent + self._pause
        self._shown = True
        self._write(describe(self._done, self._total, spent))

    def close(self) -> None:
        """End the line that updates."""
        if self._shown and sys.stderr.isatty():
            sys.stderr.write("\n")

    def _write(self, text: str) -> None:
        sys.stderr.write("\r%s\x1b[K" % text if sys.stderr.isatty() else text + "\n")
        sys.stderr.flush()


def describe(done: int, total: int, spent: float) -> str:
    """``encoded 12 of 120 MiB (10 %), 3.2 MiB/s, 0:00:34 left``."""
    speed = done / spent
    left = round(max(0, total - done) / speed)
    share = 100 * done / max(1, total)
    clock = "%d:%02d:%02d" % (left // 3600, left // 60 % 60, left % 60)
    sizes = (done / 2**20, total / 2**20, share, speed / 2**20, clock)
    return "encoded %.0f of %.0f MiB (%.0f %%), %.1f MiB/s, %s left" % sizes


if __name__ == "__main__":
    exit_with(main)
