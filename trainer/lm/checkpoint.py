"""Checkpoints: complete or absent, never partial. Files are written under a temporary name, synced and renamed.

    out/iter_N/                      after N steps
        part-RRRRR-of-WWWWW.safetensors  each rank's pieces (``Piece``)
        characters.json or tokenizer.json  the vocabulary
        model/                       small files of the model that the training started from, for the export
        complete.json                written last: step, loss, shape, options, data, and the files with their sizes
    out/latest, best, final          small files that name one of them

Moving ``latest`` is the last operation of a save and commits it, so ``best`` is never behind ``latest``. A killed save
may leave ``best`` ahead. A resumed training then points it to the lowest loss in the checkpoints up to its own step.

clusterctl's agent knows this layout: ``iter_N`` counts when it contains ``complete.json``. If nodes share the folder,
one rank renames and removes files for all of them. On private disks each node has the files of its own ranks, and rank
0's node has ``complete.json``.

A *piece* is a range of one flattened parameter: its fp32 weights and AdamW's two averages, or the weights alone if the
parameter is frozen. A reader combines the pieces that it needs, so any number of ranks and any engine can read a
checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import struct
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import (
    Any,
    BinaryIO,
    Callable,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import torch
from safetensors import SafetensorError, safe_open

from trainer.lm.errors import RefusedError
from trainer.lm.families import earlier_name
from trainer.lm.ranks import Ranks
from trainer.lm.shape import Shape, from_record
from trainer.lm.tokens import Tokens

COMPLETE = "complete.json"
POINTERS = ("latest", "best", "final")
FORMAT = 3  # version 1 stored neither loss nor data; 1 and 2 have Hugging Face's names of GPT-2's parameters
RENAMED = 3  # the first version with our names
MODEL = "model"
SAVING = ".saving-"
PROBE = ".probe-"
REMOVING = ".removing-"


@dataclass(frozen=True)
class State:
    """The state of a training apart from its tensors. ``updates`` is below ``step`` if fp16 gradients overflowed.

    ``loss`` is the loss of the evaluation at this step, or None. ``best_loss`` is the lowest so far, whether or not its
    step was saved. ``data`` identifies the data sets, see ``data.identity``. ``base`` is the model that the tensors are
    adapters of, see ``lora.Base``; None: they are a whole model. ``first_world`` is the number of ranks at the start of
    the training, which ``--scale-lr`` counts; None: ``world``.
    """

    step: int
    updates: int
    shape: Shape
    best_loss: Optional[float]  # nats per token
    worse: int  # evaluations since the best loss
    scale: float  # fp16 loss scale
    world: int
    engine: str
    vocabulary: Optional[str]  # digest
    config: Dict[str, Any]
    loss: Optional[float] = None
    data: Optional[List[Dict[str, Any]]] = None
    base: Optional[Dict[str, str]] = None
    first_world: Optional[int] = None

    @property
    def samples(self) -> int:
        """Samples per step, on all ranks."""
        config = self.config
        return int(config.get("global_batch") or config["batch_size"] * config["accumulation"] * self.world)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    state: State
    files: Sequence[str]
    version: int = FORMAT

    def reader(self) -> Reader:
        """Return a reader of its tensors."""
        return Reader(self.folder, self.files, earlier_name if self.version < RENAMED else str)

    def kept(self) -> Dict[str, bytes]:
        """Return the small files of the model that the training started from, by name.

        Raises:
            RefusedError: one cannot be read.
        """
        try:
            return {path.name: path.read_bytes() for path in sorted((self.folder / MODEL).glob("*"))}
        except OSError as error:
            raise RefusedError("%s: %s" % (self.folder / MODEL, error.strerror), "use another checkpoint") from error


@dataclass(frozen=True)
class Saving:
    """A save that has begun; see ``Folder.begin``. ``part`` is this rank's file, ``files`` has the sizes of all."""

    state: State
    mine: Sequence[Piece]
    vocabulary: Optional[Tokens]
    names: Sequence[str]
    kept: Mapping[str, bytes]
    files: Mapping[str, int]
    part: Path

    def write(self, tensors: Iterable[torch.Tensor]) -> Optional[str]:
        """Write this rank's tensors, in the order of ``entries(mine)``. Return why that failed, or None."""

        def act() -> None:
            self.part.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(self.part, entries(self.mine), tensors)

        return _attempt(act)


