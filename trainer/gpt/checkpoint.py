"""Checkpoints that are there or not, never half: written under another name, synced, renamed.

    out/iter_N/                      after N steps
        part-RRRRR-of-WWWWW.safetensors  each rank's pieces (``pieces.py``)
        characters.json or tokenizer.json  the vocabulary
        complete.json                written last: step, shape, files and how many parameters each has, options
    out/latest, best, final          small files that name one of them

clusterctl's agent knows this layout: ``iter_N`` counts when ``complete.json`` is in it. Nodes may share the folder or
have disks of their own; then each has the files of its own ranks, rank 0's node ``complete.json``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Optional, Sequence

import torch

from trainer.gpt import pieces, stream
from trainer.gpt.errors import RefusedError
from trainer.gpt.model import Shape
from trainer.gpt.pieces import Piece, Reader
from trainer.gpt.ranks import Ranks
from trainer.gpt.tokens import Tokens

COMPLETE = "complete.json"
POINTERS = ("latest", "best", "final")
SAVING = ".saving-"
REMOVING = ".removing-"


@dataclass(frozen=True)
class State:
    """What a training is besides its tensors. ``updates`` are fewer than steps where fp16's gradients overflowed."""

    step: int
    updates: int
    shape: Shape
    best_loss: Optional[float]  # nats a token
    worse: int  # evaluations since it was reached
    scale: float  # of fp16's loss
    world: int
    engine: str
    vocabulary: Optional[str]  # its digest
    config: Dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A complete one."""

    folder: Path
    state: State
    files: Sequence[str]

    def reader(self) -> Reader:
        """Its tensors."""
        return Reader(self.folder, self.files)


class Folder:
    """The folder of a training's checkpoints. Every rank calls the same methods in the same order."""

    def __init__(self, path: Path, ranks: Ranks, keep: int) -> None:
        self.path = path
        self._ranks = ranks
        self._keep = keep

    def prepare(self) -> None:
        """Make it, and remove what a killed training left half written.

        Raises:
            RefusedError: it cannot be written to.
        """
        trouble = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if self._ranks.is_first_here:
                for left in [*self.path.glob(SAVING + "*"), *self.path.glob(REMOVING + "*")]:
                    _remove(left)
                probe = self.path / (".probe-%d" % self._ranks.rank)
                probe.write_text("")
                probe.unlink()
        except OSError as error:
            trouble = error
        if not self._ranks.all(trouble is None):
            why = trouble.strerror if trouble else "another rank cannot write to it"
            raise RefusedError("--out %s: %s" % (self.path, why), "a folder that you may write to") from trouble

    def save(
        self, state: State, mine: Sequence[Piece], tensors: Iterable[torch.Tensor], vocabulary: Optional[Tokens]
    ) -> Optional[str]:
        """Write ``iter_N`` and let ``latest`` name it; None, or why it could not be: then nothing has changed.

        Args:
            state: of the training; its ``step`` is N.
            mine: the pieces of this rank.
            tensors: their tensors, in the order of ``pieces.entries``.
            vocabulary: what the tokens mean, if that is known.
        """
        folder = self.path / ("iter_%d" % state.step)
        temporary = self.path / (SAVING + folder.name)
        counts = torch.tensor([sum(piece.numel for piece in mine)], dtype=torch.float64, device=self._ranks.device)
        sizes = self._ranks.gather(counts).view(-1).tolist()
        files = {"part-%05d-of-%05d.safetensors" % (rank, len(sizes)): int(size) for rank, size in enumerate(sizes)}

        def write_part() -> None:
            temporary.mkdir(parents=True, exist_ok=True)
            stream.write(temporary / list(files)[self._ranks.rank], pieces.entries(mine), tensors)

        def complete() -> None:
            if self._ranks.is_first_here and vocabulary:
                vocabulary.save(temporary)
                _sync(temporary / vocabulary.file)
            if self._ranks.is_first_here and folder.is_dir():
                _remove(folder)  # left by a training that was killed before ``latest`` named it
            if self._ranks.is_first:
                told = dict(dataclasses.asdict(state), format=1, files=files)
                _write(temporary / COMPLETE, json.dumps(told, indent=1) + "\n")

        why = self._together(write_part) or self._together(complete)
        if why:
            if self._ranks.is_first_here:
                _remove(temporary)
            self._ranks.all(True)
            return "%s: %s" % (folder, why)
        why = self._together(lambda: _rename(temporary, folder) if self._ranks.is_first_here else None)
        return "%s: %s" % (folder, why) if why else self.point("latest", state.step)

    def point(self, pointer: str, step: int) -> Optional[str]:
        """Let ``latest``, ``best`` or ``final`` name a checkpoint that was saved; None, or why it could not be."""

        def name() -> None:
            if self._ranks.is_first_here:
                temporary = self.path / ("%s%s-%d" % (SAVING, pointer, self._ranks.rank))
                _write(temporary, "iter_%d\n" % step)
                temporary.replace(self.path / pointer)
                _sync(self.path)

        why = self._together(name)
        return "%s: %s" % (self.path / pointer, why) if why else None

    def _together(self, act: Callable[[], None]) -> Optional[str]:
        """Do something on every rank and wait for all; None, or why it failed on some rank."""
        why = None
        try:
            act()
        except OSError as error:
            why = error.strerror or str(error)
        return None if self._ranks.all(why is None) else why or "it failed on another rank"

    def prune(self) -> None:
        """Remove all but the newest few, and those that have a name."""
        if not self._ranks.is_first_here or not self._keep:
            return
        named = {read_pointer(self.path, pointer) for pointer in POINTERS}
        found = [path for path in self.path.iterdir() if re.fullmatch(r"iter_\d+", path.name)]
        for path in sorted(found, key=lambda path: int(path.name[5:]))[: -self._keep]:
            if path.name not in named:
                _remove(path)


