"""Yields a rank's batches in order, ahead of the training, on its device."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any

import torch

from trainer.lm.batch import Batch, Layout, Source

AHEAD = 4  # batches that are ready


class Feed:
    """A rank's batches, starting at a step. A context manager, because it has a thread."""

    def __init__(self, source: Source, layout: Layout, device: torch.device, step: int) -> None:
        self._source = source
        self._layout = layout
        self._device = device
        self._from = step
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

    def batch(self) -> Batch:
        """Return the next micro-step's batch, on the device.

        Raises:
            OSError: the data can no longer be read.
        """
        batch = self._ready.get()
        if isinstance(batch, Exception):
            raise batch
        return batch.to(self._device)  # type: ignore[no-any-return]

    def _run(self) -> None:
        step = self._from
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread starts with GPU 0 and would allocate memory there
            while True:
                for micro in range(self._layout.micro_steps):
                    batch = self._source.batch(self._layout, step, micro)
                    self._ready.put(batch.pinned() if self._device.type == "cuda" else batch)
                    if self._stopped.is_set():
                        return
                step += 1
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            self._ready.put(error)
