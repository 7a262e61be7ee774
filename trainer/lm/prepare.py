"""Converts texts and records to shards of tokens (``data.py``): ``python -m trainer.lm.prepare TEXT… --out DIR``.

A file ``*.jsonl``, ``*.json`` or ``*.parquet`` has records, of which ``--field`` is a document. Any other file is one
document. ``.gz`` and ``.zst`` behind a name are unpacked. The token after each document is the vocabulary's ``end``.

The end of a text file is held back for evaluation. In records and in compressed texts, whose length is not known, it is
some of the documents or chunks, chosen by their numbers.

The texts are read in pieces, which processes encode. A journal says how many pieces are on disk. The same command
continues there after it was killed, and writes the same files as without.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import sys
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple, Union

import numpy as np

from trainer.bounds import COUNT, Bound
from trainer.lm import records, tokens, workers
from trainer.lm.errors import RefusedError, exit_with
from trainer.lm.packing import key_of
from trainer.lm.parser import Parser
from trainer.lm.progress import Progress

FORMAT = 2  # of the journal
CHUNK = 1 << 20  # characters in memory at a time
SHARD = 1 << 30  # tokens per file
SPLITS = ("train", "val")
PAUSE = 20.0  # seconds between entries in the journal
JOURNAL = ".journal.json"
# Files that prepare writes, also when it is killed. It never removes anything else.
OURS = re.compile(r"(train|val)-\d{5}\.bin|meta\.json|characters\.json|tokenizer\.json|\..*\.part|\.journal\.json")


@dataclass(frozen=True)
class Chunk:
    """Part of a text, with the split that it belongs to. ``ends``: the text, or its part of the split, ends with it."""

    split: str
    text: str
    ends: bool
    size: int


Piece = Union[Chunk, records.Group]


def chunks(path: Path) -> Iterator[str]:
    """Yield a file's text in chunks that end at line ends, so that BPE sees whole words.

    Raises:
        RefusedError: the file cannot be read, or is not UTF-8.
    """
    try:
        with records.unpacked(path) as opened, io.TextIOWrapper(opened, encoding="utf-8", newline="") as file:
            while True:
                text = file.read(CHUNK)
                if not text:
                    return
                yield text + file.readline()
    except records.unpacking_errors() as error:
        raise RefusedError("%s cannot be unpacked: %s" % (path, error), "copy the file again") from error
    except OSError as error:
        raise RefusedError("%s: %s" % (path, error.strerror or error), "check the path of the text") from error
    except UnicodeDecodeError as error:
        what = "%s is not UTF-8 (byte %d)" % (path, error.start)
        raise RefusedError(what, "iconv -f latin1 -t utf-8 %s" % path) from error


def splits(path: Path, held_back: float) -> Iterator[Tuple[str, str]]:
    """Yield the chunks of a text with their splits. The end of the file is held back for evaluation."""
    size = records.size_of(path) if path.is_file() else 0
    if size is None:
        for number, text in enumerate(chunks(path)):
            yield chosen(number, held_back), text
        return
    left = round(size * (1 - held_back))  # remaining bytes of the training split
    for text in chunks(path):
        length = len(text.encode())
        if length <= left:
            yield "train", text
        else:
            cut = len(text.encode()[:left].decode(errors="ignore"))
            if cut:
                yield "train", text[:cut]
            yield "val", text[cut:]
        left = max(0, left - length)


def chosen(number: int, held_back: float) -> str:
    """Return the split of a document by its number in the file."""
    return "val" if key_of("held back", number) < held_back * 2**64 else "train"


def pieces(texts: Sequence[Path], held_back: float) -> Iterator[Piece]:
    """Yield the pieces of all texts."""
    for path in texts:
        if records.is_records(path):
            yield from records.groups(path)
            continue
        last: Optional[Tuple[str, str]] = None
        for split, text in splits(path, held_back):
            if last:
                yield Chunk(*last, last[0] != split, len(last[1].encode()))
            last = (split, text)
        if last:
            yield Chunk(*last, True, len(last[1].encode()))


class Writer:
    """Writes the shards of one split. A shard gets its name only when all are complete.

    ``shards`` and ``written`` are the shards that an interrupted ``prepare`` left, and the tokens in the last of them.
    """

    def __init__(self, folder: Path, split: str, kind: Any, limit: int, state: Tuple[int, int] = (0, 0)) -> None:
        shards, written = state
        self._named = (folder, split)
        self._kind = np.dtype(kind)
        self._limit = limit
        self._shards = shards
        self._file: Any = None
        self._room = 0
        if shards:
            self._file = self._path(shards - 1).open("r+b")
            self._file.truncate(written * self._kind.itemsize)
            self._file.seek(0, os.SEEK_END)
            self._room = limit - written
        self.total = max(0, shards - 1) * limit + written

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

    def state(self) -> Tuple[int, int]:
        """Write everything to disk. Return the number of shards and the tokens in the last one, for a later writer."""
        if self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        return self._shards, self._limit - self._room if self._shards else 0

    def close(self) -> None:
        """Give all shards their final names."""
        self._end()
        folder, split = self._named
        for number in range(self._shards):
            self._path(number).replace(folder / ("%s-%05d.bin" % (split, number)))

    def _path(self, number: int) -> Path:
        folder, split = self._named
        return folder / (".%s-%05d.bin.part" % (split, number))

    def _next(self) -> None:
        self._end()
        self._file = self._path(self._shards).open("wb")
        self._shards += 1
        self._room = self._limit

    def _end(self) -> None:
        if self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


class Journal:
    """How much of a job is on disk. A job is its texts, vocabulary and options; another one starts at 0."""

    def __init__(self, out: Path, job: Sequence[Any]) -> None:
        self._path = out / JOURNAL
        self._job = hashlib.sha256(json.dumps([FORMAT, *job]).encode()).hexdigest()
        self._next = time.monotonic() + PAUSE

    def read(self) -> Tuple[int, Dict[str, Tuple[int, int]]]:
        """Return the number of pieces on disk, and the state of each split's writer."""
        try:
            entry = json.loads(self._path.read_bytes())
            if entry["job"] != self._job:
                return 0, {}
            states = {split: (int(entry[split][0]), int(entry[split][1])) for split in SPLITS}
            return int(entry["pieces"]), states
        except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
            return 0, {}  # without a journal the job starts at its beginning

    def write(self, count: int, writers: Dict[str, Writer], is_due: bool = False) -> None:
        """Record that this number of pieces is on disk, if it is time."""
        if time.monotonic() < self._next and not is_due:
            return
        entry = {"job": self._job, "pieces": count, **{split: writers[split].state() for split in SPLITS}}
        records.write(self._path, json.dumps(entry).encode())
        self._next = time.monotonic() + PAUSE


