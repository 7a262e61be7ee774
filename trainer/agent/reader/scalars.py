"""Reads TensorBoard's event files: the losses of trainings that print none, such as Lightning's without a terminal.

A file is a sequence of records (TFRecord): the length in 8 bytes, 4 bytes, the data, 4 bytes. The data is an ``Event``
(tensorflow/core/util/event.proto) with a step and tagged values. ``general`` knows which tags are losses. Other values
(texts, images, histograms) are skipped.
"""

from __future__ import annotations

import struct
from typing import Dict, Iterator, List, Optional, Tuple, Union

from . import general, names
from .places import Places
from .stream import FIELDS, Reading

_HEAD = 12
_MOST = 64 << 10  # bytes of a record with scalars
_STEP, _SUMMARY, _VALUE, _TAG, _SIMPLE, _TENSOR = 2, 5, 1, 1, 2, 8
_CONTENT, _FLOATS = 4, 5  # of a tensor

_Field = Tuple[int, Union[int, bytes]]


class EventFile:
    """One file; ``feed`` takes it piece by piece."""

    def __init__(self, rank: Optional[int] = None) -> None:
        self._rank = rank
        self._rest = b""
        self._skip = 0  # bytes of a record that is not read
        self._places = Places()
        self._orders: Dict[str, int] = {}  # by field, the rank of the best name seen

    def feed(self, data: bytes) -> List[Reading]:
        """Return the readings that ``data`` completes."""
        found = []
        for record in self._records(data):
            reading = self._event(record)
            if reading is not None:
                found.append(reading)
        return found

    def end(self) -> None:
        """Read no more: a part of the file is missing."""
        self._rest, self._skip = b"", 1 << 63

    def _records(self, data: bytes) -> Iterator[bytes]:
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        data, at = self._rest + data[skipped:], 0
        while len(data) - at >= _HEAD:
            size = struct.unpack_from("<Q", data, at)[0]
            end = at + _HEAD + size + 4
            if size > _MOST:
                self._skip = max(0, end - len(data))
            elif end > len(data):
                break
            else:
                yield data[at + _HEAD : end - 4]
            at = min(end, len(data))
        self._rest = data[at:]

    def _event(self, record: bytes) -> Optional[Reading]:
        step, values = 0, {}
        for number, content in _fields(record):
            if number == _STEP and isinstance(content, int):
                step = content
            elif number == _SUMMARY and isinstance(content, bytes):
                for _, value in _fields(content):
                    values.update(self._value(value) if isinstance(value, bytes) else {})
        known = {name: value for name, value in self._places.first_set(values).items() if name in FIELDS}
        if not known or not 0 <= step < general.MOST:
            return None
        return Reading(step, rank=self._rank, source="tensorboard", **known)

    def _value(self, content: bytes) -> Dict[str, Union[float, str]]:
        """The value of a tag, by field; ``set`` is the data set of an evaluation."""
        parts = dict(_fields(content))
        tag = parts.get(_TAG)
        role = names.role(tag.decode("utf-8", "replace")[:80]) if isinstance(tag, bytes) else None
        number = _number(parts)
        if role is None or number is None or role.field not in FIELDS:
            return {}
        if self._orders.setdefault(role.field, role.order) < role.order:
            return {}
        self._orders[role.field] = role.order
        return {role.field: number, **({"set": role.name} if role.field == "eval_loss" else {})}


def _number(parts: Dict[int, Union[int, bytes]]) -> Optional[float]:
    simple = parts.get(_SIMPLE)
    tensor = parts.get(_TENSOR)
    if simple is None and isinstance(tensor, bytes):
        inner = dict(_fields(tensor))
        simple = inner.get(_CONTENT) or inner.get(_FLOATS)
    if not isinstance(simple, bytes) or len(simple) != 4:
        return None
    return float(struct.unpack("<f", simple)[0])


def _fields(data: bytes) -> Iterator[_Field]:
    """The fields of a protocol buffer message; of damaged data, those before the damage."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(kind, len(data) + 1)
        if at + size > len(data):
            return
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> Tuple[int, int]:
    value = 0
    for place, byte in enumerate(data[at : at + 10]):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    return value, len(data) + 1
