"""The tokens of conversations on disk: written once per node, mapped into memory by every rank.

The folder's name is a digest of the records, the tokenizer and the template, so a change of any of them is a new
folder. One process writes it, while the others wait for its lock. A process that is killed leaves the parts that it
finished, and the next one writes the rest.

================  =====================================================================================================
``tokens.bin``    the tokens of all samples, uint32; the highest bit marks those of answers
``lengths.bin``   two uint32 per sample: its tokens, and how many of them are an answer's
``meta.json``     written last: counts for reports, and the highest token
================  =====================================================================================================
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, ClassVar, Dict, Iterator, List, Sequence, Tuple

import numpy as np

from trainer.lm import chat, conversations, records, tokens, workers
from trainer.lm.errors import RefusedError
from trainer.lm.progress import Progress

FORMAT = 2
DIGEST = 32  # characters
ANSWER = np.uint32(1 << 31)
TOKEN = np.uint32(ANSWER - 1)
Files = Dict[str, bytes]


@dataclass(frozen=True)
class Tokenized:
    """The samples of a data set. ``skipped`` counts records left out, ``changed`` answers without loss."""

    folder: Path
    name: str
    tokens: Any
    lengths: Any
    ends: Any
    highest: int
    skipped: int
    changed: int
    problem: str
    digest: str

    @property
    def counts(self) -> Tuple[Any, Any]:
        """The tokens of each sample, int64, and how many of them can be targets: nothing predicts the first token."""
        lengths, answers = (self.lengths[:, column].astype(np.int64) for column in range(2))
        some = lengths > 0
        answers[some] -= self.tokens[self.ends[some] - lengths[some]] >= ANSWER
        return lengths, answers

    def cut(self, most: int) -> Any:
        """Return the tokens of each sample that a row takes, if it takes ``most`` tokens at most."""
        return np.minimum(self.lengths[:, 0].astype(np.int64), most)

    def sample(self, number: int, length: int) -> Tuple[Any, Any]:
        """Return the first tokens of a sample, int64, and which of them are an answer's."""
        end = int(self.ends[number])
        start = end - int(self.lengths[number, 0])
        found = self.tokens[start : min(end, start + length)]
        return (found & TOKEN).astype(np.int64), found >= ANSWER


class Encoder:
    """Encodes groups of records in a process."""

    def __init__(self, tokenizer: str, template: Tuple[str, Dict[str, str], str], skips: bool) -> None:
        self.tokenizer = tokens.parse_bpe(tokenizer).tokenizer
        self.template = chat.ChatTemplate(*template)
        self._skips = skips

    def read(self, record: Dict[str, Any], place: str) -> Tuple[chat.Rendered, Any]:
        """Return the text of a record's conversation, and what ``more`` needs to know of it.

        Raises:
            RefusedError: the record is wrong.
        """
        return self.template.render(conversations.read(record, place), place), None

    def more(self, known: Sequence[Any]) -> Files:  # noqa: ARG002 - of an encoder with images
        """Return more of the samples of a group, by the name of a file."""
        return {}

    def __call__(self, group: records.Group) -> Tuple[Files, Dict[str, Any]]:
        """Return the tokens of a group, by the names of files, and what ``meta.json`` needs to know of it.

        Raises:
            RefusedError: a record is wrong, and such records are not skipped.
        """
        found: List[Tuple[chat.Rendered, Any]] = []
        problems: List[str] = []
        for place, item in group.places():
            try:
                found.append(self.read(records.parse(item, place), place))
            except RefusedError as error:  # noqa: PERF203 - a wrong record must not hide the others
                if not self._skips:
                    fix = "; or ".join(filter(None, (error.fix, "--skip-wrong leaves out such records")))
                    raise RefusedError(str(error), fix) from error
                problems.append(str(error))
        parts: List[bytes] = []
        lengths: List[Tuple[int, int]] = []
        highest = 0
        for ids, answers in chat.encode(self.tokenizer, [rendered for rendered, _ in found]):
            sample = np.asarray(ids, dtype="<u4")
            highest = max(highest, int(sample.max(initial=0)))
            for first, last in answers:
                sample[first:last] |= ANSWER
            parts.append(sample.tobytes())
            lengths.append((len(ids), int((sample >= ANSWER).sum())))
        changed = sum(rendered.changed for rendered, _ in found)
        files = {"tokens": b"".join(parts), "lengths": np.asarray(lengths, dtype="<u4").tobytes()}
        facts = {"highest": highest, "changed": changed, "skipped": len(problems), "problem": "".join(problems[:1])}
        return {**files, **self.more([known for _, known in found])}, facts