def prepare(
    texts: Sequence[Path],
    out: Path,
    vocabulary: tokens.Tokens,
    held_back: float,
    limit: int = SHARD,
    requested: int = 0,
    field: str = "text",
) -> Dict[str, int]:
    """Write the shards and their meta.json. Return the number of tokens by split. ``requested`` 0 means automatic.

    Raises:
        RefusedError: a text is unreadable or empty, or the folder contains other files.
        OSError: the folder is not writable.
    """
    existing = _existing(out)
    kind = "uint16" if vocabulary.size <= 1 << 16 else "uint32"
    token = np.dtype("<u2" if kind == "uint16" else "<u4")
    journal = Journal(out, [_facts(texts), vocabulary.content(), held_back, limit, field])
    done, states = journal.read()
    for old in existing:
        if not (done and (old.name == JOURNAL or old.name.endswith(".part"))):
            old.unlink()
    writers = {split: Writer(out, split, token, limit, states.get(split, (0, 0))) for split in SPLITS}
    size = sum(path.stat().st_size for path in texts if path.is_file())
    progress = Progress(size)
    if done:
        sys.stderr.write("%s: continuing after %d pieces\n" % (out, done))

    def remaining() -> Iterator[Tuple[Tuple[int, int], Piece]]:
        for number, piece in enumerate(pieces(texts, held_back), 1):
            if number > done:
                yield (number, piece.size), piece
            else:
                progress.skip(piece.size)

    count = workers.count_for(requested, size) if isinstance(vocabulary, tokens.Bpe) else 1
    arguments = (vocabulary, token.str, field, held_back)
    for (number, length), encoded in workers.mapped(Encoder, arguments, remaining(), count):
        for split, found in encoded:
            writers[split].add(found)
        journal.write(number, writers)
        progress.add(length)
    progress.close()
    counts = {split: writer.total for split, writer in writers.items()}
    if not counts["train"]:
        raise RefusedError("%s: no text" % ", ".join(map(str, texts)))
    meta = {"format": 1, "dtype": kind, "vocab_size": vocabulary.size, "digest": vocabulary.digest, "tokens": counts}
    _finish(out, writers, vocabulary, meta)
    return counts


