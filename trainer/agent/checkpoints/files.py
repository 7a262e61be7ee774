"""Checks whether a file of a checkpoint is complete, and reads little of it. Killed processes leave truncated files.

============  ==================================================================================================
safetensors   8 bytes (little endian): the length of a JSON header, whose ``data_offsets`` say how long the file
              is (https://github.com/huggingface/safetensors#format)
torch.save    a zip whose central directory comes last and names every member with its CRC-32; before torch 1.6,
              and with DeepSpeed's ``checkpoint_serialization: false``, pickles followed by raw storages. Nothing in
              them is imported or run
pickle        ends with its stop sign; ``.metadata`` of torch.distributed.checkpoint contains the names of the files
              with the tensors, which are found as text. Nothing is unpickled
JSON          must parse
============  ==================================================================================================

A ``mark`` distinguishes two files of equal size without reading them completely. It covers the format's checksums, or
else the start, the end and some blocks between. It detects a rewritten file, but not a bad disk.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, Dict, NamedTuple, Optional, Tuple

from ..contract.untrusted import UntrustedError, parse_json, parse_object

HEADER = 100 << 20  # bytes that safetensors allows its header
JSON = 64 << 20  # bytes; a trainer's state after very many steps has a few
DEPTH = 200  # levels of a trainer's JSON
BLOCK = 4 << 10
PLACES = 8  # blocks of a file that its mark covers
TORCH = (".pt", ".pth", ".ckpt", ".bin", ".distcp")
METADATA = 64 << 20  # bytes of ``.metadata`` that are read; it has some hundred for each tensor
_DISTCP = re.compile(rb"__\d{1,7}_\d{1,7}\.distcp")
_STOP = b"."  # a pickle's last byte


class File(NamedTuple):
    """A file of a checkpoint. ``torn`` says what is wrong with it."""

    size: int
    mtime: int  # nanoseconds
    mark: str
    torn: Optional[str]


class TornError(Exception):
    """The file is truncated or damaged. The text says how."""


def look(path: Path) -> Tuple[File, Any]:
    """Examine a file. Returns its facts, and the content of a JSON file or the names in ``.metadata``.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        content = None
        torn = None
        mark = b""
        try:
            if path.name.endswith(".safetensors"):
                mark = _safetensors(file, found.st_size)
            elif path.name.endswith(TORCH):
                mark = _torch(file, found.st_size, path.name.endswith(".distcp"))
            elif path.name.endswith(".pkl"):
                mark = _pickle(file, found.st_size)
            elif path.name == ".metadata":
                _pickle(file, found.st_size)
                content = sorted({name.decode() for name in _DISTCP.findall(os.pread(file.fileno(), METADATA, 0))})
            elif path.name.endswith(".json"):
                content, mark = _json(file, found.st_size)
        except TornError as error:
            torn = str(error)
        digest = hashlib.sha256(mark or _places(file, found.st_size)).hexdigest()[:16]
        return File(found.st_size, found.st_mtime_ns, digest, torn), content


