"""The batches of a training, prepared by a thread and copied to the GPU while it computes."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any, Iterator, Tuple

import torch

from trainer.gpt.data import Samples, numbers_of
from trainer.gpt.ranks import Ranks

AHEAD = 4  # batches


class Feed:
    """Yields a rank's batches in order, starting at a step. A context manager, because it has a thread."""

    def __init__(self, samples: Samples, ranks: Ranks, step: int, micro_steps: int, batch: int) -> None:
        self._samples = samples
        self._ranks = ranks
        self._from = step
        self._sizes = (ranks.rank, ranks.world, micro_steps, batch)
        self._ready: queue.Queue[Any] = queue.Queue(AHEAD)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Feed:  # noqa: PYI034 - Self is Python 3.11's
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        while self._thread.is_alive():  # it may be waiting for space in the queue
            with contextlib.suppress(queue.Empty):
                self._ready.get(timeout=0.01)

    def take(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return the next micro-step's tokens and next tokens, on the device.

        Raises:
            OSError: the data can no longer be read.
        """
        batch = self._ready.get()
        if isinstance(batch, Exception):
            raise batch
        tokens, targets = (each.to(self._ranks.device, non_blocking=True) for each in batch)
        return tokens, targets

    def _batches(self) -> Iterator[Any]:
        rank, world, micro_steps, batch = self._sizes
        step = self._from
        while True:
            for micro in range(micro_steps):
                yield self._samples.take(numbers_of(step, micro, rank, world, micro_steps, batch))
            step += 1

    def _run(self) -> None:
        try:
            if self._ranks.device.type == "cuda":
                torch.cuda.set_device(self._ranks.device)  # a thread starts with GPU 0 and would allocate memory there
            for tokens, targets in self._batches():
                if self._ranks.device.type == "cuda":
                    self._ready.put((tokens.pin_memory(), targets.pin_memory()))
                else:
                    self._ready.put((tokens, targets))
                if self._stopped.is_set():
                    return
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            self._ready.put(error)