def _existing(out: Path) -> List[Path]:
    out.mkdir(parents=True, exist_ok=True)
    existing = sorted(out.iterdir())
    unknown = [path.name for path in existing if not OURS.fullmatch(path.name)]
    if unknown:
        raise RefusedError("%s: %s does not belong to a data set" % (out, unknown[0]), "use a new folder for --out")
    return existing


def _finish(out: Path, writers: Dict[str, Writer], vocabulary: tokens.Tokens, meta: Dict[str, Any]) -> None:
    (out / JOURNAL).unlink(missing_ok=True)  # from here on the parts get their names
    for writer in writers.values():
        writer.close()
    vocabulary.save(out)
    records.write(out / "meta.json", (json.dumps(meta, indent=1) + "\n").encode())


def _facts(texts: Sequence[Path]) -> List[Any]:
    return [[str(path.resolve()), *_stamp(path)] for path in texts]


def _stamp(path: Path) -> List[int]:
    return [path.stat().st_size, path.stat().st_mtime_ns] if path.is_file() else []


def documents(path: Path, field: str) -> Iterator[str]:
    """Yield the texts of a file: chunks, or the field of each record."""
    if not records.is_records(path):
        yield from chunks(path)
        return
    for group in records.groups(path):
        for place, item in group.places():
            yield records.field(records.parse(item, place), field, place)


def characters_of(texts: Sequence[Path], field: str = "text") -> tokens.Characters:
    """Return every character in the texts, in Unicode order, like nanoGPT."""
    found: Set[str] = set()
    for path in texts:
        for text in documents(path, field):
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
    parser.add_argument("--field", default="text", metavar="NAME", help="the field of a record with its text (text)")
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
        read = (text for path in options.texts for text in documents(path, options.field))
        vocabulary = tokens.train_bpe(read, options.vocab_size)
    else:
        vocabulary = characters_of(options.texts, options.field)
    try:
        settings = (options.val, options.shard_tokens, options.workers, options.field)
        counts = prepare(options.texts, options.out, vocabulary, *settings)
    except OSError as error:
        raise RefusedError("%s: %s" % (options.out, error.strerror), "a writable folder with free space") from error
    counted = ", ".join("%d tokens in %s" % (count, split) for split, count in counts.items())
    sys.stdout.write("%s: %s, vocabulary of %d\n" % (options.out, counted, vocabulary.size))


KNOWN = 1 << 18  # words in each half of the cache of a process: about 50 MB
# Before a space that follows another character. Characters that some library may treat as a space do not count.
_CUT = re.compile("(?<=[^\\s\u180e\u200b\ufeff])(?=[ \\t\\n\\r])")
_CUT_LINES = re.compile("(?<=[^\\s\u180e\u200b\ufeff])(?= )|(?<=\n)(?=[ \t]*[^\\s\u180e\u200b\ufeff])")
SPLITTINGS = tuple(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    % n
    for n in ("", "{1,3}")  # Qwen 2 to 3, and Llama 3
)