def _places(file: BinaryIO, size: int) -> bytes:
    """Read the first block, the last one, and blocks at equal distances between them."""
    last = max(0, size - BLOCK)
    places = sorted({last * number // (PLACES - 1) for number in range(PLACES)})
    return b"".join(os.pread(file.fileno(), BLOCK, place) for place in places)


def _safetensors(file: BinaryIO, size: int) -> bytes:
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= min(HEADER, size - 8):
        raise TornError("its header is truncated")
    header = file.read(length)
    try:
        parsed = parse_object(header, limit=HEADER)
        tensors = {name: at for name, at in parsed.items() if name != "__metadata__"}
        end = max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
    except (ValueError, OverflowError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise TornError("its header is damaged") from error
    if size != 8 + length + end:
        raise TornError("it has %d of %d bytes" % (size, 8 + length + end))
    return header + _places(file, size)


def _torch(file: BinaryIO, size: int, any_content: bool) -> bytes:
    start = file.read(4)
    if start == b"PK\x03\x04":
        return _zip_members(file, size, joined=any_content)
    if any_content:
        return b""
    if start[:1] != b"\x80":
        raise TornError("it does not start like a torch file" if size else "it is empty")
    file.seek(0)
    _check_pickles(file, size)
    return b""


def _pickle(file: BinaryIO, size: int) -> bytes:
    """Check a pickle that may be one of ``torch.save``."""
    if file.read(4) == b"PK\x03\x04":
        return _zip_members(file, size)
    if not size or os.pread(file.fileno(), 1, size - 1) != _STOP:
        raise TornError("its pickle is truncated" if size else "it is empty")
    return b""


def _json(file: BinaryIO, size: int) -> Tuple[Any, bytes]:
    if size > JSON:
        return None, b""
    data = file.read()
    try:
        return parse_json(data, limit=JSON, depth=DEPTH), data
    except UntrustedError as error:
        raise TornError("it is not complete JSON") from error


# What torch.serialization writes first without zip: its magic number and protocol version.
_LEGACY = (0x1950A86A20F9469CFC6C, 1001)
_SIZES = {  # bytes of an element, by the name of the storage's class
    **dict.fromkeys(("ComplexDouble",), 16),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Byte", "Char", "Bool", "Untyped"), 1),
}


_ZIP_END = 22  # bytes of the last record of a zip without a comment; torch writes none


def _zip_members(file: BinaryIO, size: int, *, joined: bool = False) -> bytes:
    """Names, checksums and sizes of the members of a zip.

    ``joined``: several zips may follow one another, as torch.distributed.checkpoint writes a zip for each tensor
    (``_write_item``); then these are the members of the last one.

    Raises:
        TornError: it is truncated or damaged.
    """
    if os.pread(file.fileno(), 4, max(0, size - _ZIP_END)) != b"PK\x05\x06":
        raise TornError("it is truncated: its zip directory is missing")
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            end = archive.start_dir
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, OSError) as error:
        raise TornError("it is truncated: its zip directory is missing") from error
    before = bool(members) and members[0].header_offset > 0 and not joined
    if not members or before or any(one.header_offset + one.compress_size > end for one in members):
        raise TornError("its zip directory does not match the file")
    return repr([(one.filename, one.CRC, one.file_size) for one in members]).encode()


class _Stub:
    """A stand-in for every class in a pickle: nothing of it is imported or run."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> "_Stub":
        return _Stub()

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        """A pickle may fill a list."""

    def extend(self, _: Any) -> None:
        """The same."""

    def add(self, _: Any) -> None:
        """The same, for a set."""


class _Storages(pickle.Unpickler):
    """Reads from torch's pickle only the lengths of the storages that follow it."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.bytes: Dict[str, int] = {}

    def find_class(self, _: str, name: str) -> Any:
        """A stand-in class with that name."""
        return type(name, (_Stub,), {})

    def persistent_load(self, pid: Any) -> Any:
        """Note ``("storage", type, key, place, elements, …)``."""
        if isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage":
            self.bytes[str(pid[2])] = int(pid[4]) * _SIZES[pid[1].__name__.replace("Storage", "")]
        return _Stub()


def _check_pickles(file: BinaryIO, size: int) -> None:
    """Check the length of a file without zip.

    It holds the magic number, the protocol, the system, the object and the keys of its storages. The elements and bytes
    of each storage follow.

    Raises:
        TornError: it is truncated or damaged.
    """
    try:
        begins = (_Storages(file).load(), _Storages(file).load()) == _LEGACY
        _Storages(file).load()
        storages = _Storages(file)
        storages.load()
        keys = _Storages(file).load()
        end = file.tell() + sum(8 + storages.bytes[str(key)] for key in keys)
    except Exception as error:  # a truncated pickle raises nearly anything
        raise TornError("its pickles are truncated") from error
    if not begins or end != size:
        raise TornError("it has %d of %d bytes" % (size, end))