class Folder:
    """The checkpoint folder of a training. Every rank calls the same methods in the same order."""

    def __init__(self, path: Path, ranks: Ranks, keep: int) -> None:
        self.path = path
        self._ranks = ranks
        self._keep = keep
        self._acts = ranks.is_first_here  # whether this rank renames and removes for all ranks that share the folder

    def prepare(self) -> None:
        """Create the folder, find out which ranks share it, and remove partial files of a killed training.

        Raises:
            RefusedError: the folder is not writable.
        """
        failure = None
        # A name that no node has looked up yet, so that no network file system has a cached answer for it.
        token = int.from_bytes(os.urandom(6), "big")
        mine = torch.tensor([token, self._ranks.is_first_here], dtype=torch.float64, device=self._ranks.device)
        rows = [(int(row[0]), bool(row[1])) for row in self._ranks.gather(mine).tolist()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if self._ranks.is_first_here:
                (self.path / ("%s%d" % (PROBE, token))).write_text("")
        except OSError as error:
            failure = error
        if not self._ranks.all(failure is None):
            why = failure.strerror if failure else "another rank cannot write to it"
            raise RefusedError("--out %s: %s" % (self.path, why), "a writable folder") from failure
        seen = [rank for rank, (each, acts) in enumerate(rows) if acts and self._sees(each)]
        self._acts = self._ranks.is_first_here and seen[0] == self._ranks.rank
        self._ranks.all(True)
        if self._acts:
            for prefix in (PROBE, SAVING, REMOVING):
                for left in self.path.glob(prefix + "*"):
                    _remove(left)
        self._ranks.all(True)

    def _sees(self, token: int) -> bool:
        return (self.path / ("%s%d" % (PROBE, token))).exists()

    def begin(
        self,
        state: State,
        mine: Sequence[Piece],
        vocabulary: Optional[Tokens],
        names: Sequence[str] = (),
        kept: Mapping[str, bytes] = {},
    ) -> Saving:
        """Begin to save ``iter_N``. Each rank then calls ``write`` of what this returns, and all ranks ``finish``.

        Args:
            state: of the training; N is its ``step``.
            mine: this rank's pieces.
            vocabulary: of the data, if known.
            names: ``best``, ``final`` or both, if this checkpoint is the best or the last.
            kept: small files of the model that the training started from, by name.
        """
        counts = torch.tensor([sum(piece.numel for piece in mine)], dtype=torch.float64, device=self._ranks.device)
        sizes = self._ranks.gather(counts).view(-1).tolist()
        files = {"part-%05d-of-%05d.safetensors" % (rank, len(sizes)): int(size) for rank, size in enumerate(sizes)}
        temporary = self.path / ("%siter_%d" % (SAVING, state.step))
        part = temporary / list(files)[self._ranks.rank]
        return Saving(state, mine, vocabulary, names, kept, files, part)

    def finish(self, saving: Saving, why: Optional[str]) -> Optional[str]:
        """Complete ``iter_N``, point its names at it, and commit with ``latest``. Return why that failed, or None.

        ``why``: why this rank could not write its part, or None.
        """
        state, temporary = saving.state, saving.part.parent
        folder = self.path / ("iter_%d" % state.step)

        def complete() -> None:
            if self._acts and saving.vocabulary:
                saving.vocabulary.save(temporary)
                _sync(temporary / saving.vocabulary.file)
            if self._acts and saving.kept:
                _write_kept(temporary / MODEL, saving.kept)
            if self._acts and folder.is_dir():
                _remove(folder)  # from a training that was killed before it moved ``latest``
            if self._ranks.is_first:
                record = dict(dataclasses.asdict(state), format=FORMAT, files=saving.files)
                _write(temporary / COMPLETE, json.dumps(record, indent=1) + "\n")

        why = self._agree(why) or self._together(complete)
        if why:
            if self._acts:
                _remove(temporary)
            self._ranks.all(True)
            return "%s: %s" % (folder, why)
        why = self._together(lambda: _rename(temporary, folder) if self._acts else None)
        if why:
            return "%s: %s" % (folder, why)
        failures = (self.point(pointer, state.step) for pointer in (*saving.names, "latest"))
        return next((failure for failure in failures if failure), None)

    def point(self, pointer: str, step: Optional[int]) -> Optional[str]:
        """Point ``latest``, ``best`` or ``final`` at a checkpoint, or remove it. Return None, or why that failed."""

        def name() -> None:
            if not self._acts:
                return
            if step is None:
                (self.path / pointer).unlink(missing_ok=True)
            else:
                temporary = self.path / ("%s%s-%d" % (SAVING, pointer, self._ranks.rank))
                _write(temporary, "iter_%d\n" % step)
                temporary.replace(self.path / pointer)
                _sync(self.path)

        why = self._together(name)
        return "%s: %s" % (self.path / pointer, why) if why else None

    def resume(self, step: int) -> float:
        """Finish or undo what a killed save left, for a training that resumes at ``step``. Return the best loss.

        Afterwards ``latest`` names this step, and ``best`` the lowest loss up to it. Without a loss, the method removes
        ``best`` and returns infinity.
        """
        loss, best = self._lowest(step) if self._ranks.is_first else (math.inf, -1)
        mine = torch.tensor([loss, best], dtype=torch.float64, device=self._ranks.device)
        loss, best = self._ranks.gather(mine).tolist()[0]
        failure = self.point("best", int(best) if best >= 0 else None) or self.point("latest", step)
        if failure:
            raise RefusedError("--out %s" % failure, "a writable folder with free space")
        return float(loss)

    def _lowest(self, most: int) -> Tuple[float, int]:
        """Return the lowest loss of the complete checkpoints up to a step, and the first step with that loss."""
        named = read_pointer(self.path, "best")
        found = []
        for path in self.path.glob("iter_*"):
            try:
                state, _, version = _read(path)
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                continue  # not complete
            # Version 1 stored no loss. The checkpoint that ``best`` names had the lowest so far.
            loss = state.best_loss if version == 1 and path.name == named else state.loss
            if loss is not None and state.step <= most:
                found.append((loss, state.step))
        return min(found, default=(math.inf, -1))

    def _together(self, act: Callable[[], None]) -> Optional[str]:
        """Run a function on every rank and wait for all. Return None, or why it failed on some rank."""
        return self._agree(_attempt(act))

    def _agree(self, why: Optional[str]) -> Optional[str]:
        """Return None if ``why`` is None on every rank, else a reason."""
        return None if self._ranks.all(why is None) else why or "it failed on another rank"

    def prune(self) -> None:
        """Remove all checkpoints except the newest few and those that ``latest``, ``best`` or ``final`` name."""
        if not self._acts or not self._keep:
            return
        named = {read_pointer(self.path, pointer) for pointer in POINTERS}
        found = [path for path in self.path.iterdir() if re.fullmatch(r"iter_\d+", path.name)]
        for path in sorted(found, key=lambda path: int(path.name[5:]))[: -self._keep]:
            if path.name not in named:
                _remove(path)


def _attempt(act: Callable[[], None]) -> Optional[str]:
    """Run a function. Return None, or why it failed."""
    try:
        act()
    except OSError as error:
        return error.strerror or str(error)
    return None


def read_pointer(out: Path, pointer: str) -> Optional[str]:
    """Return the name of the checkpoint that ``latest``, ``best`` or ``final`` points to."""
    try:
        return (out / pointer).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint or a file that names one."""
    return (path / COMPLETE).is_file() or (path.name in POINTERS and path.is_file())


def find(path: Path) -> Checkpoint:
    """Find a checkpoint by its folder, or by a file such as ``latest`` that names it.

    Raises:
        RefusedError: there is no checkpoint, or it is incomplete.
    """
    if path.name in POINTERS and not path.is_dir():
        name = read_pointer(path.parent, path.name)
        if not name:
            raise RefusedError("%s: there is no such file" % path, "start with --init, or name a checkpoint: iter_N")
        path = path.parent / name
    try:
        state, files, version = _read(path)
    except OSError as error:
        inside = [name for name in POINTERS if (path / name).is_file()]
        hint = (
            "the folder contains checkpoints; name one: %s" % (path / inside[-1]) if inside else "ls %s" % path.parent
        )
        raise RefusedError("%s: no complete checkpoint" % path, hint) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RefusedError("%s is damaged: %s" % (path / COMPLETE, error), "use another checkpoint") from error
    if version > FORMAT:
        raise RefusedError("%s was written by a later version" % path, "use the version that wrote it")
    missing = [name for name in files if not (path / name).is_file()]
    if missing:
        raise RefusedError("%s: %s is missing" % (path, missing[0]), "copy it from the node that wrote it")
    return Checkpoint(path, state, sorted(files), version)


def _read(path: Path) -> Tuple[State, Dict[str, int], int]:
    """Read ``complete.json``: the state, the files and the version. Fields of later versions are skipped."""
    record = json.loads((path / COMPLETE).read_text(encoding="utf-8"))
    known = {each.name for each in dataclasses.fields(State)}
    state = State(**dict({name: record[name] for name in known & set(record)}, shape=from_record(record["shape"])))
    return state, dict(record["files"]), int(record["format"])


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _write_kept(folder: Path, kept: Mapping[str, bytes]) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in kept.items():
        (folder / name).write_bytes(content)
        _sync(folder / name)
    _sync(folder)


def _rename(temporary: Path, folder: Path) -> None:
    """Rename a folder and wait until the disk has stored its new name."""
    _sync(temporary)
    temporary.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    """Wait until the disk has stored a file, or the names in a folder."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _remove(path: Path) -> None:
    """Remove a file or folder. A partly removed folder has a name that is not a checkpoint's."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    gone = path if path.name.startswith((REMOVING, SAVING)) else path.with_name(REMOVING + path.name)
    try:
        if gone != path:
            path.rename(gone)
    except FileNotFoundError:
        return
    shutil.rmtree(gone, ignore_errors=True)


KINDS = ("weight", "exp_avg", "exp_avg_sq")
FROZEN = KINDS[:1]


class Piece(NamedTuple):
    """``numel`` numbers of a parameter, starting at number ``start``, of each of ``kinds``."""

    name: str
    start: int
    numel: int
    kinds: Tuple[str, ...] = KINDS


def entries(pieces: Iterable[Piece]) -> List[Entry]:
    """Return the entries of a file of these pieces, in the order in which an engine yields the tensors."""
    return [
        Entry("%s/%s@%d" % (kind, piece.name, piece.start), (piece.numel,)) for piece in pieces for kind in piece.kinds
    ]


class _StoredPiece(NamedTuple):
    start: int
    stop: int
    file: Any
    key: str


class Reader:
    """The pieces of a checkpoint. A context manager, because it keeps its files open.

    ``stored`` maps the name of a parameter to its name in the files.
    """

    def __init__(self, folder: Path, names: Sequence[str], stored: Callable[[str], str] = str) -> None:
        self._folder = folder
        self._names = names
        self._stored = stored
        self._held: Dict[str, List[_StoredPiece]] = {}
        self._open = ExitStack()

    def __enter__(self) -> Reader:  # noqa: PYI034 - Self is Python 3.11's
        for name in self._names:
            try:
                file = self._open.enter_context(safe_open(str(self._folder / name), framework="pt"))
            except (SafetensorError, OSError) as error:
                self._open.close()
                what = "%s cannot be read: %s" % (self._folder / name, error)
                raise RefusedError(what, "use another checkpoint") from error
            for key in file.keys():  # noqa: SIM118 - it is no dictionary
                tensor, _, start = key.rpartition("@")
                numel = file.get_slice(key).get_shape()[0]
                self._held.setdefault(tensor, []).append(_StoredPiece(int(start), int(start) + numel, file, key))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def read(self, kind: str, name: str, start: int, numel: int) -> torch.Tensor:
        """Read numbers of a parameter: float32 on the CPU, shape (numel,).

        Raises:
            RefusedError: the checkpoint lacks some of them.
        """
        out = torch.empty(numel)
        count = 0
        for held in self._held.get("%s/%s" % (kind, self._stored(name)), ()):
            first, last = max(start, held.start), min(start + numel, held.stop)
            if first < last:
                part = held.file.get_slice(held.key)[first - held.start : last - held.start]
                out[first - start : last - start] = part
                count += last - first
        if count != numel:
            what = "%s has only %d of %d numbers of %s" % (self._folder, count, numel, name)
            raise RefusedError(what, "check the model's sizes, and copy the files of the other nodes")
        return out

    def piece(self, kind: str, piece: Piece) -> torch.Tensor:
        """Read a piece's numbers of one kind.

        Raises:
            RefusedError: see ``read``.
        """
        return self.read(kind, piece.name, piece.start, piece.numel)

    def whole(self, name: str, size: torch.Size) -> torch.Tensor:
        """Read all weights of a parameter.

        Raises:
            RefusedError: the checkpoint lacks some of them.
        """
        return self.read("weight", name, 0, size.numel()).view(size)


WRITTEN = {"float32": ("F32", torch.float32), "bfloat16": ("BF16", torch.bfloat16)}  # safetensors' names


class Entry(NamedTuple):
    """A tensor to write; ``dtype`` is one of ``WRITTEN``."""

    key: str
    shape: Sequence[int]
    dtype: str = "float32"

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count


def write_tensors(path: Path, entries: Sequence[Entry], tensors: Iterable[torch.Tensor]) -> None:
    """Write tensors in the order of ``entries`` and wait until the disk has stored them.

    Raises:
        OSError: the disk is full or fails.
    """
    with path.open("wb") as file:
        write_to(file, entries, tensors)


def write_to(file: BinaryIO, entries: Sequence[Entry], tensors: Iterable[torch.Tensor]) -> None:
    """Write tensors to an open file, in safetensors' format.

    8 bytes (little endian) with the length of a JSON header, the header, then the bytes of the tensors
    (https://github.com/huggingface/safetensors#format). The library's own writer needs all tensors at once; this one
    takes them one by one, so that a checkpoint need not fit into host memory.
    """
    header: Dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    end = 0
    for entry in entries:
        kind, dtype = WRITTEN[entry.dtype]
        start, end = end, end + dtype.itemsize * entry.numel
        header[entry.key] = {"dtype": kind, "shape": list(entry.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # aligns the tensors to 8 bytes
    size = 8 + len(encoded) + end
    os.posix_fallocate(file.fileno(), 0, size)  # detects a full disk before writing
    file.write(struct.pack("<Q", len(encoded)) + encoded)
    for entry, tensor in zip(entries, tensors):  # noqa: B905 - the size below shows a difference
        there = tensor.detach().to("cpu", WRITTEN[entry.dtype][1]).contiguous().view(-1)
        file.write(memoryview(there.view(torch.uint8).numpy()))
    if file.tell() != size:
        raise AssertionError("%d bytes were written, %d announced" % (file.tell(), size))
    file.flush()
    os.fsync(file.fileno())
