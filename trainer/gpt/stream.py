"""Writes safetensors files tensor by tensor, so that a checkpoint never has to fit into the memory of the host.

8 bytes (little endian) with the length of a JSON header, the header, the tensors' bytes one after the other
(https://github.com/huggingface/safetensors#format). The library's own writer wants all tensors at once.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterable, NamedTuple, Sequence

import torch


class Entry(NamedTuple):
    """A float32 tensor that is to be written."""

    key: str
    shape: Sequence[int]

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        count = 1
        for length in self.shape:
            count *= length
        return count


def write(path: Path, entries: Sequence[Entry], tensors: Iterable[torch.Tensor]) -> None:
    """Write tensors, in the order of ``entries``, and wait until the disk has them.

    Raises:
        OSError: there is no room, or the disk fails.
    """
    with path.open("wb") as file:
        _write(file, entries, tensors)


def _write(file: BinaryIO, entries: Sequence[Entry], tensors: Iterable[torch.Tensor]) -> None:
    header: Dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    end = 0
    for entry in entries:
        start, end = end, end + 4 * entry.numel
        header[entry.key] = {"dtype": "F32", "shape": list(entry.shape), "data_offsets": [start, end]}
    told = json.dumps(header, separators=(",", ":")).encode()
    told += b" " * (-len(told) % 8)  # so that tensors lie at multiples of 8
    size = 8 + len(told) + end
    os.posix_fallocate(file.fileno(), 0, size)  # a full disk is noticed now, and not in the middle
    file.write(struct.pack("<Q", len(told)) + told)
    for tensor in tensors:
        array = tensor.detach().to("cpu", torch.float32).contiguous().view(-1).numpy()
        file.write(memoryview(array).cast("B"))
    if file.tell() != size:
        raise AssertionError("%d bytes were written, %d announced" % (file.tell(), size))
    file.flush()
    os.fsync(file.fileno())
