"""Writes safetensors files tensor by tensor, so that a checkpoint need not fit into host memory.

The format: 8 bytes (little endian) with the length of a JSON header, the header, then the bytes of the tensors
(https://github.com/huggingface/safetensors#format). The library's own writer needs all tensors at once.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterable, NamedTuple, Sequence

import torch


class Entry(NamedTuple):
    """A float32 tensor to write."""

    key: str
    shape: Sequence[int]

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count


def write(path: Path, entries: Sequence[Entry], tensors: Iterable[torch.Tensor]) -> None:
    """Write tensors in the order of ``entries`` and wait until the disk has stored them.

    Raises:
        OSError: the disk is full or fails.
    """
    with path.open("wb") as file:
        _write(file, entries, tensors)


def _write(file: BinaryIO, entries: Sequence[Entry], tensors: Iterable[torch.Tensor]) -> None:
    header: Dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    end = 0
    for entry in entries:
        start, end = end, end + 4 * entry.numel
        header[entry.key] = {"dtype": "F32", "shape": list(entry.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # aligns the tensors to 8 bytes
    size = 8 + len(encoded) + end
    os.posix_fallocate(file.fileno(), 0, size)  # detects a full disk before writing
    file.write(struct.pack("<Q", len(encoded)) + encoded)
    for tensor in tensors:
        array = tensor.detach().to("cpu", torch.float32).contiguous().view(-1).numpy()
        file.write(memoryview(array).cast("B"))
    if file.tell() != size:
        raise AssertionError("%d bytes were written, %d announced" % (file.tell(), size))
    file.flush()
    os.fsync(file.fileno())
