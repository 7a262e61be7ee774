"""Saves that continue during the next steps: the tensors are copied to host memory, and a thread writes the copies.

Only the main thread takes part in collectives: it starts a save, sees at the end of a step that the threads of all
ranks are done, and then completes it. Until then the previous checkpoint is the newest one.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Callable, Iterable, Iterator, List, NamedTuple, Optional, Sequence

import torch

from trainer.lm.checkpoint import Piece, Saving
from trainer.lm.memory import available_memory
from trainer.lm.ranks import Ranks

SHARE = 0.8  # of the available host memory: other programs, and pages that the disk has not stored yet, need some
_BYTES = 4  # of a number


class Pending(NamedTuple):
    """A save whose part is being written. ``began`` is its start, ``stopped`` how long the training waited for it.

    ``ends``: the training is over.
    """

    saving: Saving
    loss: Optional[float]
    result: Future[Optional[str]]  # why it failed, or None
    began: float
    stopped: float
    ends: bool


class Copies:
    """Copies of a rank's tensors in host memory, in buffers that all saves use.

    A thread prepares the buffers while the training starts: the system needs about a second for each gigabyte.
    """

    def __init__(self, numels: Sequence[int], device: torch.device) -> None:
        flat = torch.empty(sum(numels))
        self._buffers: List[torch.Tensor] = list(flat.split(list(numels)))
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: Any = None
        self._writer = ThreadPoolExecutor(1)
        self._prepared = self._writer.submit(_prepare, flat, device)

    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        """Start to copy. A GPU may still be copying afterwards: call ``wait`` before the tensors change."""
        self._prepared.result()
        if self._stream is None:
            self._copy(tensors)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(tensors)
            self._copied = self._stream.record_event()

    def _copy(self, tensors: Iterable[torch.Tensor]) -> None:
        for buffer, tensor in zip(self._buffers, tensors):  # noqa: B905 - both belong to the same pieces
            buffer.copy_(tensor.detach().view(-1), non_blocking=True)

    def wait(self) -> None:
        """Let the GPU finish copying before what it is told next. The program does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None

    def write(self, saving: Saving) -> Future[Optional[str]]:
        """Write them in a thread."""
        return self._writer.submit(saving.write, self._tensors(self._copied))

    def run(self, act: Callable[[], None]) -> Future[None]:
        """Run a function in the thread that writes, after what it is writing."""
        return self._writer.submit(act)

    def _tensors(self, copied: Any) -> Iterator[torch.Tensor]:
        if copied is not None:
            copied.synchronize()
        yield from self._buffers


def _prepare(memory: torch.Tensor, device: torch.device) -> None:
    memory.zero_()  # the system provides pages when they are written to, and here several threads write
    if device.type == "cuda":
        torch.cuda.set_device(device)
        _lock_pages(memory, device)


def _lock_pages(memory: torch.Tensor, device: torch.device) -> None:
    """Let a GPU copy into host memory while the program continues. If this fails, the program waits for each copy.

    torch's own page-locked memory would be rounded up to a power of two.
    """
    failed = memory.nbytes and int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if failed:
        with suppress(RuntimeError):  # the next kernel reports this error, and then it is cleared
            torch.ones((), device=device)


def make_copies(pieces: Sequence[Piece], ranks: Ranks, say: Callable[[str], None]) -> Optional[Copies]:
    """Return buffers for the tensors of all pieces, or None if they do not fit on some node."""
    numels = [piece.numel for piece in pieces for _ in piece.kinds]
    mine = torch.tensor([ranks.local, _BYTES * sum(numels), available_memory()], dtype=torch.float64)
    rows = ranks.gather(mine.to(ranks.device)).tolist()
    here = 1 + max(row[0] for row in rows)  # ranks on a node
    needed, free = max(((here * row[1], row[2]) for row in rows), key=lambda each: each[0] / max(1.0, each[1]))
    copies = None
    if needed <= SHARE * free:
        try:
            copies = Copies(numels, ranks.device)
        except RuntimeError as error:  # torch has no own type for host memory
            say("host memory: %s" % str(error).partition("\n")[0])
    if ranks.all(copies is not None):
        return copies
    why = "copies of a node's part need %.1f GB of host memory, and %.1f GB are available" % (needed / 1e9, free / 1e9)
    say("save_async: the training stops during saves: %s" % why)
    return None
