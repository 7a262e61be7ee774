"""Encodes text to token numbers on all cores. The result does not depend on the number of cores.

Each chunk of a text is encoded on its own, so several processes can encode chunks, which are written in order. Most
vocabularies never join characters across the start of a space. Then a chunk is encoded word by word, and words that
were encoded before are looked up.
"""

from __future__ import annotations

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
from typing import Any, Deque, Dict, Iterable, Iterator, List, Optional, Tuple

import numpy as np

from trainer.gpt import tokens
from trainer.gpt.errors import FailedError

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
        self._known: Dict[str, bytes] = {}
        tokenizer = vocabulary.tokenizer if isinstance(vocabulary, tokens.Bpe) else None
        self._is_local = tokenizer is not None and is_local(json.loads(tokenizer.to_str()))

    def encode(self, text: str) -> Any:
        """Return the tokens of a chunk."""
        if not self._is_local:
            return np.asarray(self._vocabulary.encode(text), dtype=self._kind)
        known, fresh = self._known, {}
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


def encoded(
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
