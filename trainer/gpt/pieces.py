"""The tensors of a checkpoint: the state of a training by parameter, in pieces, independent of how it was sharded.

A *piece* is a range of one flattened parameter: its fp32 weights and AdamW's two averages. Every rank writes its pieces
to its own file. A reader combines the pieces that it needs, so any number of ranks and any engine can read a
checkpoint.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Sequence

import torch
from safetensors import SafetensorError, safe_open

from trainer.gpt.errors import RefusedError
from trainer.gpt.stream import Entry

KINDS = ("weight", "exp_avg", "exp_avg_sq")


class Piece(NamedTuple):
    """``numel`` numbers of a parameter, starting at number ``start``."""

    name: str
    start: int
    numel: int


def entries(pieces: Iterable[Piece]) -> List[Entry]:
    """Return the entries of a file of these pieces, in the order in which an engine yields the tensors."""
    return [Entry("%s/%s@%d" % (kind, piece.name, piece.start), (piece.numel,)) for piece in pieces for kind in KINDS]


class _Held(NamedTuple):
    start: int
    stop: int
    file: Any
    key: str


class Reader:
    """The pieces of a checkpoint. A context manager, because it keeps its files open."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        self._names = names
        self._held: Dict[str, List[_Held]] = {}
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
                self._held.setdefault(tensor, []).append(_Held(int(start), int(start) + numel, file, key))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def names(self) -> Iterator[str]:
        """Yield the names of all parameters."""
        return (tensor.partition("/")[2] for tensor in self._held if tensor.startswith("weight/"))

    def read(self, kind: str, name: str, start: int, numel: int) -> torch.Tensor:
        """Read numbers of a parameter: float32 on the CPU, shape (numel,).

        Raises:
            RefusedError: the checkpoint lacks some of them.
        """
        out = torch.empty(numel)
        count = 0
        for held in self._held.get("%s/%s" % (kind, name), ()):
            first, last = max(start, held.start), min(start + numel, held.stop)
            if first < last:
                part = held.file.get_slice(held.key)[first - held.start : last - held.start]
                out[first - start : last - start] = part
                count += last - first
        if count != numel:
            what = "%s has only %d of %d numbers of %s" % (self._folder, count, numel, name)
            raise RefusedError(what, "check the model's sizes, and copy the files of the other nodes")
        return out

    def whole(self, name: str, size: torch.Size) -> torch.Tensor:
        """Read all weights of a parameter.

        Raises:
            RefusedError: the checkpoint lacks some of them.
        """
        return self.read("weight", name, 0, size.numel()).view(size)