@dataclass(frozen=True)
class Encoding:
    """How records become tokens: the tokenizer's JSON, the template, and whether wrong records are skipped."""

    tokenizer: str
    template: chat.ChatTemplate
    skips: bool = False
    files: ClassVar[Sequence[str]] = ("tokens", "lengths")  # that an encoder returns

    @property
    def variant(self) -> str:
        """What separates folders of the same digest, such as those of records whose images are in different folders."""
        return ""

    @property
    def encoder(self) -> Callable[..., Encoder]:
        """What makes an encoder of the arguments, in another process."""
        return Encoder

    @property
    def arguments(self) -> Tuple[Any, ...]:
        """The arguments of ``encoder``."""
        return self.tokenizer, (self.template.source, self.template.special, self.template.where), self.skips

    @property
    def digest(self) -> str:
        """A digest of everything that determines the tokens of a record."""
        facts = [FORMAT, self.tokenizer, self.template.digest, self.skips]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def prepare(paths: Sequence[Path], name: str, encoding: Encoding, cache: Path, requested: int = 0) -> Tokenized:
    """Return the samples of a data set, and write them first if the cache does not have them.

    ``requested`` is the number of processes; 0: one per core.

    Raises:
        RefusedError: a record is wrong, or the cache cannot be written.
    """
    digest = hashlib.sha256((encoding.digest + "".join(map(_digest, paths))).encode()).hexdigest()[:DIGEST]
    folder = cache / (digest + encoding.variant)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / (folder.name + ".lock")).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel when the process ends
            if not (folder / "meta.json").is_file():
                _write(paths, encoding, folder, requested)
    except OSError as error:
        what = "%s: the tokens cannot be written: %s" % (folder, error.strerror or error)
        raise RefusedError(what, "free space there, or CLUSTERCTL_CACHE=DIR") from error
    return open_folder(folder, name)


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    try:
        with path.open("rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                found.update(block)
    except OSError as error:
        raise RefusedError("%s: %s" % (path, error.strerror), "check the path of the data") from error
    return records.suffix(path) + found.hexdigest()


def _write(paths: Sequence[Path], encoding: Encoding, folder: Path, requested: int) -> None:
    """Write parts, one per group of records, then join them. Existing parts are kept."""
    folder.mkdir(exist_ok=True)
    size = sum(path.stat().st_size for path in paths)
    progress = Progress(size)

    def missing() -> Iterator[Tuple[int, records.Group]]:
        groups = (group for path in paths for group in records.groups(path))
        for number, group in enumerate(groups):
            numbers.append(number)
            if not _part(folder, number).is_file():
                yield number, group
            progress.add(group.size)

    numbers: List[int] = []
    workers_count = workers.count_for(requested, size)
    for number, (files, facts) in workers.mapped(encoding.encoder, encoding.arguments, missing(), workers_count):
        for name, data in files.items():
            records.write(folder / ("part-%06d.%s" % (number, name)), data)
        records.write(_part(folder, number), json.dumps(facts).encode())
    progress.close()
    _join(folder, encoding, len(numbers))


def _part(folder: Path, number: int) -> Path:
    return folder / ("part-%06d.json" % number)


def _join(folder: Path, encoding: Encoding, count: int) -> None:
    totals = {"highest": 0, "changed": 0, "skipped": 0}
    problem = ""
    for number in range(count):
        facts = json.loads(_part(folder, number).read_bytes())
        totals["highest"] = max(totals["highest"], facts["highest"])
        for name in ("changed", "skipped"):
            totals[name] += facts[name]
        problem = problem or facts["problem"]
    for name in encoding.files:
        with (folder / (name + ".bin")).open("wb") as file:
            for number in range(count):
                with (folder / ("part-%06d.%s" % (number, name))).open("rb") as part:
                    shutil.copyfileobj(part, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
    records.write(folder / "meta.json", json.dumps({"format": FORMAT, **totals, "problem": problem}).encode())
    for path in folder.glob("part-*"):
        path.unlink()


def open_folder(folder: Path, name: str) -> Tokenized:
    """Open the samples that ``prepare`` wrote.

    Raises:
        RefusedError: a file is missing or damaged.
    """
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        lengths = np.fromfile(folder / "lengths.bin", dtype="<u4").reshape(-1, 2)
        ends = np.cumsum(lengths[:, 0], dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        found = np.memmap(folder / "tokens.bin", dtype="<u4", mode="r") if total else np.empty(0, dtype="<u4")
        _check_size(len(found), total)
        return Tokenized(
            folder=folder,
            name=name,
            tokens=found,
            lengths=lengths,
            ends=ends,
            highest=int(meta["highest"]),
            skipped=int(meta["skipped"]),
            changed=int(meta["changed"]),
            problem=str(meta["problem"]),
            digest=folder.name[:DIGEST],
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RefusedError("%s cannot be read: %s" % (folder, error), "delete the folder") from error


def _check_size(found: int, expected: int) -> None:
    if found != expected:
        raise ValueError("tokens.bin has %d tokens, not %d" % (found, expected))