def read_pointer(out: Path, pointer: str) -> Optional[str]:
    """The checkpoint that ``latest``, ``best`` or ``final`` names."""
    try:
        return (out / pointer).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def is_checkpoint(path: Path) -> bool:
    """Whether a path is one, or names one."""
    return (path / COMPLETE).is_file() or (path.name in POINTERS and path.is_file())


def find(path: Path) -> Checkpoint:
    """A checkpoint by its folder, or by a file such as ``latest`` that names it.

    Raises:
        RefusedError: there is none, or it is not whole.
    """
    if path.name in POINTERS and not path.is_dir():
        name = read_pointer(path.parent, path.name)
        if not name:
            raise RefusedError("%s: there is no such file" % path, "begin with --init, or name a checkpoint: iter_N")
        path = path.parent / name
    try:
        told = json.loads((path / COMPLETE).read_text(encoding="utf-8"))
        files = dict(told.pop("files"))
        if told.pop("format") != 1:
            raise RefusedError("%s was written by a later version" % path, "use that version")
        state = State(**dict(told, shape=Shape(**told["shape"])))
    except OSError as error:
        raise RefusedError("%s: there is no complete checkpoint" % path, "ls %s" % path.parent) from error
    except (ValueError, KeyError, TypeError) as error:
        raise RefusedError("%s is damaged: %s" % (path / COMPLETE, error), "another checkpoint") from error
    missing = [name for name in files if not (path / name).is_file()]
    if missing:
        raise RefusedError("%s: %s is not there" % (path, missing[0]), "copy it from the node that wrote it")
    return Checkpoint(path, state, sorted(files))


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _rename(temporary: Path, folder: Path) -> None:
    """One node of several that share the folder does it; the others find it done."""
    try:
        _sync(temporary)
        temporary.rename(folder)
        _sync(folder.parent)
    except FileNotFoundError:
        if not folder.is_dir():
            raise


def _sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _remove(path: Path) -> None:
    """Take a file or folder away; half removed it has a name that nobody takes for a checkpoint."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    gone = path if path.name.startswith((REMOVING, SAVING)) else path.with_name(REMOVING + path.name)
    try:
        if gone != path:
            path.rename(gone)
    except FileNotFoundError:
        return  # another node was faster
    shutil.rmtree(gone, ignore_errors=True)