def word_cut(tokenizer: Dict[str, Any]) -> Optional[re.Pattern[str]]:
    """Return where a text may be cut without changing its tokens, for a ``tokenizer.json``. None: nowhere.

    GPT-2's splitting has no piece that continues from another character into a space. That of Qwen and Llama 3 has none
    that continues into a blank, but some continue into a line end. There a piece ends after the last line end between
    two words. Another normalizer than NFC, a prefix, or an added token with a space may change tokens across a cut.
    """
    model = tokenizer.get("model") or {}
    normalizer = (tokenizer.get("normalizer") or {"type": "NFC"}).get("type")
    plain = ("lstrip", "rstrip", "single_word")
    is_local = (
        model.get("type", "BPE") == "BPE"
        and not model.get("dropout")
        and normalizer == "NFC"
        and not tokenizer.get("truncation")
        and not tokenizer.get("padding")
        and not any(
            re.search(r"\s", each["content"]) or any(each.get(key) for key in plain)
            for each in tokenizer.get("added_tokens", [])
        )
    )
    cut = tokenizer.get("pre_tokenizer") or {}
    if not is_local:
        return None
    if _is_byte_level(cut, use_regex=True):
        return _CUT
    steps = cut.get("pretokenizers") or []
    if cut.get("type") == "Sequence" and len(steps) == 2 and _is_byte_level(steps[1], use_regex=False):
        first = steps[0]
        shape = (first.get("type"), first.get("behavior"), bool(first.get("invert")))
        if shape == ("Split", "Isolated", False) and (first.get("pattern") or {}).get("Regex") in SPLITTINGS:
            return _CUT_LINES
    return None


def _is_byte_level(step: Dict[str, Any], use_regex: bool) -> bool:
    is_plain = step.get("type") == "ByteLevel" and not step.get("add_prefix_space")
    return is_plain and bool(step.get("use_regex", True)) == use_regex


class Encoder:
    """Encodes pieces to arrays, in a process. It caches words if that gives the same tokens."""

    def __init__(self, vocabulary: tokens.Tokens, kind: Any, field: str = "text", held_back: float = 0.0) -> None:
        self._vocabulary = vocabulary
        self._kind = np.dtype(kind)
        self._field = field
        self._held_back = held_back
        self._code = next(code for code in "HIL" if array(code).itemsize == self._kind.itemsize)
        self._known: Dict[str, bytes] = {}
        self._older: Dict[str, bytes] = {}
        tokenizer = vocabulary.tokenizer if isinstance(vocabulary, tokens.Bpe) else None
        self.cut = word_cut(json.loads(tokenizer.to_str())) if tokenizer is not None else None

    def __call__(self, piece: Piece) -> List[Tuple[str, Any]]:
        """Return the tokens of a piece by split, with the end token after each document."""
        if isinstance(piece, Chunk):
            return [(piece.split, self._joined(self.encode([piece.text]), piece.ends))]
        found: Dict[str, List[str]] = {split: [] for split in SPLITS}
        for number, (place, item) in enumerate(piece.places(), piece.first):
            text = records.field(records.parse(item, place), self._field, place)
            found[chosen(number, self._held_back)].append(text)
        return [(split, self._joined(self.encode(texts), True)) for split, texts in found.items() if texts]

    def _joined(self, parts: Sequence[bytes], ends: bool) -> Any:
        end = self._bytes([self._vocabulary.end]) if ends and self._vocabulary.end is not None else b""
        joined = end.join(parts) + end
        return np.frombuffer(joined, dtype=self._code).astype(self._kind)

    def _bytes(self, numbers: Sequence[int]) -> bytes:
        return array(self._code, numbers).tobytes()

    def encode(self, texts: Sequence[str]) -> List[bytes]:
        """Return the tokens of texts, as bytes of the machine's order."""
        if self.cut is None:
            return [self._bytes(each) for each in self._vocabulary.encode_all(texts)]
        words = [self.cut.split(text) for text in texts]
        found: Dict[str, Any] = {
            word: self._known.get(word) or self._older.get(word) for each in words for word in each
        }
        fresh = [word for word, encoded in found.items() if encoded is None]
        found.update(zip(fresh, map(self._bytes, self._vocabulary.encode_all(fresh))))  # noqa: B905 - Python 3.9
        self._known.update(found)
        if len(self._known) > KNOWN:  # keep the words of the last pieces
            self._older, self._known = self._known, {}
        return [b"".join(map(found.__getitem__, each)) for each in words]


if __name__ == "__main__":
    exit_with(main)
