"""Text to the numbers of tokens, on all cores, with the same numbers on any number of cores.

A text comes in chunks, and a chunk is encoded as if it stood alone. So chunks can be encoded by several processes, and
are written in their order. Within a chunk, most vocabularies never join characters across the start of a space: then
words are encoded one by one, and a word that was encoded before is looked up.
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

LARGE = 16 << 20  # bytes of text from which on more processes than this one are worth their start
KNOWN = 1 << 17  # words that a process remembers: about 20 MB
LONG = 64  # characters of a word that is not worth remembering
AHEAD = 3  # chunks for each process that are in memory
QUIET = 2.0  # seconds until the first line of progress
# Before a space that follows something else. What some library may take for a space is not "something else".
_CUT = re.compile("(?<=[^\\s\u180e\u200b\ufeff])(?=[ \\t\\n\\r])")


def is_local(said: Dict[str, Any]) -> bool:
    """Whether a ``tokenizer.json`` gives a text cut before its spaces the same tokens as the whole text.

    GPT-2's way of cutting does: no piece of it goes from another character to a space. A normalizer, a prefix or an
    added token with a space may not.
    """
    cut, model = said.get("pre_tokenizer") or {}, said.get("model") or {}
    plain = ("lstrip", "rstrip", "single_word")
    return (
        cut.get("type") == "ByteLevel"
        and cut.get("use_regex", True) is True
        and not cut.get("add_prefix_space")
        and model.get("type", "BPE") == "BPE"
        and not model.get("dropout")
        and not said.get("normalizer")
        and not said.get("truncation")
        and not said.get("padding")
        and not any(
            re.search(r"\s", each["content"]) or any(each.get(key) for key in plain)
            for each in said.get("added_tokens", [])
        )
    )


class Encoder:
    """Encodes chunks to arrays, and remembers words where that gives the same tokens."""

    def __init__(self, vocabulary: tokens.Tokens, kind: Any) -> None:
        self._vocabulary = vocabulary
        self._kind = kind
        self._code = next(code for code in "HIL" if array(code).itemsize == np.dtype(kind).itemsize)
        self._known: Dict[str, bytes] = {}
        tokenizer = vocabulary.tokenizer if isinstance(vocabulary, tokens.Bpe) else None
        self._is_local = tokenizer is not None and is_local(json.loads(tokenizer.to_str()))

    def encode(self, text: str) -> Any:
        """The tokens of a chunk."""
        if not self._is_local:
            return np.asarray(self._vocabulary.encode(text), dtype=self._kind)
        known, fresh = self._known, {}
        words: List[str] = _CUT.split(text)
        for word in dict.fromkeys(words):
            if word not in known:
                told = array(self._code, self._vocabulary.encode(word)).tobytes()
                (known if len(known) < KNOWN and len(word) <= LONG else fresh)[word] = told
        found = known if not fresh else {**{word: known[word] for word in set(words) - set(fresh)}, **fresh}
        joined = b"".join(map(found.__getitem__, words))
        return np.frombuffer(joined, dtype=self._code).astype(self._kind)


_encoder: Optional[Encoder] = None  # of a worker


def _start(said: str, kind: str) -> None:
    global _encoder  # noqa: PLW0603 - a process of the pool has no other place
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first process, which ends the others
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are as many as the cores already
    _encoder = Encoder(tokens.parse_bpe(said), np.dtype(kind))


def _encode(text: str) -> Any:
    assert _encoder is not None
    return _encoder.encode(text)


def workers_for(asked: int, vocabulary: tokens.Tokens, size: int) -> int:
    """How many processes encode texts of ``size`` bytes; ``asked`` is 0 for a choice."""
    if not isinstance(vocabulary, tokens.Bpe):
        return 1  # single characters: reading them takes longer
    return asked or (len(os.sched_getaffinity(0)) if size >= LARGE else 1)


def encoded(
    chunks: Iterable[Tuple[Any, str]], vocabulary: tokens.Tokens, kind: Any, workers: int
) -> Iterator[Tuple[Any, Any, int]]:
    """For each chunk, which comes with a tag, in their order: the tag, the tokens, and its size in bytes.

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
        raise FailedError("a process that encodes was killed", "--workers 1, which needs the least memory") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class Progress:
    """Lines on stderr about work that takes longer than two seconds: one that changes on a terminal, else few."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._began = time.monotonic()
        self._next = QUIET
        self._pause = 1.0 if sys.stderr.isatty() else 10.0
        self._shown = False

    def add(self, size: int) -> None:
        """Count bytes that are done."""
        self._done += size
        spent = time.monotonic() - self._began
        if spent < self._next:
            return
        self._next = spent + self._pause
        self._shown = True
        self._write(describe(self._done, self._total, spent))

    def close(self) -> None:
        """End the line that changes."""
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
